"""Publishes events to RabbitMQ as messages, with a confirm of each.

A `ConfirmedPublisher` belongs to a sink or to one end of a fleet. Whoever keeps the connection
(`relay.amqp.connection.keep_connected`) opens a `PublishChannel` on it and gives it to the
publisher (`use_channel_until_closed`), or says why there is none (`note_connection_failure`).
`publish` sends a message over the channel that is open, and returns the broker's answer.

The frames are written here, because aiormq's ``basic_publish`` also writes to a channel that the
broker has closed. aiormq handles the answers
(docs/decisions.md#rabbitmq-by-plain-connections-that-we-open-again).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from datetime import datetime
from functools import lru_cache
from typing import cast

import aiormq
import pamqp.frame
from aio_pika import exceptions as amqp
from aio_pika.abc import AbstractChannel, DeliveryMode
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.amqp.connection import GuardedConnection, content_frames
from relay.amqp.failures import (
    ConnectionFailure,
    connection_failure_from_exception,
    is_current_task_cancelled_by_caller,
)
from relay.errors import Deferred
from relay.events.cloudevent import CONTENT_TYPE, CloudEvent
from relay.events.model import routing_word

PublishResult = aiormq.abc.ConfirmationFrameType | BaseException | None
"""What the broker answered to one message, or why there is no answer."""

CONNECTION_WAIT = 1.0
"""Seconds that a message waits for a connection that is being made."""
_MAX_CACHED_FRAMES = 128
MAX_TEXT_BYTES = 255
"""Bytes of a short string in AMQP, and of a header that AMQP 1.0 clients still see as text."""
_MAX_WORD_BYTES = (40, 40, 92, 80)
"""Bytes of each word of a routing key, which has at most 255 with its dots.

