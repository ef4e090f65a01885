"""The inner half of a relay: what follows from its configuration, apart from who the relay is.

A reload leaves it and enters it again, as a stop and a start would: the engine, the gate, the
chats and the other sinks, the dispatcher, the callers, and the consumer of approvals over RabbitMQ.
The store, the listeners of the API and the poller (or the hub) go on. If the new half cannot be
entered, the earlier one is entered again.

Nothing is lost in between. What is recorded waits in the store, and what was decided before the
gate was left is recorded before the next one is in force. A call that can change something waits
for the new half (`ServerState.settled`); a decision that still comes to the gate that was left is
refused with 503. A StartRequest that is in flight is waited for.

`deciding` is the half of a plain relay and of a hub. New sinks have the live events before anything
is decided by new rules. The end goes the other way: what can be sent is sent while the gate still
decides.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from relay.api.callers import caller_for_client
from relay.api.server import Server
from relay.api.settings import Client
from relay.api.state import Relay
from relay.approvals.gate import Gate
from relay.approvals.request import Caller
from relay.chat import ChatSettings
from relay.chat.context import ChatContext
from relay.clock import Clock
from relay.config import Config, load_kinds
from relay.config.model import start_warnings
from relay.delivery.dispatcher import Dispatcher, matching_sinks
from relay.events.build import RecordRelayEvent
from relay.fleet.settings import HubSettings
from relay.imds.poller import Poller
from relay.logs import ThrottledLog
from relay.roles.parts import DRAIN_TIMEOUT, drain, running
from relay.sinks import SinkSettings
from relay.store.retention import prune_forever
from relay.store.sqlite import Store

if TYPE_CHECKING:
    from relay.amqp.approval_consumer import ApprovalConsumer

LEAVE_TIMEOUT = 10.0
"""Seconds for a reload to leave a half: to give sinks time to send, and to cancel their tries."""
CONNECT_TIMEOUT = 30.0
"""Seconds for a sink to connect. It need not reach its destination."""
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class RunningRelay:
    """A started relay, and the inner half that it has now."""

    config: Config
    server: Server
    store: Store
    clock: Clock
    report: RecordRelayEvent
    enter: Callable[[Config], AbstractAsyncContextManager[Relay]]
    """Enters the half of a role."""
    name: str
    poller: Poller | None = None
    """Takes the settings of the source."""
    relay: Relay = field(init=False)

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Enter the half, and leave it in the end. If it fails meanwhile, the body ends with it.

        The API answers for the relay until the body has ended; if it fails, to the end.
        """
        state = self.server.state
        async with asyncio.TaskGroup() as self._group:
            await self._enter(self.config)
            try:
                _log.info("%s runs; the API listens on %s", self.name, self.server.address)
                state.attach_relay(self.relay)
                yield
                state.detach_relay()
            finally:
                await self._leave()
                state.settled.set()

    async def change(self, config: Config) -> None:
        """Leave the half, and enter it with another configuration.

        Raises ConfigError, or what a sink raises; then the earlier configuration is in force. If
        that cannot be entered again, the relay ends.
        """
        state, before = self.server.state, self.config
        use_api = self.server.prepare_reload(config.api)
        if isinstance(self.relay.gate, Gate):
            await self.relay.gate.stop_start_requests(within=math.inf)
        await self._leave()
        try:
            await self._enter(config)
        except Exception:
            await self._enter(before, is_last_resort=True)
            raise
        else:
            use_api()
            self.config = config
        finally:
            state.replace_relay(self.relay)
            state.settled.set()
        if (config.approvals, config.api) != (before.approvals, before.api):
            now = self.clock.now()
            self.store.submit(lambda tx: tx.messages.refresh_all(now), fail_open=True)
        known = set(start_warnings(before))
        for warning in start_warnings(config):
            if warning not in known:
                _log.warning("%s", warning)

    async def _enter(self, config: Config, *, is_last_resort: bool = False) -> None:
        entered: asyncio.Future[Relay] = asyncio.get_running_loop().create_future()
        self._must_leave = asyncio.Event()
        self._task = self._group.create_task(
            self._hold(config, entered, self._must_leave, is_last_resort=is_last_resort),
            name="inner half",
        )
        try:
            self.relay = await asyncio.shield(entered)
        except BaseException:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=LEAVE_TIMEOUT)
            raise

    async def _hold(
        self,
        config: Config,
        entered: asyncio.Future[Relay],
        must_leave: asyncio.Event,
        *,
        is_last_resort: bool,
    ) -> None:
        """Enter a half, and leave it in the same task: contexts of tasks need that."""
        self.store.settings = config.store
        if self.poller is not None:
            self.poller.use_source_settings(config.source)
        try:
            async with (
                self.enter(config) as relay,
                running(retention=prune_forever(self.store, self.clock, self.report)),
            ):
                entered.set_result(relay)
                await must_leave.wait()
        except Exception as error:
            is_entered = entered.done()
            if not is_entered:
                entered.set_exception(error)
            if must_leave.is_set():
                # Nothing depends on it any more. A sink can raise anything while it disconnects.
                _log.exception("a part of the relay ended with an error while it was left")
            elif is_entered or is_last_resort:
                raise

    async def _leave(self) -> None:
        """Leave it. An installed sink can refuse to be canceled: then nobody waits any more."""
        self._must_leave.set()
        _, unfinished = await asyncio.wait({self._task}, timeout=LEAVE_TIMEOUT)
        if unfinished:
            _log.error("the tries of a sink do not end, and go on")


