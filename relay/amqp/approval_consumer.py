"""Receives approvals from the queue of this scope, and acknowledges what has been decided.

Messages stay in the queue while nothing can be decided. A message is acknowledged only after its
decision is on disk, and an unusable one is dead-lettered. What a message means is the handler's
business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import aiormq
from aio_pika import exceptions as amqp
from aio_pika.abc import AbstractChannel
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from relay.amqp.approval_message import ApprovalMessage, UnusableMessage, parse_message
from relay.amqp.broker_url import host_port
from relay.amqp.cancellation import raise_if_cancelled
from relay.amqp.connection import (
    CLOSE_TIMEOUT,
    HEARTBEAT,
    SETUP_TIMEOUT,
    Connection,
    keep_connected,
)
from relay.amqp.failures import ConnectionFailure, broker_message, describe_failure
from relay.amqp.topology import (
    Declare,
    approvals_exchange,
    approvals_queue,
    approvals_routing_key,
    approvals_topology,
    establish,
    unknown_parts,
)
from relay.clock import Clock
from relay.errors import Deferred
from relay.log_once import LogOnce
from relay.net.backoff import exponential_backoff

PREFETCH = 16
"""Messages that the broker sends before the first of them is acknowledged."""
POLL_INTERVAL = 1.0
"""Seconds between two checks of whether messages can be decided."""
MAX_PAUSE = 60.0
"""Seconds: the longest pause after a decision that could not be recorded.

Each delivery counts towards the delivery limit of the queue.
"""

_log = logging.getLogger(__name__)


class ApprovalHandler(Protocol):
    """What the consumer asks about messages. See `relay.approvals.amqp_handler`."""

    async def blocking_reason(self) -> str | None:
        """Return why no message can be decided now; None if messages can be decided."""

    async def decide(self, message: ApprovalMessage) -> bool:
        """Decide about a message; return False if the decision cannot be recorded now.

        Raises UnusableMessage.
        """


class ApprovalConsumer:
    """Consumes the queue of one scope while messages can be decided.

    ``on_unusable`` gets the RabbitMQ user, if there is one, and the reason.
    """

    def __init__(
        self,
        *,
        urls: Callable[[], Sequence[URL]],
        declare: Declare,
        exchange: str,
        scope: str,
        relay: str,
        handler: ApprovalHandler,
        on_unusable: Callable[[str | None, str], None],
        clock: Clock,
    ) -> None:
        self._urls = urls
        self._declare = declare
        self._topology = approvals_topology(exchange, scope)
        self._exchange = approvals_exchange(exchange)
        self._queue = approvals_queue(exchange, scope)
        self._routing_key = approvals_routing_key(scope)
        self._connection_name = f"imds-relay approvals of {scope} at {relay}"
        self._consumer_tag = f"imds-relay {relay}"
        self._handler = handler
        self._on_unusable = on_unusable
        self._clock = clock
        self._state_log = LogOnce(_log)

    async def run(
        self, *, heartbeat: int = HEARTBEAT, poll_interval: float = POLL_INTERVAL
    ) -> NoReturn:
        """Stay connected and consume until cancelled. Both intervals are in seconds."""

        async def serve(connection: Connection) -> NoReturn:
            await self._serve(connection, poll_interval)

        await keep_connected(
            self._urls,
            self._connection_name,
            self._clock,
            serve,
            self._log_failure,
            heartbeat=heartbeat,
        )

    async def _serve(self, connection: Connection, poll_interval: float) -> NoReturn:
        async with asyncio.timeout(SETUP_TIMEOUT):
            unseen = await establish(connection, self._topology, self._declare)
        broker = host_port(connection.url)
        hint = unknown_parts(unseen)
        failures = 0
        while True:
            while (reason := await self._handler.blocking_reason()) is not None:
                self._log_state(f"connected to {broker}; messages wait: {reason}{hint}")
                await self._clock.sleep(poll_interval)
                if connection.lost:
                    raise Deferred(f"the connection to {broker} was lost")
            channel = await connection.channel(publisher_confirms=False)
            deliveries = await self._start_consuming(channel)
            self._log_state(f"connected to {broker}; messages are taken from {self._queue}{hint}")
            recorded = await self._decide_all(deliveries, poll_interval)
            # What is not acknowledged returns to the queue when the channel closes.
            with connection.cut_after(CLOSE_TIMEOUT):
                await channel.close()
            failures = 0 if recorded else failures + 1
            pause = exponential_backoff(failures + 1, first=poll_interval, maximum=MAX_PAUSE)
            await self._clock.sleep(pause)

    async def _start_consuming(
        self, channel: AbstractChannel
    ) -> asyncio.Queue[DeliveredMessage | Deferred]:
        """Return what will arrive: messages, and an error when the channel or the queue is gone.

        Raises Deferred.
        """
        deliveries: asyncio.Queue[DeliveredMessage | Deferred] = asyncio.Queue()

        def on_close(_: object, error: BaseException | None) -> None:
            reason = describe_failure(error or amqp.ChannelClosed()).reason
            deliveries.put_nowait(Deferred(f"the channel was closed: {reason}"))

        def on_cancel(_: object) -> None:
            deliveries.put_nowait(Deferred(f"the queue {self._queue} was deleted"))

        channel.close_callbacks.add(on_close)
        aiormq_channel = await channel.get_underlay_channel()
        aiormq_channel.on_consumer_cancel_callbacks.add(on_cancel)
        await aiormq_channel.basic_qos(prefetch_count=PREFETCH)
        try:
            await aiormq_channel.basic_consume(
                self._queue, deliveries.put, consumer_tag=self._consumer_tag
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

    async def _decide_all(
        self, deliveries: asyncio.Queue[DeliveredMessage | Deferred], poll_interval: float
    ) -> bool:
        """Decide about messages while that is possible.

        Returns False if a decision could not be recorded. Raises Deferred if the channel or the
        queue is gone.
        """
        while await self._handler.blocking_reason() is None:
            try:
                async with asyncio.timeout(poll_interval):
                    delivery = await deliveries.get()
            except TimeoutError:
                continue
            if isinstance(delivery, Deferred):
                raise delivery
            recorded = await self._decide(delivery)
            raise_if_cancelled()
            if not recorded:
                return False
        return True

    async def _decide(self, delivery: DeliveredMessage) -> bool:
        """Decide about a message and settle it; return False if the decision is not recorded."""
        channel: aiormq.abc.AbstractChannel = delivery.channel
        delivery_tag = delivery.delivery_tag or 0
        try:
            message = parse_message(delivery, self._exchange, self._routing_key)
            recorded = await self._handler.decide(message)
        except UnusableMessage as error:
            self._on_unusable(delivery.header.properties.user_id, str(error))
            await channel.basic_reject(delivery_tag, requeue=False)
            return True
        except Exception:  # noqa: BLE001  # given back, it would return at once and block the others
            _log.exception("internal error: a message with an approval was dead-lettered")
            await channel.basic_reject(delivery_tag, requeue=False)
            return True
        if recorded:
            await channel.basic_ack(delivery_tag)
        return recorded

    def _log_failure(self, failure: ConnectionFailure) -> None:
        self._state_log.log(logging.WARNING, "approvals over AMQP: %s", failure.reason)

    def _log_state(self, state: str) -> None:
        self._state_log.log(logging.INFO, "approvals over AMQP: %s", state)
