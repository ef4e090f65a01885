"""Publishes events to RabbitMQ as messages, with a confirm of each.

A `ConfirmedPublisher` belongs to a sink or to one end of a fleet. Whoever keeps the connection
(`relay.amqp.connection.keep_connected`) calls `serve` with it, or says why there is none
(`note_connection_failure`).
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import datetime
from functools import lru_cache

from aio_pika import exceptions as amqp
from aio_pika.abc import DeliveryMode
from aiormq import Channel
from aiormq.abc import ConfirmationFrameType
from pamqp.commands import Basic

from relay.amqp.broker_url import host_port
from relay.amqp.connection import SETUP_TIMEOUT, GuardedConnection, open_channel
from relay.amqp.failures import explain_failure, raise_if_cancelled
from relay.errors import Deferred
from relay.events.cloudevent import CONTENT_TYPE, CloudEvent
from relay.events.model import routing_word

PublishResult = ConfirmationFrameType | BaseException | None
"""What the broker answered to one message, or why there is no answer."""

CONNECTION_WAIT = 1.0
"""Seconds that a message waits for a connection that is being made."""
_ANSWERS_PER_TURN = 64
MAX_TEXT_BYTES = 255
"""Bytes of a short string in AMQP, and of a header that AMQP 1.0 clients still see as text."""


class ConfirmedPublisher:
    """Publishes messages, whose ids differ, and returns what the broker answers to each.

    ``timeout`` is how many seconds a message waits while the broker lets nobody publish.
    """

    def __init__(self, exchange: str, timeout: float) -> None:
        self._exchange = exchange
        self._timeout = timeout
        self._channel: Channel | None = None
        self._user_id: str | None = None
        self._has_channel = asyncio.Event()
        self._failure = Deferred("the connection to the broker is being made")

    async def publish(
        self, event: CloudEvent, key: str, *, expiration: int | None = None
    ) -> PublishResult:
        """Return the broker's answer to the message of an event; see `message_properties`.

        Once the message is sent, only an answer or the end of the channel ends the wait: to send it
        again earlier would store it twice. A broker that hangs loses its heartbeat. Raises Deferred
        if the message cannot be sent.
        """
        channel = await self._wait_for_open_channel()
        try:
            async with asyncio.timeout(self._timeout):
                await channel.connection.ready()
        except TimeoutError:
            raise Deferred(
                f"within {self._timeout:g} s the broker did not let anybody publish: "
                "see its memory and disk alarms. Nothing was sent"
            ) from None
        if _is_over(channel):
            return amqp.ChannelInvalidStateError()
        try:
            # As a task of the channel it ends with it, also while it waits until there is room for
            # its frames: nobody makes room once the connection is lost.
            answer: PublishResult = await channel.create_task(
                channel.basic_publish(
                    event.body,
                    exchange=self._exchange,
                    routing_key=key,
                    properties=message_properties(event, self._user_id, expiration),
                    mandatory=True,
                    wait=False,
                )
            )
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # the caller tells them apart
            raise_if_cancelled()
            return error
        return answer

    async def serve(self, connection: GuardedConnection, user_id: str | None = None) -> None:
        """Publish over this connection until its channel closes. Raises Deferred if it is lost.

        ``user_id`` is that of the messages: the user of the connection.
        """
        async with asyncio.timeout(SETUP_TIMEOUT):
            channel = await open_channel(connection, _ANSWERS_PER_TURN, publisher_confirms=True)
        raise_if_cancelled()
        self._channel, self._user_id = channel, user_id
        self._has_channel.set()
        try:
            await asyncio.wait({channel.closing})
        finally:
            self._forget_channel()
        reason = channel.closing.exception()
        if reason is not None and not isinstance(reason, amqp.ChannelClosed):
            failure = explain_failure(reason)
            raise Deferred(
                f"the connection to {host_port(connection.url)} was lost: {failure.reason}"
            )

    def note_connection_failure(self, failure: Deferred) -> None:
        self._failure = failure

    async def _wait_for_open_channel(self) -> Channel:
        if self._channel is not None and _is_over(self._channel):
            self._forget_channel()
        if self._channel is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONNECTION_WAIT):
                    await self._has_channel.wait()
        if self._channel is None:
            # It keeps its traceback, so another one is raised.
            raise Deferred(self._failure.reason, status=self._failure.status)
        return self._channel

    def _forget_channel(self) -> None:
        self._channel = None
        self._has_channel.clear()
        self._failure = Deferred("the channel to the broker is being opened again")


def _is_over(channel: Channel) -> bool:
    """Return whether a channel is closed, or about to be.

    aiormq forgets a channel as soon as it has read that the broker closed it, and closes it some
    turns of the loop later. A message in between would end the whole connection.
    """
    return channel.is_closed or channel.connection.channels.get(channel.number) is not channel


# --- messages


def routing_key(event: CloudEvent) -> str:
    """Return ``<family>.<change>.<detail>.<scope>``: four lower-case words of ``[a-z0-9_-]``."""
    return _routing_key(event.name, event.routing_detail, event.scope)


@lru_cache(maxsize=128)
def _routing_key(name: str, detail: str, scope: str) -> str:
    family, _, change = name.partition(".")
    # With its dots, a key has at most 255 bytes. A scope has at most 80, the name of a sink 64.
    return ".".join(map(routing_word, (family, change, detail, scope), (40, 40, 92, 80)))


def message_properties(
    event: CloudEvent, user_id: str | None = None, expiration: int | None = None
) -> Basic.Properties:
    """Return the properties and headers of a message, which repeat attributes of the event.

    An attribute that is too long is only in the body. The broker accepts only the sender's own name
    as ``user_id``. A queue drops the message after ``expiration`` milliseconds.
    """
    texts = {
        name: value
        for name, value in event.attributes.items()
        if len(value.encode()) <= MAX_TEXT_BYTES
    }
    return Basic.Properties(
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
