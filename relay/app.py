"""The composition root: the only module that knows every room. Starts them in order, and drains them at the end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from relay.amqp.approval_consumer import ApprovalConsumer
from relay.api import Relay
from relay.api.server.http_server import Server
from relay.approvals.gate import Gate
from relay.approvals.service import ApprovalService
from relay.chat import ChatSettings
from relay.chat.context import ChatContext, make_chat_context
from relay.clock import Clock, SystemClock
from relay.config import NO_RULE_FOR_USER_EVENTS, Config, sink_modules
from relay.delivery.dispatcher import Dispatcher
from relay.delivery.routing import matching_sinks
from relay.events.build import Origin, relay_event
from relay.imds.client import ImdsClient
from relay.imds.discovery import (
    Instance,
    derive_relay_name,
    derive_scope,
    discover,
    read_boot_id,
    resource_names,
)
from relay.imds.poller import Poller
from relay.ingest.recorder import Recorder, names_this_vm
from relay.outbox import Identity
from relay.outbox.retention import prune_forever
from relay.outbox.sqlite import Store, open_store
from relay.sinks import SinkSettings

DRAIN = 5.0
"""Seconds that what can be sent at the end has to be sent."""
GIVE_UP = 9.0
"""Seconds after which a stop is forced."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Running:
    """A relay that runs, for whoever embeds it: the demo and tests. ``api_port`` is the port that the API listens on."""

    relay: Relay
    poller: Poller
    api_port: int


