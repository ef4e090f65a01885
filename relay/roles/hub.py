"""The hub of a fleet: its source is the agents, and an agent sends each StartRequest for it.

`start` puts its parts together. `Hub` records what agents report. The dispatcher delivers it to the
sinks. The gate decides, and its `OrderPort` orders an agent to send the StartRequest.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from relay.api.server import Server
from relay.api.state import Relay
from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import Gate
from relay.clock import Clock
from relay.config import Config
from relay.config.warnings import start_warnings
from relay.events.build import Origin
from relay.fleet.hub.hub import Hub
from relay.fleet.hub.roster_keeper import SelectedMachineCounter
from relay.fleet.hub.start_orders import OrderPort
from relay.fleet.hub.votes import MachineVotes
from relay.fleet.settings import HubSettings
from relay.fleet.topology import HUB
from relay.roles import RunningRelay
from relay.roles.live_parts import DecidingParts
from relay.roles.parts import (
    DRAIN_TIMEOUT,
    open_store_with_log,
    running_parts,
)
from relay.roles.sink_connections import SinkConnections
from relay.store import StateFileScopeAndVm

_log = logging.getLogger(__name__)


@asynccontextmanager
async def start(config: Config, fleet: HubSettings, clock: Clock) -> AsyncIterator[RunningRelay]:
    """Start a hub, yield it, and drain it in the end."""
    for warning in start_warnings(config):
        _log.warning("%s", warning)
    origin = Origin(
        HUB if config.scope == "auto" else config.scope,
        socket.gethostname() if config.relay == "auto" else config.relay,
    )
    async with AsyncExitStack() as stack:
        # The API listens first: it answers 503 until a relay is attached.
        server = await stack.enter_async_context(
            Server(config.api, clock, state_file=config.store.path)
        )
        owner = StateFileScopeAndVm(origin.scope, None, is_hub=True)
        store, report = await open_store_with_log(config, owner, origin, config.sinks, clock, stack)

        def on_unusable(user: str | None, reason: str) -> None:
            server.state.rejection_log.record_unusable_amqp_message(user, reason, clock.monotonic())

        hub = Hub(fleet, origin, store, clock, report, on_unusable)
        await hub.load()
        approvals = ApprovalEngine(
            config.approvals,
            origin,
            trusted=store.trusted,
            client_resources=config.api.resources_by_client_principal,
            count_machines=SelectedMachineCounter(hub.roster, clock).machines_of_limit,
        )

        def use_domains(changed: Config) -> None:
            if isinstance(changed.fleet, HubSettings):
                hub.use_trust_domains(changed.fleet.domains)

        parts = DecidingParts(
            config,
            server=server,
            store=store,
            clock=clock,
            report=report,
            engine=approvals,
            connections=await stack.enter_async_context(SinkConnections(clock)),
            use_role=use_domains,
            # A second hub of a fleet connects only after the first is gone. Until then it knows no
            # event, so it would refuse the approvals that the first hub can decide.
            before_approvals=hub.link.wait_for_first_connection,
        )
        dispatcher = await parts.connect_sinks()
        port = OrderPort(
            store,
            hub.roster,
            hub.link.send,
            origin,
            clock,
            hub.agents_seeing_current_state,
            is_connected=lambda: hub.link.is_connected,
        )
        # No event is about the machine of the hub. So no StartRequest waits until the sinks were
        # told: the hub can still tell them when the VM stops.
        gate = Gate(approvals, store, port, clock, lambda _: False)
        hub.attach_handlers(port.on_result, MachineVotes(gate.submit, clock), gate.wake)
        relay = Relay(
            store=store,
            gate=gate,
            dispatcher=dispatcher,
            source=hub.link,
            origin=origin,
            clock=clock,
            chats=parts.chats,
            roster=hub.roster,
            hub=hub,
            order_results=port.results,
        )
        relay = parts.attach_gate(gate, relay)

        async def serve() -> None:
            # The results of orders arrive until the gate is idle.
            async with asyncio.TaskGroup() as group:
                group.create_task(hub.run(), name="hub")
                group.create_task(gate.run(), name="approvals")

        async def finish(service: asyncio.Task[object]) -> None:
            await gate.stop_start_requests(DRAIN_TIMEOUT / 2)
            service.cancel()
            hub.save_roster()

        _log.info(
            "hub %s of the fleet %s runs; the API listens on %s",
            origin.relay,
            fleet.exchange,
            server.address,
        )
        async with running_parts(
            parts.make_replaceable_input_tasks(), serve(), dispatcher, finish
        ) as parts.inputs:
            server.state.attach_relay(relay)
            yield RunningRelay(relay=relay, api_port=server.port, live=parts)
            server.state.detach_relay()
