"""The parts that several roles start in the same way."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from relay.api.server import Server
from relay.clock import Clock
from relay.config import Config
from relay.delivery.dispatcher import Dispatcher, matching_sinks
from relay.events.build import Origin, RecordRelayEvent, relay_event
from relay.events.cloudevent import CloudEvent
from relay.imds.client import ImdsClient
from relay.imds.instance_metadata import (
    Instance,
    derive_scope,
    read_boot_id,
    resource_names,
    wait_for_instance_metadata,
)
from relay.imds.poller import Poller
from relay.ingest import Recorder
from relay.sinks import SinkSettings
from relay.store import JournalHead, RecordedEvent, StateFileScopeAndVm
from relay.store.journal import GENESIS
from relay.store.sqlite import Store, open_store
from relay.telemetry.lines import log_cloud_event, log_recorded_events

DRAIN_TIMEOUT = 5.0
"""How long sinks may still send when the relay stops."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this relay is. ``instance`` is its VM, None if the metadata service does not tell."""

    origin: Origin
    instance: Instance | None
    names: frozenset[str] | None
    """The names by which events refer to this VM, in lower case; None if they are unknown."""

    @property
    def vm_id(self) -> str | None:
        return self.instance.vm_id if self.instance is not None else None


async def open_api(config: Config, clock: Clock, stack: AsyncExitStack) -> Server:
    """Return the server, which listens first: it answers 503 until a relay is attached."""
    return await stack.enter_async_context(Server(config.api, clock, state_file=config.store.path))


async def identify_relay(config: Config, client: ImdsClient, clock: Clock) -> Identity:
    """Find out which VM this is. It waits for the metadata service."""
    instance = await wait_for_instance_metadata(
        client, clock, required="auto" in (config.scope, config.relay)
    )
    scope, relay, names = config.scope, config.relay, None
    if instance is not None:
        scope = derive_scope(instance) if scope == "auto" else scope
        relay = instance.name if relay == "auto" else relay
        names = resource_names(instance, socket.gethostname())
    return Identity(origin=Origin(scope, relay), instance=instance, names=names)


async def open_store_with_log(
    config: Config,
    owner: StateFileScopeAndVm,
    origin: Origin,
    sinks: Iterable[SinkSettings],
    clock: Clock,
    stack: AsyncExitStack,
) -> tuple[Store, RecordRelayEvent]:
    """Return the store, until ``stack`` is left, and what records ``relay.*`` events in it."""
    route = partial(matching_sinks, sinks=tuple(sinks))
    store = await stack.enter_async_context(open_store(config.store, owner, clock, route))
    loop = asyncio.get_running_loop()

    def log_after_deliveries_began(events: Sequence[RecordedEvent]) -> None:
        loop.call_later(0, log_recorded_events, events)  # a timer runs after all that is ready

    store.listeners.recorded.append(log_after_deliveries_began)
    record = make_relay_event_recorder(store, origin, clock)

    def report_write_error_change(reason: str | None) -> None:
        if reason is None:
            _log.info("the state file can be written again; it holds what happened meanwhile")
        else:
            record("relay.store-failing", f"the state file cannot be written: {reason}")

    store.listeners.write_error_changed.append(report_write_error_change)
    return store, record


def make_relay_event_recorder(store: Store, origin: Origin, clock: Clock) -> RecordRelayEvent:
    """Return what records ``relay.*`` events. It does not wait until they are on disk."""

    def record(
        name: str, reason: str, *, sink: str | None = None, count: int = 1, scope: str | None = None
    ) -> None:
        at = clock.now()
        of = origin if scope is None else origin.copy_for_scope(scope)

        def build(head: JournalHead) -> CloudEvent:
            return relay_event(name, of, at, sink=sink, reason=reason, count=count, head=str(head))

        def tell_unrecorded(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and done.exception() is not None:
                log_cloud_event(build(GENESIS), None)

        recorded = store.submit(lambda tx: tx.record(build(tx.head()), at), fail_open=True)
        recorded.add_done_callback(tell_unrecorded)

    return record


async def make_poller(
    config: Config,
    client: ImdsClient,
    identity: Identity,
    store: Store,
    clock: Clock,
    report: RecordRelayEvent,
) -> Poller:
    """Return the poller of this VM. It knows when the process before it has read last."""
    return Poller(
        config.source,
        client,
        Recorder(identity.origin, read_boot_id(), identity.names),
        store,
        clock,
        report=report,
        last_read_at=await store.transact(
            lambda tx: tx.pop_last_read_at_of_previous_run(), fail_open=True
        ),
    )


@asynccontextmanager
async def polling(poller: Poller, store: Store) -> AsyncIterator[None]:
    """Poll. In the end, store when: the next start tells from it whether polling paused."""
    try:
        async with running(source=poller.run()):
            yield
    finally:
        if (last_read := poller.last_read_at) is not None:
            store.submit(lambda tx: tx.set_last_read_at(last_read), fail_open=True)


@asynccontextmanager
async def running(**works: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run tasks, which are canceled in the end. If one fails, the body ends with it."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work, name=name) for name, work in works.items()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def drain(dispatcher: Dispatcher) -> None:
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT):
            await dispatcher.drain()
    except TimeoutError:
        _log.warning("not everything could be sent; the store keeps the rest")
