"""Receives approvals from a queue, and acknowledges what has been decided.

Messages stay in the queue while nothing can be decided. Else the consumer opens a channel, and two
loops work on it. One reads ahead of the decisions: it checks each message that arrives, and lets it
wait in a `FairQueue`, so that nobody waits behind another's messages. The other takes messages from
there and has the handler decide. A message is acknowledged only after its decision is on disk. An
unusable one is dead-lettered, and so is one that is too many of its client. A decision that cannot
be recorded is tried again here. Once nothing can be decided any more, the channel is closed, and
all messages that are not acknowledged return to the queue. What a message means is the handler's
business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from aio_pika import exceptions as amqp
from aiormq.abc import AbstractChannel, ChannelFrame, DeliveredMessage
from aiormq.exceptions import ChannelAccessRefused
from pamqp.commands import Basic
from yarl import URL

from relay.amqp.broker_url import Declare, host_port
from relay.amqp.cancellation_check import raise_if_cancelled
from relay.amqp.connection import (
    CLOSE_TIMEOUT,
    HEARTBEAT,
    SETUP_TIMEOUT,
    GuardedConnection,
    keep_connected,
)
from relay.amqp.delivery_buffer import Deliveries, make_delivery_buffer, open_consuming_channel
from relay.amqp.failures import ConnectionFailure, broker_message
from relay.amqp.fair_queue import FairQueue, ReceivedDecision, WaitingMessage
from relay.amqp.message_verification import (
    UnparsedApprovalMessage,
    UnusableMessage,
    extract_message_of_verified_sender,
)
from relay.amqp.topology import (
    ApprovalsQueue,
    declare_topology,
    log_suffix_for_unchecked_parts,
)
from relay.clock import Clock, wait_for_event
from relay.errors import Deferred
from relay.log_once import LogOnce
from relay.net import exponential_backoff
from relay.rate_limits import CALLER_BURST, CALLER_RATE, TokenBuckets

MAX_WAITING = 200
"""Messages that wait for their decision, of all clients together."""
PREFETCH = MAX_WAITING + 200
"""Messages that the broker sends before the first of them is acknowledged.

More than can wait: a message behind them is always read.
"""
MESSAGES_PER_TURN = 64
"""Messages that are read in one turn of the event loop, which is long while other work is.

