"""A relay without a fleet: it polls, tells, decides, and sends its StartRequests itself.

`start` puts its parts together. The poller records events in the store. The dispatcher delivers
them to the sinks. The gate decides, and sends StartRequests through the client of the poller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from relay.api.server import Server
from relay.api.state import Relay
from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import Gate
from relay.clock import Clock
from relay.config import Config
from relay.config.warnings import start_warnings
from relay.imds.client import ImdsClient
from relay.imds.poller import ImdsStartRequestPort
from relay.ingest import names_this_vm
from relay.roles import RunningRelay
from relay.roles.live_parts import DecidingParts
from relay.roles.parts import (
    DRAIN_TIMEOUT,
    identify_relay,
    make_poller,
    open_store_with_log,
    remember_last_read,
    running_parts,
)
from relay.roles.sink_connections import SinkConnections
from relay.store import StateFileScopeAndVm

_log = logging.getLogger(__name__)


@asynccontextmanager
async def start(
    config: Config, clock: Clock, boot: Callable[[], str | None]
) -> AsyncIterator[RunningRelay]:
    """Start a relay, yield it, and drain it in the end. ``boot`` returns the machine's boot id."""
    for warning in start_warnings(config):
        _log.warning("%s", warning)
    async with AsyncExitStack() as stack:
        # The API listens first: it answers 503 until a relay is attached.
        server = await stack.enter_async_context(
            Server(config.api, clock, state_file=config.store.path)
        )
        client = await stack.enter_async_context(ImdsClient(config.source, clock))
        identity = await identify_relay(config, client, clock)
        origin = identity.origin

        owner = StateFileScopeAndVm(origin.scope, identity.vm_id)
        store, report = await open_store_with_log(config, owner, origin, config.sinks, clock, stack)
        if not store.trusted:
            _log.warning(
                "cannot verify the VM ID, and the state file is bound to one VM: approvals are off"
            )

        approvals = ApprovalEngine(
            config.approvals,
            origin,
            trusted=store.trusted,
            client_resources=config.api.resources_by_client_principal,
        )
        parts = DecidingParts(
            config,
            server=server,
            store=store,
            clock=clock,
            report=report,
            engine=approvals,
            connections=await stack.enter_async_context(SinkConnections(clock)),
        )
        dispatcher = await parts.connect_sinks()

        poller = await make_poller(config, client, identity, boot(), store, clock, report)
        gate = Gate(
            approvals,
            store,
            ImdsStartRequestPort(poller, client),
            clock,
            partial(names_this_vm, resource_names=identity.names),
        )
        parts.polling = (poller, client)
        relay = Relay(
            store=store,
            gate=gate,
            dispatcher=dispatcher,
            source=poller,
            polling=poller,
            origin=origin,
            clock=clock,
            chats=parts.chats,
        )
        relay = parts.attach_gate(gate, relay)
        inputs = {"source": poller.run(), **parts.make_replaceable_input_tasks()}

        async def finish(approvals_task: asyncio.Task[object]) -> None:
            await gate.stop_start_requests(DRAIN_TIMEOUT / 2)
            approvals_task.cancel()
            remember_last_read(store, poller)

        _log.info(
            "relay %s of scope %s runs; the API listens on %s",
            origin.relay,
            origin.scope,
            server.address,
        )
        async with running_parts(inputs, gate.run(), dispatcher, finish) as parts.inputs:
            server.state.attach_relay(relay)
            yield RunningRelay(relay=relay, api_port=server.port, live=parts)
            server.state.detach_relay()
