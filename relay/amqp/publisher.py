"""Publishes to one exchange with publisher confirms, over whichever channel is open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from aio_pika import exceptions as amqp

from relay.amqp.failures import ConnectionFailure, describe_failure
from relay.amqp.publish_channel import PublishChannel, PublishResult
from relay.errors import Deferred

CONNECTION_WAIT = 1.0
"""Seconds that a message waits for a connection that is being made."""


class ConfirmedPublisher:
    """Publishes messages, whose ids differ, and returns what the broker answers to each.

    ``timeout`` is how many seconds the broker may take, and ``connection_wait`` how many a message
    waits for a connection.
    """

    def __init__(self, timeout: float, connection_wait: float = CONNECTION_WAIT) -> None:
        self._timeout = timeout
        self._connection_wait = connection_wait
        self._channel: PublishChannel | None = None
        self._has_channel = asyncio.Event()
        self._failure = ConnectionFailure("the connection to the broker is being made")

    async def publish(
        self, message_id: str, body: bytes, key: str, header: Callable[[], bytes]
    ) -> PublishResult:
        """Return the broker's answer to a message. ``header`` returns its content header.

        After a timeout the publish stays in flight, and the next call for the message takes its
        result. Two publishes with one id would get each other's confirms
        (docs/protocol.md#one-publish-in-flight-for-each-id). And a broker that confirms slowly,
        such as a quorum queue without a majority, would store a copy for each try. Raises Deferred
        without a channel or an answer.
        """
        channel = await self._open_channel()
        deadline = asyncio.get_running_loop().time() + self._timeout
        publish = channel.find_publish_of_message(message_id)
        if publish is None:
            if channel.is_blocked:
                await self._wait_unblocked(channel, deadline)
            # Another call for the message may have started one meanwhile.
            publish = channel.find_publish_of_message(message_id) or channel.start_publish(
                message_id, body, key, header()
            )
        try:
            is_done = await channel.wait_until_publish_done(publish, deadline)
        except asyncio.CancelledError:
            channel.keep_result_for_next_delivery(message_id, publish)
            raise
        if not is_done:
            channel.keep_result_for_next_delivery(message_id, publish)
            raise Deferred(
                f"within {self._timeout:g} s the broker did not confirm. "
                "The message may be stored, and is sent again with the same id",
                unanswered=True,
            )
        return channel.pop_result(message_id, publish)

    async def use_channel_until_closed(self, channel: PublishChannel, broker: str) -> None:
        """Publish over this channel until it closes. Raises Deferred if the connection was lost.

        ``broker`` names it in the error.
        """
        self._channel = channel
        self._has_channel.set()
        try:
            await channel.wait_closed()
        finally:
            self._forget_channel()
            # In the next turn of the loop, after aiormq has handled answers that came before.
            asyncio.get_running_loop().call_soon(channel.cancel_publishes)
        reason = channel.close_reason
        if reason is not None and not isinstance(reason, amqp.ChannelClosed):
            raise Deferred(
                f"the connection to {broker} was lost: {describe_failure(reason).reason}"
            )

    def set_failure(self, failure: ConnectionFailure) -> None:
        """Note why there is no connection."""
        self._failure = failure

    async def _wait_unblocked(self, channel: PublishChannel, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await channel.wait_unblocked()
        except TimeoutError:
            raise Deferred(
                f"within {self._timeout:g} s the broker did not let anybody publish: "
                "see its memory and disk alarms. Nothing was sent"
            ) from None

    async def _open_channel(self) -> PublishChannel:
        """Return the open channel. Raises Deferred if there is none soon."""
        if self._channel is not None and self._channel.is_closed:
            self._forget_channel()
        if self._channel is None and self._failure.failure == "transient":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._connection_wait):
                    await self._has_channel.wait()
        if self._channel is None:
            raise self._failure.to_deferred()
        return self._channel

    def _forget_channel(self) -> None:
        self._channel = None
        self._has_channel.clear()
        self._failure = ConnectionFailure("the channel to the broker is being opened again")