# --- the half that tells and decides


@asynccontextmanager
async def deciding(
    config: Config,
    server: Server,
    store: Store,
    clock: Clock,
    report: RecordRelayEvent,
    *,
    gate: Gate,
    make_relay: Callable[..., Relay],
) -> AsyncIterator[Relay]:
    """Enter the half of a relay that tells and decides."""
    chat = ChatContext(
        store,
        gate.engine,
        clock,
        config.api.public_url,
        gate.submit,
        config.api.rights_by_client_principal,
    )

    async with AsyncExitStack() as stack:
        sinks: dict[str, tuple[SinkSettings, Any]] = {}
        for settings in config.sinks:  # nothing has changed yet if this fails
            more = (chat,) if isinstance(settings, ChatSettings) else ()
            connection = load_kinds().modules[settings.kind].connect(settings, clock, *more)
            sinks[settings.name] = settings, await _enter_in_time(stack, connection)
        dispatcher = Dispatcher(sinks, store, clock, report)
        relay = make_relay(
            gate=gate,
            dispatcher=dispatcher,
            chats={
                name: sink for name, (each, sink) in sinks.items() if isinstance(each, ChatSettings)
            },
        )
        consumer = make_approval_consumer(config, relay, server.state.rates.rejections)
        relay = replace(relay, approvals_link=consumer)

        async def take_approvals() -> None:
            if consumer is not None:
                if relay.hub is not None:
                    # A second hub of a fleet connects only after the first is gone. Until then it
                    # knows no event, so it would refuse what the first hub can decide.
                    await relay.hub.link.wait_for_first_connection()
                await consumer.run()

        async def finish() -> None:
            await gate.stop_start_requests(DRAIN_TIMEOUT / 2)
            await drain(dispatcher)
            if server.state.relay is not None and server.state.relay.gate is gate:
                server.state.settled.clear()  # a half that was left late clears nothing

        # What was submitted before goes to the sinks of before. New ones get what is live.
        store.route = partial(matching_sinks, sinks=config.sinks)
        await dispatcher.begin()
        await stack.enter_async_context(running(delivery=dispatcher.run()))
        stack.enter_context(gate.in_force())
        await stack.enter_async_context(running(gate=gate.run()))
        stack.push_async_callback(finish)
        await stack.enter_async_context(running(approvals=take_approvals()))
        yield relay


async def _enter_in_time(
    stack: AsyncExitStack, connection: AbstractAsyncContextManager[Any]
) -> Any:
    """Connect a sink. Raises what it raises, TimeoutError, and CancelledError of the caller alone.

    Its code, or a library of it, can cancel this task, or drop the cancellation of the caller.
    """
    task = asyncio.current_task()
    assert task is not None  # noqa: S101  # this is a coroutine
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            sink = await stack.enter_async_context(connection)
    except asyncio.CancelledError as error:
        if not task.cancelling():
            raise RuntimeError("a sink cancels its own connection") from error
        raise
    if task.cancelling():
        raise asyncio.CancelledError
    return sink


def unusable_message_log(
    rejections: ThrottledLog, clock: Clock
) -> Callable[[str | None, str], None]:
    """Return what logs an AMQP message that cannot be used. The broker validated its user."""

    def record(user: str | None, reason: str) -> None:
        quoted = ascii(reason[:300])  # it may quote the message
        text = f"a message from {user or 'nobody'!r} was dead-lettered: {quoted}"
        rejections.warning(f"amqp {user}", text, clock.monotonic())

    return record


def make_approval_consumer(
    config: Config, relay: Relay, rejections: ThrottledLog
) -> ApprovalConsumer | None:
    settings = config.approvals.amqp
    if settings is None:
        return None
    # A relay without this section saves the memory of the AMQP libraries.
    from relay.amqp.approval_consumer import ApprovalConsumer  # noqa: PLC0415
    from relay.amqp.topology import approvals_queue  # noqa: PLC0415
    from relay.approvals.amqp_handler import AmqpApprovalHandler  # noqa: PLC0415
    from relay.fleet.routing import hub_approvals_queue  # noqa: PLC0415

    exchange = config.approval_answers_exchange
    queue = approvals_queue(exchange, relay.origin.scope)
    if isinstance(config.fleet, HubSettings):
        queue = hub_approvals_queue(exchange)
    return ApprovalConsumer(
        urls=settings.broker_urls,
        declare=settings.declare,
        queue=queue,
        relay=relay.origin.relay,
        handler=AmqpApprovalHandler(
            callers=callers_by_amqp_user(config.api.clients),
            gate=relay.gate,
            store=relay.store,
            clock=relay.clock,
        ),
        on_unusable=unusable_message_log(rejections, relay.clock),
        clock=relay.clock,
    )


def callers_by_amqp_user(clients: Sequence[Client]) -> dict[str, Caller]:
    return {
        client.amqp_user: caller_for_client(client, "amqp")
        for client in clients
        if client.amqp_user is not None
    }