A scope has at most 80, the name of a sink at most 64.
"""


class ConfirmedPublisher:
    """Publishes messages, whose ids differ, and returns what the broker answers to each.

    ``timeout`` is how many seconds a message waits while the broker lets nobody publish, and
    ``connection_wait`` how many it waits for a connection.
    """

    def __init__(self, timeout: float, connection_wait: float = CONNECTION_WAIT) -> None:
        self._timeout = timeout
        self._connection_wait = connection_wait
        self._channel: PublishChannel | None = None
        self._has_channel = asyncio.Event()
        self._failure = ConnectionFailure("the connection to the broker is being made")

    async def publish(
        self,
        event: CloudEvent,
        key: str,
        *,
        expiration: int | None = None,
    ) -> PublishResult:
        """Return the broker's answer to the message of an event; see `content_header`.

        Once the message is sent, only an answer or the end of the channel ends the wait: to send it
        again earlier would store it twice. A broker that hangs loses its heartbeat. Raises Deferred
        if the message cannot be sent.
        """
        channel = await self._wait_for_open_channel()
        try:
            async with asyncio.timeout(self._timeout):
                await channel.wait_unblocked()
        except TimeoutError:
            raise Deferred(
                f"within {self._timeout:g} s the broker did not let anybody publish: "
                "see its memory and disk alarms. Nothing was sent"
            ) from None
        header = content_header(event, user_id=channel.user_id, expiration=expiration)
        return await channel.publish(event, key, header)

    async def use_channel_until_closed(self, channel: PublishChannel, broker: str) -> None:
        """Publish over this channel until it closes. Raises Deferred if the connection is lost."""
        self._channel = channel
        self._has_channel.set()
        try:
            await channel.wait_closed()
        finally:
            self._clear_channel_reference()
            # In the next turn of the loop, after aiormq has handled answers that came before.
            asyncio.get_running_loop().call_soon(channel.cancel_publishes)
        reason = channel.close_reason
        if reason is not None and not isinstance(reason, amqp.ChannelClosed):
            failure = connection_failure_from_exception(reason)
            raise Deferred(f"the connection to {broker} was lost: {failure.reason}")

    def note_connection_failure(self, failure: ConnectionFailure) -> None:
        self._failure = failure

    async def _wait_for_open_channel(self) -> PublishChannel:
        if self._channel is not None and self._channel.is_closed:
            self._clear_channel_reference()
        if self._channel is None and self._failure.failure == "transient":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._connection_wait):
                    await self._has_channel.wait()
        if self._channel is None:
            raise self._failure.to_deferred_error()
        return self._channel

    def _clear_channel_reference(self) -> None:
        self._channel = None
        self._has_channel.clear()
        self._failure = ConnectionFailure("the channel to the broker is being opened again")


class PublishChannel:
    """An open channel, and the messages in flight on it.

    Nothing else may publish on the channel: aiormq takes its count of messages from here.
    ``user_id`` is that of its messages: the user of the connection. The next one can have another.
    """

    def __init__(
        self,
        connection: GuardedConnection,
        channel: AbstractChannel,
        aiormq_channel: aiormq.Channel,
        exchange: str,
        user_id: str | None,
    ) -> None:
        self.user_id = user_id
        self.close_reason: BaseException | None = None
        self._connection = connection
        self._channel = channel
        self._aiormq_channel = aiormq_channel
        self._max_part_bytes = _max_part_bytes(aiormq_channel)
        self._loop = asyncio.get_running_loop()
        self._has_ended = False
        self._publishes: set[asyncio.Future[PublishResult]] = set()

        @lru_cache(_MAX_CACHED_FRAMES)
        def publish_frame(routing_key: str) -> bytes:
            method = Basic.Publish(exchange=exchange, routing_key=routing_key, mandatory=True)
            return pamqp.frame.marshal(method, aiormq_channel.number)

        self._publish_frame = publish_frame
        channel.close_callbacks.add(self._set_close_reason)

    @classmethod
    async def open(
        cls, connection: GuardedConnection, exchange: str, *, user_id: str | None = None
    ) -> PublishChannel:
        channel = connection.channel(on_return_raises=True)
        await channel.initialize()
        aiormq_channel = cast("aiormq.Channel", await channel.get_underlay_channel())
        return cls(connection, channel, aiormq_channel, exchange, user_id)

    @property
    def is_closed(self) -> bool:
        """Whether the channel is closed. This is true before `wait_closed` returns.

        aiormq forgets a channel as soon as it has read that the broker closed it, and closes it
        some turns of the loop later. A message in between would end the whole connection.
        """
        is_known = _is_channel_known_to_aiormq(self._aiormq_channel)
        return self._has_ended or self._channel.is_closed or not is_known

    def _set_close_reason(self, _: object, error: BaseException | None) -> None:
        self.close_reason = error

    async def wait_unblocked(self) -> None:
        """Wait while the broker blocks publishers, as under a memory or disk alarm."""
        await self._aiormq_channel.connection.ready()

    async def publish(self, event: CloudEvent, key: str, header: bytes) -> PublishResult:
        """Send it; return the answer or why none came. Cancelled, it stays in flight."""
        if self.is_closed:
            return amqp.ChannelInvalidStateError()
        publish: asyncio.Future[PublishResult] = self._loop.create_future()
        self._publishes.add(publish)
        publish.add_done_callback(self._publishes.discard)
        channel = self._aiormq_channel
        frames = self._publish_frame(key) + content_frames(
            channel.number, header, event.body, self._max_part_bytes
        )
        channel.delivery_tag += 1
        channel.confirmations[channel.delivery_tag] = publish
        channel.message_id_delivery_tag[event.id] = channel.delivery_tag
        self._connection.write_frames(frames)
        try:
            return await asyncio.shield(publish)
        except asyncio.CancelledError as error:
            if is_current_task_cancelled_by_caller():
                raise
            return self.close_reason or error
        except Exception as error:  # noqa: BLE001  # what `PublishResult` is: the caller tells it apart
            return error
        finally:
            channel.message_id_delivery_tag.pop(event.id, None)

    async def wait_closed(self) -> None:
        await self._channel.closed()

    def cancel_publishes(self) -> None:
        """End the publishes in flight: the channel gets no more answers."""
        self._has_ended = True
        for publish in tuple(self._publishes):
            publish.cancel()


def _is_channel_known_to_aiormq(channel: aiormq.abc.AbstractChannel) -> bool:
    """Return whether aiormq still knows the channel: it forgets one that the broker closed."""
    return channel.connection.channels.get(channel.number) is channel


def _max_part_bytes(channel: aiormq.abc.AbstractChannel) -> int:
    # A broker that sets no limit says 0.
    has_limit = bool(channel.connection.connection_tune.frame_max)
    return cast("aiormq.Channel", channel).max_content_size if has_limit else sys.maxsize


# --- messages


def routing_key(event: CloudEvent) -> str:
    """Return ``<family>.<change>.<detail>.<scope>``: four lower-case words of ``[a-z0-9_-]``."""
    return _routing_key(event.name, event.routing_detail, event.scope)


@lru_cache(maxsize=128)
def _routing_key(name: str, detail: str, scope: str) -> str:
    family, _, change = name.partition(".")
    words = (family, change, detail, scope)
    return ".".join(map(routing_word, words, _MAX_WORD_BYTES))


def content_header(
    event: CloudEvent, *, user_id: str | None = None, expiration: int | None = None
) -> bytes:
    """Return the content header of the message, with its properties and headers.

    They repeat attributes of the event. An attribute that is too long is only in the body. The
    broker accepts only the sender's own name as ``user_id``. A queue drops the message after
    ``expiration`` milliseconds.
    """
    texts = {
        name: value
        for name, value in event.attributes.items()
        if len(value.encode()) <= MAX_TEXT_BYTES
    }
    properties = Basic.Properties(
        content_type=CONTENT_TYPE,
        headers={f"ce-{name}": value for name, value in texts.items()},
        delivery_mode=DeliveryMode.PERSISTENT,
        correlation_id=texts.get("correlationid"),
        expiration=None if expiration is None else str(expiration),
        message_id=event.id,
        timestamp=datetime.fromisoformat(event.attributes["time"]),
        message_type=event.type,
        user_id=user_id,
        app_id="imds-relay",
    )
    return ContentHeader(body_size=len(event.body), properties=properties).marshal()
