"""The composition root: starts the parts of the relay in order, and drains them at the end.

It is the only module that knows every part. It decides nothing about events or approvals.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from relay.api import Client, Relay
from relay.api.auth.authentication import caller_for_client
from relay.api.auth.rejection_log import RejectionLog
from relay.api.server.http_server import Server
from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import Gate
from relay.approvals.request import Caller
from relay.chat import ChatSettings
from relay.chat.context import ChatContext, make_chat_context
from relay.clock import Clock, SystemClock
from relay.config import NO_RULE_FOR_USER_EVENTS, Config, sink_modules
from relay.config.shared_secrets import watch_secrets
from relay.delivery.dispatcher import Dispatcher
from relay.delivery.routing import matching_sinks
from relay.events.build import Origin, ReportRelayEvent, relay_event
from relay.imds.client import ImdsClient
from relay.imds.discovery import (
    Instance,
    derive_scope,
    discover,
    read_boot_id,
    resource_names,
)
from relay.imds.poller import Poller
from relay.ingest.recorder import Recorder, names_this_vm
from relay.outbox import StateFileOwner
from relay.outbox.retention import prune_forever
from relay.outbox.sqlite import Store, open_store
from relay.service_manager import report_to_service_manager
from relay.sinks import SinkSettings

if TYPE_CHECKING:
    from relay.amqp.approval_consumer import ApprovalConsumer

DRAIN_TIMEOUT = 5.0
"""How long sinks may still send when the relay stops."""
STOP_TIMEOUT = 9.0
"""When a stop is forced. A service manager waits ten seconds."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRelay:
    """A started relay, for the demo and for tests."""

    relay: Relay
    poller: Poller
    api_port: int
    """The port on which the API listens."""


