"""The hub of a fleet: its source is the agents, and an agent sends each StartRequest for it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from relay.api import Relay
from relay.api.server.http_server import Server
from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import Gate
from relay.chat import ChatSettings
from relay.chat.context import make_chat_context
from relay.clock import Clock
from relay.config import Config
from relay.config.shared_secrets import watch_secrets
from relay.config.warnings import start_warnings
from relay.delivery.dispatcher import Dispatcher
from relay.events.build import Origin
from relay.fleet.hub.hub import Hub
from relay.fleet.hub.machine_counts import MachineCounts
from relay.fleet.hub.start_orders import OrderPort
from relay.fleet.hub.votes import MachineVotes
from relay.fleet.settings import HubSettings
from relay.fleet.topology import HUB
from relay.outbox import StateFileOwner
from relay.outbox.retention import prune_forever
from relay.roles import RunningRelay
from relay.roles.parts import (
    DRAIN_TIMEOUT,
    connect_sinks,
    make_approval_consumer,
    open_relay_store,
    open_traces,
    run_tasks,
)

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
        owner = StateFileOwner(origin.scope, None, is_hub=True)
        traces = await open_traces(config, origin, clock, stack)
        record_span = traces.record if traces is not None else None
        store, record = await open_relay_store(
            config, owner, origin, config.sinks, clock, stack, traces
        )

        def on_unusable(user: str | None, reason: str) -> None:
            server.state.rejections.record_unusable_message(user, reason, clock.monotonic())

        hub = Hub(fleet, origin, store, clock, record, on_unusable)
        await hub.load()
        approvals = ApprovalEngine(
            config.approvals,
            origin,
            trusted=store.trusted,
            client_resources=config.api.resources_by_client,
            count_machines=MachineCounts(hub.roster, clock).count,
        )
        chat = make_chat_context(
            store, approvals, clock, config.api.public_url, config.api.rights_by_client
        )
        sinks = await connect_sinks(config.sinks, clock, chat, stack)
        dispatcher = Dispatcher(sinks, store, clock, record, record_span)
        await dispatcher.start()
        port = OrderPort(
            store,
            hub.roster,
            hub.link,
            origin,
            clock,
            hub.agents_showing,
            is_connected=lambda: hub.link.is_connected,
        )
        # An agent tells what it knows before it sends a StartRequest: nothing of the hub is at
        # stake when a VM stops.
        gate = Gate(approvals, store, port, clock, lambda _: False, record_span)
        chat.decisions.attach_gate(gate.submit)
        hub.attach(port, MachineVotes(gate.submit, clock), gate.wake)
        relay = Relay(
            store=store,
            gate=gate,
            dispatcher=dispatcher,
            source=hub.source,
            origin=origin,
            clock=clock,
            chats={
                name: sink
                for name, (sink_settings, sink) in sinks.items()
                if isinstance(sink_settings, ChatSettings)
            },
            roster=hub.roster,
            hub=hub,
            order_results=port.results,
        )
        inputs = {
            "retention": prune_forever(store, clock, record),
            "secrets": watch_secrets(
                config.sinks, config.api.clients, clock, server.suspend_clients
            ),
        }
        consumer = make_approval_consumer(config, relay, server.state.rejections)
        if consumer is not None:
            approvals_in = consumer
            relay = replace(relay, approvals_link=consumer)

            async def take_approvals() -> None:
                # A second hub knows no event, and would refuse what is for the first.
                await hub.link.wait_until_connected()
                await approvals_in.run()

            inputs["approvals over AMQP"] = take_approvals()

        async def serve() -> None:
            # The results of orders arrive until the gate is idle.
            async with asyncio.TaskGroup() as group:
                group.create_task(hub.run(), name="hub")
                group.create_task(gate.run(), name="approvals")

        async def finish(service: asyncio.Task[object]) -> None:
            await gate.wait_until_idle(DRAIN_TIMEOUT / 2)
            service.cancel()
            await gate.record_aggregated_refusals()
            hub.save()

        _log.info(
            "hub %s of the fleet %s runs; the API listens on %s",
            origin.relay,
            fleet.exchange,
            server.address,
        )
        async with run_tasks(inputs, serve(), dispatcher, finish):
            server.state.attach(relay)
            yield RunningRelay(relay=relay, api_port=server.port)
            server.state.detach()
