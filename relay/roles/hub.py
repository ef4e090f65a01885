"""The hub of a fleet: its source is the agents, and an agent sends each StartRequest for it.

`start` puts its parts together. `Hub` records what agents report. The dispatcher delivers it to the
sinks. The gate decides, and the `OrderPort` of the hub orders an agent to send the StartRequest.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial

from relay.api.state import Relay
from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import Gate
from relay.approvals.request import DecisionAnswer, DecisionRequest
from relay.clock import Clock
from relay.config import Config
from relay.events.build import Origin
from relay.fleet.hub.hub import Hub
from relay.fleet.routing import HUB
from relay.fleet.settings import HubSettings
from relay.roles.inner_half import RunningRelay, deciding, unusable_message_log
from relay.roles.parts import open_api, open_store_with_log, running
from relay.store import StateFileScopeAndVm


@asynccontextmanager
async def start(config: Config, fleet: HubSettings, clock: Clock) -> AsyncIterator[RunningRelay]:
    origin = Origin(
        HUB if config.scope == "auto" else config.scope,
        socket.gethostname() if config.relay == "auto" else config.relay,
    )
    async with AsyncExitStack() as stack:
        server = await open_api(config, clock, stack)
        owner = StateFileScopeAndVm(origin.scope, None, is_hub=True)
        store, report = await open_store_with_log(config, owner, origin, config.sinks, clock, stack)
        on_unusable = unusable_message_log(server.state.rates.rejections, clock)
        gate: Gate  # a reload makes another

        async def submit(request: DecisionRequest) -> DecisionAnswer:
            await server.state.settled.wait()
            return await gate.submit(request)

        def wake_gate() -> None:
            gate.wake()

        hub = Hub(fleet, origin, store, clock, report, on_unusable, submit, wake_gate)
        await hub.load()
        make_relay = partial(
            Relay,
            store=store,
            source=hub.link,
            origin=origin,
            clock=clock,
            roster=hub.roster,
            hub=hub,
        )

        def enter(config: Config) -> AbstractAsyncContextManager[Relay]:
            nonlocal gate
            assert isinstance(config.fleet, HubSettings)  # noqa: S101  # a change of the role needs a restart
            hub.domains = config.fleet.domains
            engine = ApprovalEngine(
                config.approvals,
                origin,
                trusted=store.trusted,
                client_resources=config.api.resources_by_client_principal,
                count_machines=lambda limit: hub.roster.machines_of_limit(limit, clock.monotonic()),
            )
            # No event is about the machine of the hub. So no StartRequest waits until the sinks
            # were told: the hub can still tell them when the VM stops.
            gate = Gate(engine, store, hub.orders, clock, lambda _: False)
            return deciding(config, server, store, clock, report, gate=gate, make_relay=make_relay)

        name = f"hub {origin.relay} of the fleet {fleet.exchange}"
        running_relay = RunningRelay(config, server, store, clock, report, enter, name)
        is_entered = asyncio.Event()

        async def listen() -> None:
            await is_entered.wait()
            await hub.run()

        stack.callback(hub.save_agents)
        # It listens until the half is left: the results of orders still arrive.
        async with running(hub=listen()), running_relay.entered():
            is_entered.set()
            yield running_relay