async def run(config: Config, *, clock: Clock | None = None) -> None:
    """Run until SIGINT or SIGTERM; then drain, and return within ten seconds.

    Raises ConfigError or StoreError if the relay cannot start. Raises an ExceptionGroup if a part
    of a running relay fails: the other parts end with it, because half a relay would be trusted
    and do nothing.
    """
    stop = asyncio.Event()
    is_up = asyncio.Event()

    async def run_until_stopped() -> None:
        async with (
            report_to_service_manager(is_up, stop),
            start_relay(config, clock or SystemClock()),
        ):
            # What the start made stays. With it, a full collection would take 25 ms each time.
            gc.collect()
            gc.freeze()
            # A burst makes many objects that live until they are delivered. The default, 700, looks
            # at them again and again, which is 5 % of a delivery's CPU time.
            gc.set_threshold(10_000)
            is_up.set()
            await stop.wait()
            _log.info("stopping: the relay sends what it can, the store keeps the rest")

    _call_on_stop_signals(stop.set)
    relay = asyncio.create_task(run_until_stopped(), name="relay")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({relay, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not is_up.is_set():
        relay.cancel()  # it may still wait for the metadata service
    _, unfinished = await asyncio.wait({relay}, timeout=STOP_TIMEOUT)
    if unfinished:
        _log.error(
            "the relay did not stop within %g s and is stopped by force; the store keeps "
            "everything that waits",
            STOP_TIMEOUT,
        )
    elif not relay.cancelled():
        relay.result()


@asynccontextmanager
async def start_relay(
    config: Config, clock: Clock, *, boot: Callable[[], str | None] = read_boot_id
) -> AsyncIterator[RunningRelay]:
    """Start a relay, yield it, and drain it in the end. ``boot`` returns the machine's boot id."""
    if config.has_no_rule_for_user_events:
        _log.warning("%s", NO_RULE_FOR_USER_EVENTS)
    async with AsyncExitStack() as stack:
        # The API listens first: it answers 503 until a relay is attached.
        server = await stack.enter_async_context(Server(config.api, clock))
        client = await stack.enter_async_context(ImdsClient(config.source, clock))
        instance = await discover(client, clock, required="auto" in (config.scope, config.relay))
        names = resource_names(instance, socket.gethostname()) if instance is not None else None
        origin = _determine_origin(config, instance)

        owner = StateFileOwner(origin.scope, instance.vm_id if instance is not None else None)
        store = await stack.enter_async_context(
            open_store(
                config.store,
                owner,
                clock,
                partial(matching_sinks, sinks=config.sinks),
            )
        )
        if not store.trusted:
            _log.warning(
                "cannot verify the VM ID, and the state file is bound to one VM: approvals are off"
            )
        record = relay_event_recorder(store, origin, clock)
        store.listeners.write_error_changed.append(
            lambda reason: _report_write_error(reason, record)
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
        sinks = await _connect_sinks(config.sinks, clock, chat, stack)
        dispatcher = Dispatcher(sinks, store, clock, record)
        await dispatcher.start()

        poller = Poller(
            config.source,
            client,
            Recorder(origin, boot(), names),
            store,
            clock,
            report=record,
            last_read_at=await store.transact(lambda tx: tx.take_last_read(), fail_open=True),
        )
        gate = Gate(
            approvals,
            store,
            poller,
            clock,
            # If the names of this VM are unknown, every event may be about it.
            partial(names_this_vm, resource_names=names) if names is not None else lambda _: True,
        )
        chat.decisions.attach_gate(gate.submit)
        relay = Relay(
            store=store,
            gate=gate,
            dispatcher=dispatcher,
            source=poller,
            origin=origin,
            clock=clock,
            chats={
                name: sink
                for name, (sink_settings, sink) in sinks.items()
                if isinstance(sink_settings, ChatSettings)
            },
        )
        consumer = make_approval_consumer(config, relay, server.state.rejections)

        _log.info(
            "relay %s of scope %s runs; the API listens on %s",
            origin.relay,
            origin.scope,
            server.address,
        )
        watching = watch_secrets(config.sinks, config.api.clients, clock, server.suspend_clients)
        async with _run_tasks(poller, gate, dispatcher, store, clock, consumer, record, watching):
            server.state.attach(relay)
            yield RunningRelay(relay=relay, poller=poller, api_port=server.port)
            server.state.detach()


def _determine_origin(config: Config, instance: Instance | None) -> Origin:
    scope, relay = config.scope, config.relay
    if instance is not None:
        scope = derive_scope(instance) if scope == "auto" else scope
        relay = instance.name if relay == "auto" else relay
    return Origin(scope, relay)


def relay_event_recorder(store: Store, origin: Origin, clock: Clock) -> ReportRelayEvent:
    """Return what records ``relay.*`` events. It does not wait until they are on disk."""

    def record(name: str, reason: str, *, sink: str | None = None, count: int = 1) -> None:
        at = clock.now()
        future = store.submit(
            lambda tx: tx.record(
                relay_event(
                    name, origin, at, sink=sink, reason=reason, count=count, head=str(tx.head())
                ),
                at,
            ),
            fail_open=True,
        )
        # asyncio logs an exception that nobody retrieves; the store has reported this one.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())

    return record


def _report_write_error(reason: str | None, record: ReportRelayEvent) -> None:
    """Report that the store cannot be written (``reason``), or can be written again (None)."""
    if reason is None:
        _log.info("the state file can be written again; it holds what happened meanwhile")
        return
    _log.error(
        "the state file cannot be written: %s. Notices go out from memory, approvals are refused",
        reason,
    )
    record("relay.store-failing", f"the state file cannot be written: {reason}")


async def _connect_sinks(
    all_settings: Sequence[SinkSettings], clock: Clock, chat: ChatContext, stack: AsyncExitStack
) -> dict[str, tuple[SinkSettings, Any]]:
    sinks: dict[str, tuple[SinkSettings, Any]] = {}
    for settings in all_settings:
        module = sink_modules()[settings.kind]
        connection: AbstractAsyncContextManager[Any]
        if isinstance(settings, ChatSettings):
            connection = module.connect(settings, clock, chat)
        else:
            connection = module.connect(settings, clock)
        sinks[settings.name] = (settings, await stack.enter_async_context(connection))
    return sinks


def make_approval_consumer(
    config: Config, relay: Relay, rejections: RejectionLog
) -> ApprovalConsumer | None:
    """Return the consumer of approvals over AMQP; None if the configuration has no such section."""
    settings = config.approvals.amqp
    if settings is None:
        return None
    # A relay without this section saves the memory of the AMQP libraries.
    from relay.amqp.approval_consumer import ApprovalConsumer  # noqa: PLC0415
    from relay.approvals.amqp_handler import AmqpApprovalHandler  # noqa: PLC0415

    def on_unusable(user: str | None, reason: str) -> None:
        rejections.record_unusable_message(user, reason, relay.clock.monotonic())

    return ApprovalConsumer(
        urls=settings.targets,
        declare=settings.declare,
        exchange=config.approvals_exchange,
        scope=relay.origin.scope,
        relay=relay.origin.relay,
        handler=AmqpApprovalHandler(
            callers=callers_by_amqp_user(config.api.clients),
            gate=relay.gate,
            store=relay.store,
            clock=relay.clock,
        ),
        on_unusable=on_unusable,
        clock=relay.clock,
    )


def callers_by_amqp_user(clients: Sequence[Client]) -> dict[str, Caller]:
    """Return the clients that have a RabbitMQ user, by that user."""
    return {
        client.amqp_user: caller_for_client(client, "amqp")
        for client in clients
        if client.amqp_user is not None
    }


@asynccontextmanager
async def _run_tasks(
    poller: Poller,
    gate: Gate,
    dispatcher: Dispatcher,
    store: Store,
    clock: Clock,
    consumer: ApprovalConsumer | None,
    record: ReportRelayEvent,
    watching: Coroutine[Any, Any, NoReturn],
) -> AsyncIterator[None]:
    """Run the tasks of all parts. If one fails, all end. In the end, give sinks time to send."""
    async with asyncio.TaskGroup() as group:
        inputs = [
            group.create_task(poller.run(), name="source"),
            group.create_task(prune_forever(store, clock, record), name="retention"),
            group.create_task(watching, name="secrets"),
        ]
        if consumer is not None:
            inputs.append(group.create_task(consumer.run(), name="approvals over AMQP"))
        approvals = group.create_task(gate.run(), name="approvals")
        delivery = group.create_task(dispatcher.run(), name="delivery")
        try:
            yield
        finally:
            for task in inputs:
                task.cancel()
            await gate.wait_until_idle(DRAIN_TIMEOUT / 2)
            approvals.cancel()
            await gate.record_aggregated_refusals()
            last_read = poller.last_read_at
            if last_read is not None:  # the next start tells from it whether polling paused
                store.submit(lambda tx: tx.set_last_read(last_read), fail_open=True)
            try:
                async with asyncio.timeout(DRAIN_TIMEOUT):
                    await dispatcher.drain()
            except TimeoutError:
                _log.warning("not everything could be sent; the store keeps the rest")
            delivery.cancel()


def _call_on_stop_signals(stop: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stop)
        except NotImplementedError:
            # Windows has only signal.signal, whose handlers must not touch the loop directly.
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))