As many as this take about 10 ms.
"""
TOO_MANY = f"its client has sent more than {CALLER_RATE:.0f} messages a second for too long"
OVERTAKEN = "its client is over its rate, and meanwhile a newer hold on the event was decided"
INTERNAL_ERROR = "internal error: a message with an approval was dead-lettered"
VOTES_AT_ONCE = 16
"""Votes that are submitted together. A hold that arrives meanwhile waits for them."""
URGENT_AT_ONCE = 64
"""Holds, or releases, that are submitted together, so that a hold waits for few commits."""
POLL_INTERVAL = 1.0
"""Seconds between two checks of whether messages can be decided."""
MAX_PAUSE = 60.0
"""Seconds: the longest pause after a decision that could not be recorded."""

_log = logging.getLogger(__name__)


class ApprovalHandler(Protocol):
    """What the consumer asks about messages. See `relay.approvals.amqp_handler`."""

    async def blocking_reason(self) -> str | None:
        """Return why no message can be decided now; None if messages can be decided."""

    def read(self, message: UnparsedApprovalMessage) -> ReceivedDecision:
        """Return the decision in a message. Raises UnusableMessage."""


class ApprovalConsumer:
    """Consumes a queue of approvals while messages can be decided.

    ``on_unusable`` gets the RabbitMQ user, if there is one, and the reason.
    """

    def __init__(
        self,
        *,
        urls: Callable[[], Sequence[URL]],
        declare: Declare,
        queue: ApprovalsQueue,
        relay: str,
        handler: ApprovalHandler,
        on_unusable: Callable[[str | None, str], None],
        clock: Clock,
    ) -> None:
        self.is_connected = False
        """Whether there is a connection, and the queue is there."""
        self._urls = urls
        self._declare = declare
        self._queue = queue
        self._connection_name = f"imds-relay approvals of {queue.description} at {relay}"
        self._consumer_tag = f"imds-relay {relay}"
        self._handler = handler
        self._on_unusable = on_unusable
        self._clock = clock
        self._buckets = TokenBuckets(CALLER_RATE, CALLER_BURST)
        self._state_log = LogOnce(_log)

    async def run(
        self, *, heartbeat: int = HEARTBEAT, poll_interval: float = POLL_INTERVAL
    ) -> NoReturn:
        """Stay connected and consume until cancelled. Both intervals are in seconds."""

        async def serve(connection: GuardedConnection) -> NoReturn:
            try:
                await self._consume_whenever_deciding_is_possible(connection, poll_interval)
            finally:
                self.is_connected = False

        await keep_connected(
            self._urls,
            self._connection_name,
            self._clock,
            serve,
            self._log_failure,
            heartbeat=heartbeat,
        )

    async def _consume_whenever_deciding_is_possible(
        self, connection: GuardedConnection, poll_interval: float
    ) -> NoReturn:
        async with asyncio.timeout(SETUP_TIMEOUT):
            topology_note = await self._declare_topology(connection)
        self.is_connected = True
        broker = host_port(connection.url)
        failures = 0
        while True:
            while (reason := await self._handler.blocking_reason()) is not None:
                self._log_state(f"connected to {broker}; messages wait: {reason}{topology_note}")
                await self._clock.sleep(poll_interval)
                if connection.is_over:
                    raise Deferred(f"the connection to {broker} was lost")
            channel = await open_consuming_channel(connection, MESSAGES_PER_TURN)
            deliveries = await self._start_consuming(channel)
            self._log_state(
                f"connected to {broker}; messages are taken from {self._queue.name}{topology_note}"
            )
            consumer = _ChannelConsumer(
                channel,
                deliveries,
                queue=self._queue,
                handler=self._handler,
                on_unusable=self._on_unusable,
                buckets=self._buckets,
                clock=self._clock,
                poll_interval=poll_interval,
            )
            recorded = await consumer.read_and_decide_messages()
            # What is not acknowledged returns to the queue when the channel closes. It keeps its
            # order only because all of it is delivered again together.
            with connection.abort_if_slower_than(CLOSE_TIMEOUT):
                await channel.close()
            failures = 0 if recorded else failures + 1
            pause = exponential_backoff(failures + 1, first=poll_interval, maximum=MAX_PAUSE)
            await self._clock.sleep(pause)

    async def _declare_topology(self, connection: GuardedConnection) -> str:
        """Make or check the topology; return what to add to a line of the log about it.

        A queue that was made before there were limits stays in use. Raises Deferred.
        """
        try:
            return log_suffix_for_unchecked_parts(
                await declare_topology(connection, self._queue.topology, self._declare)
            )
        except Deferred as error:
            if error.status != 406:  # AMQP: PRECONDITION_FAILED
                raise
        await declare_topology(connection, self._queue.topology_without_limits, self._declare)
        return (
            f"; the queue {self._queue.name} was made without limits: set them by a policy "
            "(docs/rabbitmq.md#a-queue-without-limits)"
        )

    async def _start_consuming(self, channel: AbstractChannel) -> Deliveries:
        """Return what will arrive: messages, and an error when the channel or the queue is gone.

        Raises Deferred.
        """
        deliveries = make_delivery_buffer(channel, self._queue.name)
        await channel.basic_qos(prefetch_count=PREFETCH)
        try:
            await channel.basic_consume(
                self._queue.name, deliveries.put, consumer_tag=self._consumer_tag
            )
        except amqp.ChannelNotFoundEntity as error:
            raise Deferred(
                f"the broker has no such queue ({broker_message(error)}): "
                "make it, or set declare: true"
            ) from None
        except ChannelAccessRefused as error:
            raise Deferred(
                f"the broker refused the queue ({broker_message(error)}): grant the user read on it"
            ) from None
        raise_if_cancelled()
        return deliveries

    def _log_failure(self, failure: ConnectionFailure) -> None:
        self._state_log.log_if_changed(logging.WARNING, "approvals over AMQP: %s", failure.reason)

    def _log_state(self, state: str) -> None:
        self._state_log.log_if_changed(logging.INFO, "approvals over AMQP: %s", state)


class _ChannelConsumer:
    """Reads the messages of one channel ahead, and decides them.

    ``buckets`` has the rate of each client, and outlives the channel.
    """

    def __init__(
        self,
        channel: AbstractChannel,
        deliveries: Deliveries,
        *,
        queue: ApprovalsQueue,
        handler: ApprovalHandler,
        on_unusable: Callable[[str | None, str], None],
        buckets: TokenBuckets,
        clock: Clock,
        poll_interval: float,
    ) -> None:
        self._channel = channel
        self._deliveries = deliveries
        self._queue = queue
        self._handler = handler
        self._on_unusable = on_unusable
        self._clock = clock
        self._poll_interval = poll_interval
        self._waiting = FairQueue(buckets, MAX_WAITING)
        self._postponed: WaitingMessage | None = None
        """Was taken from those that wait, and is decided next: it is of another kind than they."""
        self._has_news = asyncio.Event()
        """A message waits now, or reading has ended."""
        self._reading: asyncio.Task[NoReturn] | None = None

    async def read_and_decide_messages(self) -> bool:
        """Read and decide messages while that is possible.

        Returns False if the last decision could not be recorded. Raises Deferred if the channel or
        the queue is gone.
        """
        reading = self._reading = asyncio.create_task(self._queue_received_messages())
        reading.add_done_callback(lambda _: self._has_news.set())
        try:
            while await self._handler.blocking_reason() is None:
                await self._raise_error_of_reading()
                self._has_news.clear()
                taken = await self._take_next_messages_or_delay()
                if not isinstance(taken, list):
                    seconds = min(taken, self._poll_interval)
                    await wait_for_event(self._has_news, self._clock, seconds)
                    continue
                if not await self._retry_deciding_until_all_recorded(taken):
                    return False
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        return True

    async def _queue_received_messages(self) -> NoReturn:
        """Let messages wait for their decision; dead-letter the unusable and those too many.

        Raises Deferred if the channel or the queue is gone.
        """
        while True:
            rejected: list[int] = []
            delivery = await self._deliveries.get()
            for left in reversed(range(MESSAGES_PER_TURN)):
                if isinstance(delivery, Deferred):
                    raise delivery
                message = self._parse_delivery_or_add_to_rejected(delivery, rejected)
                given_up = (
                    self._waiting.add_evicting_if_full(message) if message is not None else None
                )
                if given_up is not None:
                    self._on_unusable(given_up.received.user, TOO_MANY)
                    rejected.append(given_up.tag)
                if given_up is not message:
                    self._has_news.set()
                if not left or self._deliveries.empty():
                    break
                delivery = self._deliveries.get_nowait()
            await _reject_together(self._channel, rejected)
            await asyncio.sleep(0)  # a flood leaves the rest of the relay its turn

    def _parse_delivery_or_add_to_rejected(
        self, delivery: DeliveredMessage, rejected: list[int]
    ) -> WaitingMessage | None:
        """Return a message that can be decided; add the tag of any other to ``rejected``."""
        tag = delivery.delivery_tag or 0
        try:
            message = extract_message_of_verified_sender(delivery, self._queue)
            received = self._handler.read(message)
        except UnusableMessage as error:
            self._on_unusable(delivery.header.properties.user_id, str(error))
        except Exception:  # noqa: BLE001  # given back, it would return at once and block the others
            _log.exception(INTERNAL_ERROR)
        else:
            return WaitingMessage(tag, received)
        rejected.append(tag)
        return None

    async def _take_next_messages_or_delay(self) -> list[WaitingMessage] | float:
        """Return the next messages; without any, the seconds until there can be one.

        They have one kind of decision: if only some of them can be recorded at first, no release
        ends a newer hold, and no vote overtakes a hold.
        """
        taken = [self._postponed] if self._postponed is not None else []
        self._postponed = None
        while not taken or len(taken) < _max_messages_decided_together(taken[0]):
            message = self._waiting.take_message_or_delay(self._clock.monotonic())
            if not isinstance(message, WaitingMessage):
                return taken or message
            for release in self._waiting.remove_releases_overtaken_by_hold(message):
                self._on_unusable(release.received.user, OVERTAKEN)
                await self._channel.basic_reject(release.tag, requeue=False, wait=False)
            if taken and message.received.decision != taken[0].received.decision:
                self._postponed = message
                return taken
            taken.append(message)
        return taken

    async def _retry_deciding_until_all_recorded(self, messages: list[WaitingMessage]) -> bool:
        """Decide about messages; return False if some cannot be recorded. Raises Deferred.

        What is not recorded is tried again here. Returned to the queue, it would come behind others
        that were returned before.
        """
        failures = 0
        while True:
            # Each submits its decision before it first waits, so their order stays.
            decisions = (self._decide_and_settle_message(message) for message in messages)
            recorded = await asyncio.gather(*decisions)
            raise_if_cancelled()
            messages = [
                message
                for message, is_recorded in zip(messages, recorded, strict=True)
                if not is_recorded
            ]
            if not messages:
                return True
            failures += 1
            pause = exponential_backoff(failures + 1, first=self._poll_interval, maximum=MAX_PAUSE)
            if not await self._sleep_unless_deciding_is_blocked(pause):
                return False

    async def _sleep_unless_deciding_is_blocked(self, seconds: float) -> bool:
        """Wait; return False at once if no message can be decided.

        Raises Deferred if the channel or the queue is gone.
        """
        end = self._clock.monotonic() + seconds
        while (remaining := end - self._clock.monotonic()) > 0:
            if await self._handler.blocking_reason() is not None:
                return False
            await self._clock.sleep(min(remaining, self._poll_interval))
            await self._raise_error_of_reading()
        return True

    async def _raise_error_of_reading(self) -> None:
        """Raise the error with which reading ended, if it has ended."""
        if self._reading is not None and self._reading.done():
            await self._reading

    async def _decide_and_settle_message(self, message: WaitingMessage) -> bool:
        """Decide about a message and settle it; return False if the decision is not recorded."""
        try:
            recorded = await message.received.decide()
        except UnusableMessage as error:
            self._on_unusable(message.received.user, str(error))
        except Exception:  # noqa: BLE001  # given back, it would return at once and block the others
            _log.exception(INTERNAL_ERROR)
        else:
            if recorded:
                await self._channel.basic_ack(message.tag)
            return recorded
        await self._channel.basic_reject(message.tag, requeue=False)
        return True


async def _reject_together(channel: AbstractChannel, tags: Sequence[int]) -> None:
    """Dead-letter messages. aiormq itself writes ten rejections in a turn of the event loop.

    Raises ChannelInvalidStateError.
    """
    if not tags:
        return
    if channel.is_closed:
        raise amqp.ChannelInvalidStateError("the channel is closed")
    frames = [Basic.Reject(delivery_tag=tag, requeue=False) for tag in tags]
    await channel.connection.write_queue.put(ChannelFrame.marshall(channel.number, frames))


def _max_messages_decided_together(message: WaitingMessage) -> int:
    return VOTES_AT_ONCE if message.received.decision == "approve" else URGENT_AT_ONCE
