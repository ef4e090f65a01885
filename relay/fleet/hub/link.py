"""The hub's AMQP connection: it takes what the agents publish, and publishes for them.

Reports are acknowledged after they are on disk. Pulses need no acknowledgement: the next one says
the same. The broker vouches for who sent a message, and the parts in `hub` decide what it means.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NoReturn, Protocol

import pamqp.frame
from aio_pika import exceptions as amqp
from aiormq.abc import AbstractChannel, DeliveredMessage
from aiormq.exceptions import ChannelAccessRefused
from pamqp.commands import Basic

from relay.amqp.broker_url import host_port
from relay.amqp.cancellation_check import raise_if_cancelled
from relay.amqp.connection import HEARTBEAT, SETUP_TIMEOUT, GuardedConnection, keep_connected
from relay.amqp.delivery_buffer import Deliveries, make_delivery_buffer, open_consuming_channel
from relay.amqp.event_message import content_header
from relay.amqp.failures import ConnectionFailure, broker_message
from relay.amqp.publisher import (
    ConfirmedPublisher,
    PublishChannel,
    is_channel_open_for_frames,
    publish_transient_without_confirm,
)
from relay.amqp.topology import declare_topology, log_suffix_for_unchecked_parts
from relay.clock import Clock
from relay.errors import Deferred, DeliveryError
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.messages import MAX_BODY_BYTES
from relay.fleet.settings import HubSettings
from relay.fleet.topology import (
    command_exchange_name,
    fleet_topology,
    hub_pulse_queue_name,
    report_queue_name,
)
from relay.log_once import LogOnce
from relay.sinks.rabbitmq.sink import interpret_publish_result

CONFIRM_TIMEOUT = 3.0
"""Seconds that the broker may take to confirm an order, which has at most five."""
PREFETCH = 2_000
"""Messages that the broker sends before the first of them is acknowledged."""
MAX_BATCH = 256
"""Messages that are handed over together."""

_log = logging.getLogger(__name__)


class CumulativeAcknowledger:
    """Acknowledges the messages of one channel, which may be settled in any order.

    One frame acknowledges all messages up to the first that is not settled yet. A message that is
    settled stays so: after a bug, messages are handed over again.
    """

    def __init__(self, connection: GuardedConnection, channel: AbstractChannel) -> None:
        self._connection = connection
        self._channel = channel
        self._settled: dict[int, bool] = {}
        """By delivery tag: whether the broker still waits for the acknowledgement."""
        self._next = 1  # delivery tags of a channel count up from 1

    def acknowledge(self, tag: int) -> None:
        """The message is on disk, or needs nothing. `flush` tells the broker."""
        if not self._is_settled(tag):
            self._settled[tag] = True

    def dead_letter(self, tag: int) -> None:
        """Dead-letter a message that cannot be used."""
        if not self._is_settled(tag):  # the broker closes the channel if it was
            self._write_frame(Basic.Reject(tag, requeue=False))
            self._settled[tag] = False

    def flush(self) -> None:
        """Tell the broker what is acknowledged. A channel that is closed returns its messages."""
        last = None
        while self._next in self._settled:
            if self._settled.pop(self._next):
                last = self._next  # the broker closes the channel if this one was rejected
            self._next += 1
        if last is not None:
            self._write_frame(Basic.Ack(last, multiple=True))

    def _is_settled(self, tag: int) -> bool:
        return tag < self._next or tag in self._settled

    def _write_frame(self, frame: Basic.Ack | Basic.Reject) -> None:
        # Not through aiormq, where a frame can wait for ever in the queue of a connection that is
        # lost, and can be overtaken.
        if is_channel_open_for_frames(self._connection, self._channel):
            self._connection.write_frames_at_end_of_turn(
                pamqp.frame.marshal(frame, self._channel.number)
            )


class MessageHandler(Protocol):
    """What the hub does with the messages of agents."""

    def on_broker_connected(self) -> None:
        """The hub hears its agents from now on."""

    def on_broker_disconnected(self) -> None:
        """The hub does not hear its agents any more."""

    def on_broker_connection_failed(self) -> None:
        """The connection could not be made, or was lost."""

    async def take_messages_except_pulses(
        self, messages: Sequence[DeliveredMessage], settlements: CumulativeAcknowledger
    ) -> None:
        """Handle everything but pulses. Each message must be settled, now or later."""

    async def take_pulses(self, messages: Sequence[DeliveredMessage]) -> None:
        """Handle pulses."""


class HubLink:
    """The connection of the hub to the broker. It may be down: `run` connects for ever."""

    def __init__(
        self, settings: HubSettings, origin: Origin, handler: MessageHandler, clock: Clock
    ) -> None:
        self._settings = settings
        self._origin = origin
        self._handler = handler
        self._clock = clock
        self._commands = command_exchange_name(settings.exchange)
        self._publisher = ConfirmedPublisher(CONFIRM_TIMEOUT / 3)
        self._user = ""
        self._transient: tuple[GuardedConnection, AbstractChannel] | None = None
        self._deliveries: Deliveries = asyncio.Queue()
        """Reports that have arrived."""
        self._state_log = LogOnce(_log)
        self._was_connected = asyncio.Event()

    async def wait_for_first_connection(self) -> None:
        """Return once this hub is or was connected. So it is not a second hub of its fleet."""
        await self._was_connected.wait()

    @property
    def is_connected(self) -> bool:
        """Whether messages of the agents reach this hub."""
        return self._transient is not None

    async def run(self, *, heartbeat: int = HEARTBEAT) -> NoReturn:
        """Stay connected until cancelled."""
        await keep_connected(
            self._settings.broker_urls,
            f"imds-relay hub {self._origin.relay}",
            self._clock,
            self._serve,
            self._on_connection_failure,
            heartbeat=heartbeat,
            max_body_bytes=MAX_BODY_BYTES,
        )

    async def ask_broker_if_reports_wait(self) -> bool:
        """Whether reports wait that were not handed over yet, or nobody knows."""
        if self._transient is None or not self._deliveries.empty():
            return True
        _, channel = self._transient
        try:
            queue = await channel.queue_declare(
                report_queue_name(self._settings.exchange), passive=True
            )
        except (amqp.AMQPError, ChannelAccessRefused):
            return True
        return bool(queue.message_count) or not self._deliveries.empty()

    # --- publishing

    async def send(self, key: str, event: CloudEvent) -> bool:
        """Publish to agents; return whether any of them is bound to the key.

        Raises Deferred if the message was not published. If the broker does not say, this returns
        True: the message may be there.
        """
        try:
            async with asyncio.timeout(CONFIRM_TIMEOUT):
                result = await self._publisher.publish(
                    event.id, event.body, key, lambda: content_header(event, user_id=self._user)
                )
        except TimeoutError:
            return True
        if isinstance(result, amqp.ConnectionClosed | asyncio.CancelledError):
            return True  # it was written before the connection was lost
        receipt = interpret_publish_result(result, key, len(event.body), relay_declares=True)
        return receipt.status is None

    def send_transient(self, key: str, event: CloudEvent) -> None:
        """Publish what may be lost, if the hub is connected."""
        if self._transient is None:
            return
        connection, channel = self._transient
        publish_transient_without_confirm(
            connection, channel, exchange=self._commands, key=key, event=event, user=self._user
        )

    # --- the connection

    async def _serve(self, connection: GuardedConnection) -> NoReturn:
        self._user = connection.url.user or "guest"
        async with asyncio.timeout(SETUP_TIMEOUT):
            topology = fleet_topology(self._settings.exchange)
            unknown = await declare_topology(connection, topology, self._settings.declare)
            publish_channel = await PublishChannel.open(connection, self._commands)
            pulses = await self._start_consuming_pulses(connection)
        raise_if_cancelled()
        broker = host_port(connection.url)
        tasks = [
            asyncio.create_task(
                self._publisher.use_channel_until_closed(publish_channel, broker),
                name="hub: publish",
            ),
            asyncio.create_task(self._consume_reports(connection), name="hub: reports"),
            asyncio.create_task(self._consume_pulses(pulses), name="hub: pulses"),
        ]
        try:
            self._state_log.log_if_changed(
                logging.INFO,
                "fleet: connected to %s%s",
                broker,
                log_suffix_for_unchecked_parts(unknown),
            )
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._transient is not None:
                self._transient = None
                self._handler.on_broker_disconnected()
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        raise_if_cancelled()
        raise next(
            (
                error
                for error in ended
                if isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError)
            ),
            Deferred(f"the connection to {broker} was lost"),
        )

    def _on_connection_failure(self, failure: ConnectionFailure) -> None:
        self._handler.on_broker_connection_failed()
        self._publisher.note_connection_failure(failure)
        self._state_log.log_if_changed(logging.WARNING, "fleet: %s", failure.reason)

    async def _consume_reports(self, connection: GuardedConnection) -> NoReturn:
        queue = report_queue_name(self._settings.exchange)
        channel = await open_consuming_channel(connection, MAX_BATCH)
        settlements = CumulativeAcknowledger(connection, channel)
        self._deliveries = await _start_consuming(channel, queue, prefetch=PREFETCH)
        self._transient = connection, channel
        self._was_connected.set()
        self._handler.on_broker_connected()
        while True:
            await self._take_reports_or_dead_letter(
                await _take_batch(self._deliveries), settlements
            )
            settlements.flush()

    async def _take_reports_or_dead_letter(
        self, batch: Sequence[DeliveredMessage], settlements: CumulativeAcknowledger
    ) -> None:
        """Hand messages over. A bug must not lose more than the message that shows it.

        Without this, the broker would deliver that message again and again.
        """
        try:
            await self._handler.take_messages_except_pulses(batch, settlements)
        except DeliveryError:
            raise
        except Exception:  # noqa: BLE001  # whatever it is, the other messages must pass
            if len(batch) == 1:
                _log.exception("internal error: a message of an agent was dead-lettered")
                settlements.dead_letter(batch[0].delivery_tag or 0)
                return
            for message in batch:
                await self._take_reports_or_dead_letter([message], settlements)

    async def _start_consuming_pulses(self, connection: GuardedConnection) -> Deliveries:
        """Take pulses from now on, and nobody else. So a fleet has one hub. Raises Deferred."""
        queue = hub_pulse_queue_name(self._settings.exchange)
        channel = await open_consuming_channel(connection, MAX_BATCH)
        return await _start_consuming(channel, queue, prefetch=None)

    async def _consume_pulses(self, deliveries: Deliveries) -> NoReturn:
        while True:
            await self._hand_over_pulses(await _take_batch(deliveries))
            await asyncio.sleep(0)  # many pulses leave reports their turn

    async def _hand_over_pulses(self, batch: Sequence[DeliveredMessage]) -> None:
        """Hand pulses over. A bug must not lose more than the pulse that shows it."""
        try:
            await self._handler.take_pulses(batch)
        except DeliveryError:
            raise
        except Exception:  # noqa: BLE001  # the next pulse says the same
            if len(batch) == 1:
                _log.exception("internal error: a pulse of an agent was dropped")
                return
            for pulse in batch:
                await self._hand_over_pulses([pulse])


async def _start_consuming(
    channel: AbstractChannel, queue: str, *, prefetch: int | None
) -> Deliveries:
    """Return what will arrive: messages, and an error when the channel or the queue is gone.

    ``prefetch`` is None if messages need no acknowledgement. Then the queue is for this consumer
    alone. Raises Deferred.
    """
    deliveries = make_delivery_buffer(channel, queue)
    is_exclusive = prefetch is None
    if prefetch is not None:
        await channel.basic_qos(prefetch_count=prefetch)
    try:
        await channel.basic_consume(
            queue, deliveries.put, no_ack=is_exclusive, exclusive=is_exclusive
        )
    except amqp.ChannelNotFoundEntity as error:
        raise Deferred(
            f"the broker has no such queue ({broker_message(error)}): "
            "make it, or set fleet.declare: true"
        ) from None
    except ChannelAccessRefused as error:
        if "exclusive use" in broker_message(error):
            raise Deferred(
                f"another hub reads {queue}, and a fleet has one hub: stop one of them. "
                "The broker frees the queue within half a minute after a lost connection"
            ) from None
        raise Deferred(
            f"the broker refused the queue ({broker_message(error)}): "
            "give the hub's user the rights that `imds-relay fleet definitions` prints"
        ) from None
    return deliveries


async def _take_batch(
    deliveries: Deliveries,
) -> list[DeliveredMessage]:
    """Return the messages that have arrived, at least one. Raises the error that has arrived."""
    batch: list[DeliveredMessage] = []
    delivery = await deliveries.get()
    while not isinstance(delivery, Deferred):
        batch.append(delivery)
        if deliveries.empty() or len(batch) == MAX_BATCH:
            return batch
        delivery = deliveries.get_nowait()
    if not batch:
        raise delivery
    deliveries.put_nowait(delivery)  # it is last: the channel is closed
    return batch
