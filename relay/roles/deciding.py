"""The inner half of a relay that tells and decides: a plain relay or a hub.

It connects the sinks, delivers to them, decides, and takes approvals from RabbitMQ. The order of
the start is that new sinks have the live events before anything is decided by new rules. The end
goes the other way: what can be sent is sent while the gate still decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
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
from relay.delivery.dispatcher import Dispatcher, matching_sinks
from relay.events.build import RecordRelayEvent
from relay.fleet.settings import HubSettings
from relay.logs import ThrottledLog
from relay.roles.parts import DRAIN_TIMEOUT, drain, running
from relay.sinks import SinkSettings
from relay.store.sqlite import Store

if TYPE_CHECKING:
    from relay.amqp.approval_consumer import ApprovalConsumer

CONNECT_TIMEOUT = 30.0
"""Seconds for a sink to connect. It need not reach its destination."""


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
    before_approvals: Callable[[], Awaitable[object]] | None = None,
) -> AsyncIterator[Relay]:
    """Enter it. ``before_approvals`` is waited for before approvals come from RabbitMQ."""
    chat = ChatContext(
        store,
        gate.engine,
        clock,
        config.api.public_url,
        gate.submit,
        config.api.rights_by_client_principal,
    )

    def connect(settings: SinkSettings) -> AbstractAsyncContextManager[Any]:
        more = (chat,) if isinstance(settings, ChatSettings) else ()
        connection: AbstractAsyncContextManager[Any] = (
            load_kinds().modules[settings.kind].connect(settings, clock, *more)
        )
        return connection

    async with AsyncExitStack() as stack:
        # Nothing has changed yet if this fails.
        sinks: dict[str, tuple[SinkSettings, Any]] = {
            settings.name: (settings, await _enter_in_time(stack, connect(settings)))
            for settings in config.sinks
        }
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
                if before_approvals is not None:
                    await before_approvals()
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


_MAX_REASON_LENGTH = 300  # characters of a reason, which may quote the message


def unusable_message_log(
    rejections: ThrottledLog, clock: Clock
) -> Callable[[str | None, str], None]:
    """Return what logs an AMQP message that cannot be used. The broker validated its user."""

    def record(user: str | None, reason: str) -> None:
        quoted = ascii(reason[:_MAX_REASON_LENGTH])
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
    is_hub = isinstance(config.fleet, HubSettings)

    return ApprovalConsumer(
        urls=settings.broker_urls,
        declare=settings.declare,
        queue=(
            hub_approvals_queue(exchange)
            if is_hub
            else approvals_queue(exchange, relay.origin.scope)
        ),
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
