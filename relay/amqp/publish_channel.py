"""A channel with publisher confirms, for many messages in flight at once."""

from __future__ import annotations

import asyncio
import sys
from functools import lru_cache
from typing import cast

import aiormq
import pamqp.frame
from aio_pika.abc import AbstractChannel
from aio_pika.exceptions import ChannelInvalidStateError
from pamqp.commands import Basic

from relay.amqp.connection import Connection
from relay.amqp.frames import content_frames

PublishResult = aiormq.abc.ConfirmationFrameType | BaseException | None
"""What the broker answered to one message, or why there is no answer."""

MAX_UNTAKEN_RESULTS = 1024
"""Results that are kept until a delivery takes them.

A worker has 64 open deliveries, and those of its probes: while a broker confirms nothing, each
probe can send another event, about one hundred in an hour. The event of an older result was
superseded, or became a dead letter.
"""
_MAX_CACHED_FRAMES = 128


class PublishChannel:
    """An open channel, the messages in flight on it, and the results that nobody took yet.

    It writes the frames of messages itself, which costs much less than aiormq's ``basic_publish``,
    and lets aiormq handle the answers. So nothing else may publish on the channel
    (docs/decisions/0010-own-reconnect.md).
    """

    def __init__(
        self,
        connection: Connection,
        channel: AbstractChannel,
        aiormq_channel: aiormq.Channel,
        exchange: str,
    ) -> None:
        self.close_reason: BaseException | None = None
        """What closed the channel."""
        self._connection = connection
        self._channel = channel
        self._aiormq_channel = aiormq_channel
        self._max_part_bytes = max_part_bytes(aiormq_channel)
        self._loop = asyncio.get_running_loop()
        self._has_ended = False
        self._publishes: dict[str, asyncio.Future[PublishResult]] = {}
        self._untaken: dict[str, None] = {}  # ids of publishes that are done, the oldest first

        @lru_cache(_MAX_CACHED_FRAMES)
        def publish_frame(routing_key: str) -> bytes:
            method = Basic.Publish(exchange=exchange, routing_key=routing_key, mandatory=True)
            return pamqp.frame.marshal(method, aiormq_channel.number)

        self._publish_frame = publish_frame
        channel.close_callbacks.add(self._set_close_reason)

    @classmethod
    async def open(cls, connection: Connection, exchange: str) -> PublishChannel:
        """Open a channel."""
        channel = connection.channel(on_return_raises=True)
        await channel.initialize()
        aiormq_channel = cast("aiormq.Channel", await channel.get_underlay_channel())
        return cls(connection, channel, aiormq_channel, exchange)

    @property
    def is_closed(self) -> bool:
        """Whether the channel is closed. This is true before `wait_closed` returns.

        aiormq forgets a channel as soon as it has read that the broker closed it, and closes it
        some turns of the loop later. A message in between would end the whole connection.
        """
        channel = self._aiormq_channel
        is_known = channel.connection.channels.get(channel.number) is channel
        return self._has_ended or self._channel.is_closed or not is_known

    def _set_close_reason(self, _: object, error: BaseException | None) -> None:
        self.close_reason = error

    @property
    def is_blocked(self) -> bool:
        """Whether the broker blocks publishers, as under a memory or disk alarm."""
        return is_blocked(self._aiormq_channel)

    async def wait_unblocked(self) -> None:
        """Wait while the broker blocks publishers."""
        await self._aiormq_channel.connection.ready()

    def find_publish_of_message(self, message_id: str) -> asyncio.Future[PublishResult] | None:
        """Return the publish of this message if nobody took its result yet. It may be done."""
        return self._publishes.get(message_id)

    def start_publish(
        self, message_id: str, body: bytes, routing_key: str, header: bytes
    ) -> asyncio.Future[PublishResult]:
        """Send a message with this content header.

        The future is done when the broker has answered or the channel is closed. Nobody has to wait
        for it. Whoever waits must not cancel it.
        """
        publish: asyncio.Future[PublishResult] = self._loop.create_future()
        self._publishes[message_id] = publish
        if self.is_closed:
            publish.set_result(ChannelInvalidStateError())
            return publish
        channel = self._aiormq_channel
        frames = self._publish_frame(routing_key) + content_frames(
            channel.number, header, body, self._max_part_bytes
        )
        channel.delivery_tag += 1
        channel.confirmations[channel.delivery_tag] = publish
        channel.message_id_delivery_tag[message_id] = channel.delivery_tag
        self._connection.write_frames(frames)
        return publish

    async def wait_until_publish_done(
        self, publish: asyncio.Future[PublishResult], deadline: float
    ) -> bool:
        """Wait until a publish is done, or until this time of the loop. Return whether it is done.

        With `asyncio.wait` in `asyncio.timeout` a delivery would cost a sixth more.
        """
        end: asyncio.Future[None] = self._loop.create_future()

        def on_end(_: object = None) -> None:
            if not end.done():
                end.set_result(None)

        timer = self._loop.call_at(deadline, on_end)
        publish.add_done_callback(on_end)
        try:
            await end
        finally:
            timer.cancel()
            publish.remove_done_callback(on_end)
        return publish.done()

    def keep_result_for_next_delivery(
        self, message_id: str, publish: asyncio.Future[PublishResult]
    ) -> None:
        """Stop waiting for a publish. Its result is kept for the next delivery of the event."""
        publish.add_done_callback(lambda _: self._keep_result(message_id, publish))

    def _keep_result(self, message_id: str, publish: asyncio.Future[PublishResult]) -> None:
        _mark_as_seen(publish)
        if self._publishes.get(message_id) is publish:
            self._untaken[message_id] = None
        if len(self._untaken) > MAX_UNTAKEN_RESULTS:
            self._forget(next(iter(self._untaken)))

    def _forget(self, message_id: str) -> None:
        self._untaken.pop(message_id, None)
        del self._publishes[message_id]
        self._aiormq_channel.message_id_delivery_tag.pop(message_id, None)

    def pop_result(self, message_id: str, publish: asyncio.Future[PublishResult]) -> PublishResult:
        """Return the result of a publish that is done. The next publish sends the message again."""
        if self._publishes.get(message_id) is publish:
            self._forget(message_id)
        if publish.cancelled():
            return self.close_reason or asyncio.CancelledError()
        return publish.exception() or publish.result()

    async def wait_closed(self) -> None:
        """Wait until the channel is closed."""
        await self._channel.closed()

    def cancel_publishes(self) -> None:
        """End the publishes in flight: the channel gets no more answers."""
        self._has_ended = True
        for publish in self._publishes.values():
            publish.cancel()
            _mark_as_seen(publish)


def max_part_bytes(channel: aiormq.abc.AbstractChannel) -> int:
    """Return how many bytes of a body go into one frame."""
    # A broker that sets no limit says 0.
    has_limit = bool(channel.connection.connection_tune.frame_max)
    return cast("aiormq.Channel", channel).max_content_size if has_limit else sys.maxsize


def is_blocked(channel: aiormq.abc.AbstractChannel) -> bool:
    """Return whether the broker blocks publishers, as under a memory or disk alarm."""
    unblocked = channel.connection.ready()
    try:
        unblocked.send(None)  # aiormq tells it only to whoever waits
    except StopIteration:
        return False
    unblocked.close()
    return True


def _mark_as_seen(publish: asyncio.Future[PublishResult]) -> None:
    """Prevent that asyncio reports the error of a publish that nobody waited for."""
    if not publish.cancelled():
        publish.exception()