async def run(config: Config, *, clock: Clock | None = None) -> None:
    """Run until SIGINT or SIGTERM; then drain, and return within ten seconds.

    Raises what keeps a relay from running, ConfigError and StoreError; and, in a group, what ended one that ran: a part
    that fails takes the others with it, since a half-alive relay would be trusted and hear nothing.
    """
    stop, up = asyncio.Event(), asyncio.Event()
    _on_signals(stop.set)
    relay = asyncio.create_task(_live(config, clock or SystemClock(), stop, up), name="relay")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({relay, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not up.is_set():
        relay.cancel()  # stopped while it still waited for the metadata service
    _, unfinished = await asyncio.wait({relay}, timeout=GIVE_UP)
    if unfinished:
        _log.error(
            "the relay did not stop within %g s and is stopped by force; what waits is in the store",
            GIVE_UP,
        )
    elif not relay.cancelled():
        relay.result()


async def _live(config: Config, clock: Clock, stop: asyncio.Event, up: asyncio.Event) -> None:
    async with started(config, clock):
        up.set()
        await stop.wait()
        _log.info("stopping: what can be sent is sent, the rest waits in the store")


@asynccontextmanager
async def started(
    config: Config, clock: Clock, *, boot: Callable[[], str | None] = read_boot_id
) -> AsyncIterator[Running]:
    """A relay that runs inside this context and drains when it is left. ``boot`` names the machine's running boot."""
    if config.has_no_rule_for_user_events:
        _log.warning("%s", NO_RULE_FOR_USER_EVENTS)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(config.api, clock))
        client = await stack.enter_async_context(ImdsClient(config.source, clock))
        instance = await discover(client, clock, required="auto" in (config.scope, config.relay))
        origin = _origin(config, instance)
        identity = Identity(origin.scope, instance.vm_id if instance is not None else None)
        store = await stack.enter_async_context(
            open_store(
                config.store,
                identity,
                clock,
                lambda event: tuple(matching_sinks(event, config.sinks)),
            )
        )
        if not store.trusted:
            _log.warning(
                "the state file is bound to a VM, and which VM this is is not known: approvals are off"
            )
        say = _relay_event_recorder(store, origin, clock)
        store.listeners.write_error_changed.append(lambda reason: _on_store(reason, say))
        ledger = ApprovalService(
            config.approvals,
            origin,
            trusted=store.trusted,
            client_resources=config.api.client_resources,
        )
        chat = make_chat_context(store, ledger, clock, config.api.public_url)
        sinks = {
            settings.name: (
                settings,
                await stack.enter_async_context(_connect(settings, clock, chat)),
            )
            for settings in config.sinks
        }
        dispatcher = Dispatcher(sinks, store, clock, say)
        await dispatcher.start()
        names = resource_names(instance, socket.gethostname()) if instance is not None else None
        poller, gate = await _source_and_gate(
            config, client, store, ledger, clock, names=names, boot=boot(), say=say
        )
        chat.decisions.attach(gate.submit)
        chats = {
            name: sink
            for name, (settings, sink) in sinks.items()
            if isinstance(settings, ChatSettings)
        }
        relay = Relay(
            store=store,
            gate=gate,
            dispatcher=dispatcher,
            source=poller,
            origin=origin,
            clock=clock,
            chats=chats,
        )
        _log.info(
            "relay %s of scope %s runs; the API listens on %s",
            origin.relay,
            origin.scope,
            server.address,
        )
        doors = (
            [
                ApprovalConsumer(
                    config.approvals.amqp,
                    config.approvals_exchange,
                    config.api.clients,
                    relay,
                    server.rejections,
                )
            ]
            if config.approvals.amqp
            else []
        )
        async with _tasks(poller, gate, dispatcher, store, clock, doors):
            server.attach(relay)
            yield Running(relay, poller, server.port)
            server.detach()


@asynccontextmanager
async def _tasks(
    poller: Poller,
    gate: Gate,
    dispatcher: Dispatcher,
    store: Store,
    clock: Clock,
    doors: Sequence[ApprovalConsumer],
) -> AsyncIterator[None]:
    """Everything that runs at the side. None of it lives without the others; at the end sinks have a moment to send."""
    async with asyncio.TaskGroup() as group:
        source = [
            group.create_task(poller.run(), name="source"),
            group.create_task(prune_forever(store, clock), name="retention"),
            *(group.create_task(door.run(), name="approvals over AMQP") for door in doors),
        ]
        approvals = group.create_task(gate.run(), name="approvals")
        delivery = group.create_task(dispatcher.run(), name="delivery")
        try:
            yield
        finally:
            for task in source:
                task.cancel()
            await gate.wait_until_idle(DRAIN / 2)
            approvals.cancel()
            if poller.last_read_at is not None:
                moment = poller.last_read_at
                store.submit(lambda tx: tx.set_last_read(moment), fail_open=True)
            try:
                async with asyncio.timeout(DRAIN):
                    await dispatcher.drain()
            except TimeoutError:
                _log.warning("not everything could be sent; the rest waits in the store")
            delivery.cancel()


async def _source_and_gate(
    config: Config,
    client: ImdsClient,
    store: Store,
    ledger: ApprovalService,
    clock: Clock,
    *,
    names: frozenset[str] | None,
    boot: str | None,
    say: Callable[[str, str | None, str, int], None],
) -> tuple[Poller, Gate]:
    def names_us(resources: Sequence[str]) -> bool:
        return names is None or names_this_vm(resources, names)

    last_read = await store.transact(lambda tx: tx.take_last_read(), fail_open=True)
    poller = Poller(
        config.source,
        client,
        Recorder(ledger.origin, boot, names),
        store,
        clock,
        report=say,
        last_read_at=last_read,
    )
    gate = Gate(ledger, store, poller, clock, names_us)
    return poller, gate


def _connect(
    settings: SinkSettings, clock: Clock, chat: ChatContext
) -> AbstractAsyncContextManager[Any]:
    member = sink_modules()[settings.kind]
    found: AbstractAsyncContextManager[Any] = (
        member.connect(settings, clock, chat)
        if isinstance(settings, ChatSettings)
        else member.connect(settings, clock)
    )
    return found


def _origin(config: Config, instance: Instance | None) -> Origin:
    scope = (
        derive_scope(instance) if config.scope == "auto" and instance is not None else config.scope
    )
    relay = (
        derive_relay_name(instance)
        if config.relay == "auto" and instance is not None
        else config.relay
    )
    return Origin(scope, relay)


def _relay_event_recorder(
    store: Store, origin: Origin, clock: Clock
) -> Callable[[str, str | None, str, int], None]:
    def say(name: str, sink: str | None, reason: str, count: int) -> None:
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
        future.add_done_callback(lambda done: done.cancelled() or done.exception())

    return say


def _on_store(reason: str | None, say: Callable[[str, str | None, str, int], None]) -> None:
    if reason is None:
        _log.info("the state file can be written again; what was seen meanwhile is in it")
        return
    _log.error(
        "the state file cannot be written: %s. Notices go out from memory, approvals are refused",
        reason,
    )
    say("relay.store-failing", None, f"the state file cannot be written: {reason}", 1)


def _on_signals(stop: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    for one in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(one, stop)
        except NotImplementedError:  # Windows: only signal.signal, which runs between two bytecodes
            signal.signal(one, lambda *_: loop.call_soon_threadsafe(stop))
