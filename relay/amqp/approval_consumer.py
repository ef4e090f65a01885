"""Receives approvals from a queue, and acknowledges what has been decided.

Messages stay in the queue while nothing can be decided. Else the consumer opens a channel, takes
what has arrived, and has the handler decide. A message is acknowledged only after its decision is
on disk. An unusable one is dead-lettered, and so is one over the rate of its client: nobody waits
behind a flood of another. A decision that cannot be recorded is tried again here. Once nothing can
be decided any more, the channel is closed, and all messages that are not acknowledged return to the
queue. What a message means is the handler's business.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NoReturn, Protocol

from aio_pika import exceptions as amqp
from aiormq.abc import AbstractChannel, ChannelFrame, DeliveredMessage
from pamqp.commands import Basic
from yarl import URL

from relay.amqp.broker_url import Declare, host_port
from relay.amqp.connection import (
    CLOSE_TIMEOUT,
    MAX_BODY_BYTES,
    SETUP_TIMEOUT,
    Deliveries,
    GuardedConnection,
    UnusableMessage,
    keep_connected,
    open_channel,
    require_publishing_user,
    start_consuming,
    take_batch,
)
from relay.amqp.failures import explained_refusal, raise_if_cancelled
from relay.amqp.topology import ApprovalsQueue, declare_topology
from relay.clock import CALLER_RATE, Clock, TokenBuckets
from relay.errors import Deferred
from relay.logs import LogOnce
from relay.net import exponential_backoff

CLIENT_BURST = 250
"""Messages of one kind that a client may have decided at once; then `CALLER_RATE` a second."""
PREFETCH = 400
"""Messages that the broker sends before the first of them is acknowledged."""
MESSAGES_AT_ONCE = 64
"""Messages that are read and submitted together, so that a hold waits for few commits.

To read as many as this takes about 10 ms.
"""
TOO_MANY = f"its client has sent more than {CALLER_RATE:.0f} messages a second for too long"
INTERNAL_ERROR = "internal error: a message with an approval was dead-lettered"
POLL_INTERVAL = 1.0
"""Seconds between two checks of whether messages can be decided."""
MAX_PAUSE = 60.0
"""Seconds: the longest pause after a decision that could not be recorded."""

_WITHOUT_CONTROL_CHARACTERS = re.compile(r"[^\x00-\x1f\x7f-\x9f]+")
"""What CloudEvents allow in an attribute, such as ``causationid``."""
_Message = tuple[int, "ReceivedDecision"]
"""A message by its delivery tag, and the decision in it."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnparsedApprovalMessage:
    """A message that was published to the approvals exchange.

    RabbitMQ has checked ``user``. ``scope`` is that of the routing key; None: the queue is for one
    scope. ``message_id`` identifies a repeated message.
    """

    user: str
    scope: str | None
    message_id: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedDecision:
    """A decision of a known client, in a message that is not acknowledged yet."""

    user: str
    decision: Literal["approve", "hold", "release"]
    decide: Callable[[], Awaitable[bool]]
    """Decides; returns False if the decision cannot be recorded now."""


class ApprovalHandler(Protocol):
    """What the consumer asks about messages. See `relay.approvals.amqp_handler`."""

    async def blocking_reason(self) -> str | None:
        """Return why no message can be decided now; None if messages can be decided."""

    def read(self, message: UnparsedApprovalMessage) -> ReceivedDecision:
        """Return the decision in a message. Raises UnusableMessage."""


