"""A consumer's view of a RabbitMQ, and a sink to look at it with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.amqp import publisher
from relay.clock import SystemClock
from relay.errors import Deferred
from relay.events.cloudevent import CloudEvent
from relay.sinks import Receipt
from relay.sinks.rabbitmq import Settings
from relay.sinks.rabbitmq.sink import RabbitMQ, connect
from tests.eventually import eventually


def settings(url: str | None, exchange: str = "azure.scheduledevents", **fields: Any) -> Settings:
    return Settings.model_validate(
        {"kind": "rabbitmq", "name": "bus", "url": url, "exchange": exchange, **fields}
    )


def content_header(event: CloudEvent, **options: Any) -> bytes:
    properties = publisher.message_properties(event, **options)
    return ContentHeader(body_size=len(event.body), properties=properties).marshal()


def message_properties(event: CloudEvent) -> Basic.Properties:
    """What a consumer reads in the content header of the message."""
    header = ContentHeader()
    header.unmarshal(content_header(event))
    assert isinstance(header.properties, Basic.Properties)
    assert header.body_size == len(event.body)
    return header.properties


def sink(url: str | None, exchange: str, **fields: Any) -> AbstractAsyncContextManager[RabbitMQ]:
    """A sink as the relay opens it."""
    return connect(settings(url, exchange, **fields), SystemClock())


@asynccontextmanager
async def channel(url: str) -> AsyncIterator[AbstractChannel]:
    """A channel of a consumer or of somebody who looks after the broker."""
    async with await aio_pika.connect(url) as connection, connection.channel() as opened:
        yield opened


async def bound(
    broker_channel: AbstractChannel,
    exchange: str,
    *,
    name: str | None = None,
    arguments: dict[str, Any] | None = None,
) -> AbstractQueue:
    """A queue with all messages of the exchange. Without a name it ends with its connection."""
    queue = await broker_channel.declare_queue(
        name, exclusive=name is None, durable=name is not None, arguments=arguments
    )
    await queue.bind(exchange, "#")
    return queue


async def take(queue: AbstractQueue) -> AbstractIncomingMessage:
    """The next message, waited for."""
    message = await eventually(lambda: queue.get(fail=False, no_ack=True))
    assert message is not None
    return message


async def waiting(queue: AbstractQueue) -> list[bytes]:
    bodies = []
    while (message := await queue.get(fail=False, no_ack=True)) is not None:
        bodies.append(message.body)
    return bodies


async def delivered(bus: RabbitMQ, event: CloudEvent) -> Receipt:
    """Deliver as the dispatcher does: again and again, until it works."""

    async def tried() -> Receipt | None:
        try:
            return await bus.deliver(event)
        except Deferred:
            return None

    receipt = await eventually(tried, lambda tried: tried is not None)
    assert isinstance(receipt, Receipt)
    return receipt


async def deferred(bus: RabbitMQ, event: CloudEvent, reason_part: str = "") -> Deferred:
    """Deliver until the failure has these words in its reason, and return the failure."""

    async def failure() -> Deferred:
        try:
            receipt = await bus.deliver(event)
        except Deferred as error:
            return error
        raise AssertionError(f"expected it to be deferred, got {receipt}")

    return await eventually(failure, lambda error: reason_part in error.reason)
