"""A channel with publisher confirms, for many messages in flight at once."""

from __future__ import annotations

import asyncio
from typing import cast

import aiormq
from aio_pika.abc import AbstractChannel
from pamqp.commands import Basic

from relay.amqp.connection import Connection

PublishResult = aiormq.abc.ConfirmationFrameType | BaseException | None
"""What aiormq returned or raised for one message."""

MAX_UNTAKEN_RESULTS = 64
"""Results that are kept until a delivery takes them.

A worker has at most as many open deliveries. The event of an older result was superseded, or became
a dead letter.
"""


class PublishChannel:
    """An open channel, the messages in flight on it, and the results that nobody took yet."""

    def __init__(
        self,
        connection: Connection,
        channel: AbstractChannel,
        aiormq_channel: aiormq.Channel,
        exchange: str,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.close_reason: BaseException | None = None
        """What closed the channel."""
        self._connection = connection
        self._channel = channel
        self._aiormq_channel = aiormq_channel
        self._exchange = exchange
        self._tasks = tasks
        self._publishes: dict[str, asyncio.Task[PublishResult]] = {}
        self._untaken: dict[str, None] = {}  # ids of publishes that are done, the oldest first
        channel.close_callbacks.add(self._on_close)

    @classmethod
    async def open(
        cls, connection: Connection, exchange: str, tasks: asyncio.TaskGroup
    ) -> PublishChannel:
        """Open a channel. Publishes run as tasks of the group."""
        channel = connection.channel(on_return_raises=True)
        await channel.initialize()
        aiormq_channel = cast("aiormq.Channel", await channel.get_underlay_channel())
        return cls(connection, channel, aiormq_channel, exchange, tasks)

    @property
    def is_closed(self) -> bool:
        """Whether the channel is closed. This is true before `wait_closed` returns."""
        return self._channel.is_closed

    def _on_close(self, _: object, error: BaseException | None) -> None:
        self.close_reason = error

    async def wait_unblocked(self) -> None:
        """Wait while the broker blocks publishers, as under a memory or disk alarm."""
        if self._connection.transport is not None:
            await self._connection.transport.ready()

    def current_publish(self, message_id: str) -> asyncio.Task[PublishResult] | None:
        """Return the publish of this message if nobody took its result yet. It may be done."""
        return self._publishes.get(message_id)

    def start_publish(
        self, message_id: str, body: bytes, routing_key: str, properties: Basic.Properties
    ) -> asyncio.Task[PublishResult]:
        """Send a message. The task ends when the broker has answered or the channel is closed.

        The task returns errors, it does not raise them. It is cancelled when aiormq's heartbeat
        watchdog ends the connection, though nobody cancelled it. Nobody has to wait for it.
        """
        publish = self._tasks.create_task(self._publish(body, routing_key, properties))
        self._publishes[message_id] = publish
        publish.add_done_callback(lambda _: self._keep_result(message_id))
        return publish

    def _keep_result(self, message_id: str) -> None:
        self._untaken[message_id] = None
        if len(self._untaken) > MAX_UNTAKEN_RESULTS:
            self._forget(next(iter(self._untaken)))

    def _forget(self, message_id: str) -> None:
        self._untaken.pop(message_id, None)
        self._publishes.pop(message_id, None)

    async def _publish(
        self, body: bytes, routing_key: str, properties: Basic.Properties
    ) -> PublishResult:
        try:
            return await self._aiormq_channel.basic_publish(
                body,
                exchange=self._exchange,
                routing_key=routing_key,
                properties=properties,
                mandatory=True,
                # Half the work would be to wait until the socket has taken each message. The
                # confirms limit how many are in flight.
                wait=False,
            )
        except Exception as error:  # noqa: BLE001  # whoever waits for the task raises it
            return error

    def take_result(self, message_id: str, publish: asyncio.Task[PublishResult]) -> PublishResult:
        """Return the result of a publish that is done. The next publish sends the message again."""
        if self._publishes.get(message_id) is publish:
            self._forget(message_id)
        if publish.cancelled():
            return self.close_reason or asyncio.CancelledError()
        return publish.result()

    async def wait_closed(self) -> None:
        """Wait until the channel is closed. aiormq then ends all publishes in flight."""
        await self._channel.closed()

    def cancel_in_flight(self) -> None:
        """Cancel the publishes that aiormq forgets: those that wait for room in its queue."""
        for publish in self._publishes.values():
            publish.cancel()