@dataclass(eq=False, kw_only=True)
class ApprovalConsumer:
    """Consumes while messages can be decided. ``on_unusable`` gets a RabbitMQ user or None."""

    urls: Callable[[], Sequence[URL]]
    declare: Declare
    queue: ApprovalsQueue
    relay: str
    handler: ApprovalHandler
    on_unusable: Callable[[str | None, str], None]
    clock: Clock

    def __post_init__(self) -> None:
        self.is_connected = False
        """Whether there is a connection, and the queue is there."""
        self._buckets = TokenBuckets(CALLER_RATE, CLIENT_BURST)
        self._channel: AbstractChannel
        self._deliveries: Deliveries
        self._state_log = LogOnce(_log)

    async def run(self) -> NoReturn:
        """Stay connected and consume until cancelled."""
        name = f"imds-relay approvals of {self.queue.description} at {self.relay}"
        await keep_connected(self.urls, name, self.clock, self._consume, self._note_failure)

    def _note_failure(self, failure: Deferred) -> None:
        self.is_connected = False
        self._state_log.log_if_changed(logging.WARNING, "approvals over AMQP: %s", failure.reason)

    async def _consume(self, connection: GuardedConnection) -> NoReturn:
        async with asyncio.timeout(SETUP_TIMEOUT):
            topology_note = await declare_topology(connection, self.queue.topology, self.declare)
        self.is_connected = True
        broker = host_port(connection.url)
        failures = 0
        while True:
            while (reason := await self.handler.blocking_reason()) is not None:
                self._log_state(f"connected to {broker}; messages wait: {reason}{topology_note}")
                await self.clock.sleep(POLL_INTERVAL)
                if connection.is_over:
                    raise Deferred(f"the connection to {broker} was lost")
            channel = self._channel = await open_channel(connection, MESSAGES_AT_ONCE)
            await channel.basic_qos(prefetch_count=PREFETCH)
            with explained_refusal(
                "the broker has no such queue ({}): make it, or set declare: true",
                "the broker refused the queue ({}): grant the user read on it",
            ):
                self._deliveries = await start_consuming(
                    channel, self.queue.name, consumer_tag=f"imds-relay {self.relay}"
                )
            raise_if_cancelled()
            self._log_state(
                f"connected to {broker}; messages are taken from {self.queue.name}{topology_note}"
            )
            recorded = await self._decide_while_possible()
            # What is not acknowledged returns to the queue when the channel closes. It keeps its
            # order only because all of it is delivered again together.
            with connection.abort_if_slower_than(CLOSE_TIMEOUT):
                await channel.close()
            failures = 0 if recorded else failures + 1
            pause = exponential_backoff(failures + 1, first=POLL_INTERVAL, maximum=MAX_PAUSE)
            await self.clock.sleep(pause)

    # --- the messages of one channel

    async def _decide_while_possible(self) -> bool:
        """Decide; return False if the last decision was not recorded. Raises Deferred."""
        while await self.handler.blocking_reason() is None:
            messages = await self._next_messages()
            # If only some can be recorded at first, no release ends a newer hold, and no vote
            # overtakes a hold.
            for _, alike in groupby(messages, key=lambda message: message[1].decision):
                if not await self._decide_until_recorded(list(alike)):
                    return False
            await asyncio.sleep(0)  # a flood leaves the rest of the relay its turn
        return True

    async def _next_messages(self) -> list[_Message]:
        """Return what has arrived by the next check, and dead-letter what cannot be decided."""
        messages: list[_Message] = []
        rejected: list[int] = []
        try:
            async with asyncio.timeout(POLL_INTERVAL):
                batch = await take_batch(self._deliveries, MESSAGES_AT_ONCE)
        except TimeoutError:
            return messages
        for delivery in batch:
            tag, received = delivery.delivery_tag or 0, self._read(delivery)
            if received is None:
                rejected.append(tag)
            else:
                messages.append((tag, received))
        if rejected:
            # aiormq itself writes ten rejections in a turn of the event loop.
            if self._channel.is_closed:
                raise amqp.ChannelInvalidStateError("the channel is closed")
            frames = [Basic.Reject(delivery_tag=tag, requeue=False) for tag in rejected]
            marshalled = ChannelFrame.marshall(self._channel.number, frames)
            await self._channel.connection.write_queue.put(marshalled)
        return messages

    def _read(self, delivery: DeliveredMessage) -> ReceivedDecision | None:
        try:
            received = self.handler.read(extract_message_of_verified_sender(delivery, self.queue))
        except UnusableMessage as error:
            self.on_unusable(delivery.header.properties.user_id, str(error))
            return None
        except Exception:  # noqa: BLE001  # given back, it would return at once and block the others
            _log.exception(INTERNAL_ERROR)
            return None
        # Of each kind: a backlog of votes must not use up the tokens of the hold behind it. What
        # the broker delivers again costs nothing: most of it has paid, and none was decided.
        sender = f"{received.user} {received.decision}"
        if not delivery.redelivered and self._buckets.take(sender, self.clock.monotonic()):
            self.on_unusable(received.user, TOO_MANY)
            return None
        return received

    async def _decide_until_recorded(self, messages: list[_Message]) -> bool:
        """Decide about messages; return False if some cannot be recorded.

        What is not recorded is tried again here. Returned to the queue, it would come behind others
        that were returned before. Raises Deferred if the channel is gone.
        """
        failures = 0
        while True:
            # Each submits its decision before it first waits, so their order stays.
            recorded = await asyncio.gather(*(self._decide(*message) for message in messages))
            raise_if_cancelled()
            messages = [
                message
                for message, is_recorded in zip(messages, recorded, strict=True)
                if not is_recorded
            ]
            if not messages:
                return True
            failures += 1
            pause = exponential_backoff(failures + 1, first=POLL_INTERVAL, maximum=MAX_PAUSE)
            retry_at = self.clock.monotonic() + pause
            while self.clock.monotonic() < retry_at:
                if await self.handler.blocking_reason() is not None:
                    return False
                await self.clock.sleep(POLL_INTERVAL)
                while self._channel.is_closed:  # why is behind the messages that it brought
                    await take_batch(self._deliveries, MESSAGES_AT_ONCE)

    async def _decide(self, tag: int, received: ReceivedDecision) -> bool:
        try:
            recorded = await received.decide()
        except UnusableMessage as error:
            self.on_unusable(received.user, str(error))
        except Exception:  # noqa: BLE001  # given back, it would return at once and block the others
            _log.exception(INTERNAL_ERROR)
        else:
            if recorded:
                await self._channel.basic_ack(tag)
            return recorded
        await self._channel.basic_reject(tag, requeue=False)
        return True

    def _log_state(self, state: str) -> None:
        self._state_log.log_if_changed(logging.INFO, "approvals over AMQP: %s", state)


def extract_message_of_verified_sender(
    message: DeliveredMessage, queue: ApprovalsQueue
) -> UnparsedApprovalMessage:
    """Return the message. Raises UnusableMessage.

    It must have been published to the exchange of this queue with one of its routing keys: RabbitMQ
    checks no right to the key of a dead letter, and 3.10 none to keys in the CC header
    (docs/protocol.md#topic-permissions-and-the-cc-header).
    """
    properties = message.header.properties
    key = queue.key_pattern.fullmatch(message.routing_key or "")
    if message.exchange != queue.exchange or key is None:
        raise UnusableMessage(
            f"it was not published to {queue.exchange} with the routing key {queue.binding_key}"
        )
    user = require_publishing_user(message)
    if not properties.message_id:
        raise UnusableMessage("it has no message_id, so a repeat would not be recognized")
    if _WITHOUT_CONTROL_CHARACTERS.fullmatch(properties.message_id) is None:
        raise UnusableMessage("its message_id contains control characters")
    if not message.body:
        raise UnusableMessage(f"it has no body, or one of more than {MAX_BODY_BYTES} bytes")
    scope = key.groupdict().get("scope")
    return UnparsedApprovalMessage(user, scope, properties.message_id, message.body)
