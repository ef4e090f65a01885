"""The receiving end of a queue: a channel, and a buffer of the messages that arrive on it.

The consumer of approvals and both ends of a fleet read from such a buffer. If the channel or the
queue goes away, the buffer gets the error behind the last message, so a reader need not watch them.
"""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from aio_pika import exceptions as amqp
from aiormq.abc import AbstractChannel, DeliveredMessage

from relay.amqp.broker_url import host_port
from relay.amqp.connection import GuardedConnection
from relay.amqp.failures import connection_failure_from_exception
from relay.errors import Deferred

Deliveries: TypeAlias = asyncio.Queue[DeliveredMessage | Deferred]
"""Messages, and at the end the error with which the channel or the queue went away."""
QUEUE_DELETED = 404
"""The status of the error if somebody deleted the queue."""
_FRAMES_PER_MESSAGE = 3


async def open_consuming_channel(
    connection: GuardedConnection, messages_per_turn: int
) -> AbstractChannel:
    """Return an open channel whose buffer takes what is read in one turn of the event loop.

    aio-pika's channels have room for ten frames. A message has three, so only about two are read in
    each turn, and messages wait while other work makes the turns long. Raises Deferred.
    """
    if connection.transport is None:
        raise Deferred(f"the connection to {host_port(connection.url)} was lost")
    return await connection.transport.connection.channel(
        publisher_confirms=False, frame_buffer_size=_FRAMES_PER_MESSAGE * messages_per_turn
    )


def make_delivery_buffer(channel: AbstractChannel, queue: str) -> Deliveries:
    """Return where a consumer of the queue puts messages. It gets the error at the end by itself.

    Call this before the consumer begins: the channel can close at any time.
    """
    deliveries: Deliveries = asyncio.Queue()

    def on_close(closing: asyncio.Future[object]) -> None:
        error = None if closing.cancelled() else closing.exception()
        reason = connection_failure_from_exception(error or amqp.ChannelClosed()).reason
        deliveries.put_nowait(Deferred(f"the channel was closed: {reason}"))

    def on_cancel(_: object) -> None:
        deliveries.put_nowait(Deferred(f"the queue {queue} was deleted", status=QUEUE_DELETED))

    channel.closing.add_done_callback(on_close)
    channel.on_consumer_cancel_callbacks.add(on_cancel)
    return deliveries
