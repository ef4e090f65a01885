"""A relay without a fleet: it polls, tells, decides, and sends its StartRequests itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
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
from relay.imds.client import ImdsClient
from relay.imds.poller import Poller
from relay.imds.start_request_port import ImdsPort
from relay.ingest.recorder import Recorder
from relay.outbox import StateFileOwner
from relay.outbox.retention import prune_forever
from relay.roles import RunningRelay
from relay.roles.parts import (
    DRAIN_TIMEOUT,
    connect_sinks,
    identify,
    make_approval_consumer,
    open_relay_store,
    open_traces,
    remember_last_read,
    run_tasks,
)

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
        identity = await identify(config, client, clock)
        origin = identity.origin

        owner = StateFileOwner(origin.scope, identity.vm_id)
        traces = await open_traces(config, origin, clock, stack)
        record_span = traces.record if traces is not None else None
        store, record = await open_relay_store(
            config, owner, origin, config.sinks, clock, stack, traces
        )
        if not store.trusted:
            _log.warning(
                "cannot verify the VM ID, and the state file is bound to one VM: approvals are off"
            )

        approvals = ApprovalEngine(
            config.approvals,
            origin,
            trusted=store.trusted,
            client_resources=config.api.resources_by_client,
        )
        chat = make_chat_context(
            store, approvals, clock, config.api.public_url, config.api.rights_by_client
        )
        sinks = await connect_sinks(config.sinks, clock, chat, stack)
        dispatcher = Dispatcher(sinks, store, clock, record, record_span)
        await dispatcher.start()

        poller = Poller(
            config.source,
            client,
            Recorder(origin, boot(), identity.names),
            store,
            clock,
            report=record,
            last_read_at=await store.transact(lambda tx: tx.take_last_read(), fail_open=True),
            on_read=traces.note_read if traces is not None else None,
        )
        gate = Gate(
            approvals,
            store,
            ImdsPort(poller, client),
            clock,
            identity.names_this_vm,
            record_span,
        )
        chat.decisions.attach_gate(gate.submit)
        relay = Relay(
            store=store,
            gate=gate,
            dispatcher=dispatcher,
            source=poller,
            polling=poller,
            origin=origin,
            clock=clock,
            chats={
                name: sink
                for name, (sink_settings, sink) in sinks.items()
                if isinstance(sink_settings, ChatSettings)
            },
        )
        inputs = {
            "source": poller.run(),
            "retention": prune_forever(store, clock, record),
            "secrets": watch_secrets(
                config.sinks, config.api.clients, clock, server.suspend_clients
            ),
        }
        consumer = make_approval_consumer(config, relay, server.state.rejections)
        if consumer is not None:
            relay = replace(relay, approvals_link=consumer)
            inputs["approvals over AMQP"] = consumer.run()

        async def finish(approvals_task: asyncio.Task[object]) -> None:
            await gate.wait_until_idle(DRAIN_TIMEOUT / 2)
            approvals_task.cancel()
            await gate.record_aggregated_refusals()
            remember_last_read(store, poller)

        _log.info(
            "relay %s of scope %s runs; the API listens on %s",
            origin.relay,
            origin.scope,
            server.address,
        )
        async with run_tasks(inputs, gate.run(), dispatcher, finish):
            server.state.attach(relay)
            yield RunningRelay(relay=relay, api_port=server.port)
            server.state.detach()
