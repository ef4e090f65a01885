"""The parts that several roles start in the same way.

- Who the relay is: `identify_relay` asks the metadata service of the VM.
- What it records: `open_store_with_log` opens the state file.
- What it reads: `make_poller` and `remember_last_read`, at the start and at the end of polling.
- Approvals over AMQP: `make_approval_consumer`.
- What runs: `running_parts` holds the tasks of all parts, and ends them in
  the right order.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from relay.api.callers import caller_for_client
from relay.api.rates import RejectionLog
from relay.api.settings import Client
from relay.api.state import Relay
from relay.approvals.request import Caller
from relay.clock import Clock
from relay.config import Config
from relay.delivery.dispatcher import Dispatcher, matching_sinks
from relay.events.build import Origin, RecordRelayEvent, relay_event
from relay.events.cloudevent import CloudEvent
from relay.fleet.settings import HubSettings
from relay.imds.client import ImdsClient
from relay.imds.instance_metadata import (
    Instance,
    derive_scope,
    resource_names,
    wait_for_instance_metadata,
)
from relay.imds.poller import Poller
from relay.ingest import Recorder
from relay.sinks import SinkSettings
from relay.store import JournalHead, StateFileScopeAndVm
from relay.store.chain import GENESIS
from relay.store.sqlite import Store, open_store
from relay.telemetry.lines import log_cloud_event, log_recorded_events

if TYPE_CHECKING:
    from relay.amqp.approval_consumer import ApprovalConsumer

DRAIN_TIMEOUT = 5.0
"""How long sinks may still send when the relay stops."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this relay is. ``instance`` is its VM, None if the metadata service does not tell."""

    origin: Origin
    """Its scope and its name, as its events state them."""
    instance: Instance | None
    names: frozenset[str] | None
    """The names by which events refer to this VM, in lower case; None if they are unknown."""

    @property
    def vm_id(self) -> str | None:
        """The vmId of this VM; None if it is unknown."""
        return self.instance.vm_id if self.instance is not None else None


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
    """Return the store of a relay with these sinks, until ``stack`` is left.

    With it, return what records ``relay.*`` events in it. The log tells what it records. ``owner``
    is whose state file it must be.
    """
    route = partial(matching_sinks, sinks=tuple(sinks))
    store = await stack.enter_async_context(open_store(config.store, owner, clock, route))
    store.listeners.recorded.append(log_recorded_events)
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

    def record(name: str, reason: str, *, sink: str | None = None, count: int = 1) -> None:
        at = clock.now()

        def build(head: JournalHead) -> CloudEvent:
            return relay_event(
                name, origin, at, sink=sink, reason=reason, count=count, head=str(head)
            )

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
    boot_id: str | None,
    store: Store,
    clock: Clock,
    report: RecordRelayEvent,
) -> Poller:
    """Return the poller of this VM. It knows when the process before it has read last."""
    return Poller(
        config.source,
        client,
        Recorder(identity.origin, boot_id, identity.names),
        store,
        clock,
        report=report,
        last_read_at=await store.transact(
            lambda tx: tx.pop_last_read_at_of_previous_run(), fail_open=True
        ),
    )


def remember_last_read(store: Store, poller: Poller) -> None:
    """Store when the poller read last: the next start tells from it whether polling paused."""
    last_read = poller.last_read_at
    if last_read is not None:
        store.submit(lambda tx: tx.set_last_read_at(last_read), fail_open=True)


def make_approval_consumer(
    config: Config, relay: Relay, rejections: RejectionLog, callers: Mapping[str, Caller]
) -> ApprovalConsumer | None:
    """Return the consumer of approvals over AMQP; None if the configuration has no such section.

    ``callers`` are the clients by their RabbitMQ user. The consumer reads them at each message.
    """
    settings = config.approvals.amqp
    if settings is None:
        return None
    # A relay without this section saves the memory of the AMQP libraries.
    from relay.amqp.approval_consumer import ApprovalConsumer  # noqa: PLC0415
    from relay.amqp.topology import describe_approvals_queue_of_scope  # noqa: PLC0415
    from relay.approvals.amqp_handler import AmqpApprovalHandler  # noqa: PLC0415
    from relay.fleet.topology import make_hub_approvals_queue  # noqa: PLC0415

    exchange = config.approval_answers_exchange
    is_hub = isinstance(config.fleet, HubSettings)

    def on_unusable(user: str | None, reason: str) -> None:
        rejections.record_unusable_amqp_message(user, reason, relay.clock.monotonic())

    return ApprovalConsumer(
        urls=settings.broker_urls,
        declare=settings.declare,
        queue=(
            make_hub_approvals_queue(exchange)
            if is_hub
            else describe_approvals_queue_of_scope(exchange, relay.origin.scope)
        ),
        relay=relay.origin.relay,
        handler=AmqpApprovalHandler(
            callers=callers,
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


class InputTasks:
    """The tasks that end first when the relay stops. A reload replaces some of them."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: dict[str, asyncio.Task[object]] = {}

    def start_task(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        """Run a task of this name. If it fails, the relay ends."""
        self._tasks[name] = self._group.create_task(work, name=name)

    async def stop_task(self, name: str) -> None:
        """End the task of this name, if there is one."""
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def replace_task(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        """Run another task in the place of that of this name."""
        await self.stop_task(name)
        self.start_task(name, work)

    async def run_task_until_done(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        """Return when some work is done. If it fails, the relay ends. Raises what it raises."""
        task = self._group.create_task(work, name=name)
        try:
            await asyncio.wait({task})
            task.result()
        finally:
            task.cancel()

    def cancel(self) -> None:
        """End all tasks soon."""
        for task in self._tasks.values():
            task.cancel()


@asynccontextmanager
async def running_parts(
    inputs: Mapping[str, Coroutine[Any, Any, object]],
    service: Coroutine[Any, Any, object],
    dispatcher: Dispatcher,
    finish: Callable[[asyncio.Task[object]], Awaitable[None]],
) -> AsyncIterator[InputTasks]:
    """Run the tasks of all parts. If one fails, all end. In the end, give sinks time to send.

    ``inputs``, by name, end first. Then ``finish`` gets the task of the ``service``, which may end
    there, and ends after the sinks at the latest.
    """
    async with asyncio.TaskGroup() as group:
        running_inputs = InputTasks(group)
        for name, work in inputs.items():
            running_inputs.start_task(name, work)
        service_task = group.create_task(service, name="service")
        delivery = group.create_task(dispatcher.run(), name="delivery")
        try:
            yield running_inputs
        finally:
            running_inputs.cancel()
            await finish(service_task)
            try:
                async with asyncio.timeout(DRAIN_TIMEOUT):
                    await dispatcher.drain()
            except TimeoutError:
                _log.warning("not everything could be sent; the store keeps the rest")
            delivery.cancel()
            service_task.cancel()
