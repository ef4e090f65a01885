"""The link of the hub, which makes the exchanges and the queue of reports, and reads that.

A queue that is exclusive to its connection sees to it that a fleet has one hub.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from aio_pika import exceptions as amqp
from aiormq.abc import AbstractChannel, DeliveredMessage
from aiormq.exceptions import ChannelInvalidStateError, ChannelLockedResource
from typing_extensions import override  # in typing from Python 3.12

from relay.amqp.connection import GuardedConnection
from relay.amqp.failures import raise_if_cancelled
from relay.amqp.publisher import ConfirmedPublisher
from relay.amqp.topology import declare_topology
from relay.clock import Clock
from relay.errors import Deferred, DeliveryError
from relay.events.build import Origin, RecordRelayEvent
from relay.events.cloudevent import CloudEvent
from relay.fleet.link import RIGHTS, Link
from relay.fleet.routing import (
    command_exchange_name,
    fleet_topology,
    hub_lock_queue_name,
    report_queue_name,
)
from relay.fleet.settings import HubSettings
from relay.sinks.rabbitmq.sink import interpret_publish_result

PUBLISH_TIMEOUT = 1.0
"""Seconds that a message waits while the broker lets nobody publish."""
CONFIRM_TIMEOUT = 3.0
"""Seconds that the broker may take to confirm a message of the hub. An order has at most five."""
PREFETCH = 2_000
"""Messages that the broker sends a hub before the first of them is acknowledged."""
LOST_AFTER = 90.0
"""Seconds without a connection to RabbitMQ after which the hub reports it."""
_log = logging.getLogger(__name__)


@contextmanager
def _channel_may_close() -> Iterator[None]:
    """End the block if the channel is closed. Its reader gets the error from the buffer."""
    try:
        yield
    except (amqp.AMQPError, ChannelInvalidStateError):
        return
    except asyncio.CancelledError:
        raise_if_cancelled()  # else aiormq raised it


class HubLink(Link):
    """The end of the hub, and the source of its events for the API.

    ``take`` gets messages, and returns the delivery tags of those to dead-letter. The others are
    acknowledged once ``is_saved``: what they said is on disk.
    """

    _no_ack = False
    _if_missing = "the broker has no such queue ({}): make it, or set fleet.declare: true"
    _if_refused = f"the broker refused the queue ({{}}): give the hub's user the {RIGHTS}"
    lost_reason = "the hub has no connection to RabbitMQ, so it hears no agent"
    poll_seconds = read_age = clock_offset = None  # it does not poll

    def __init__(
        self,
        settings: HubSettings,
        origin: Origin,
        clock: Clock,
        report: RecordRelayEvent,
        take: Callable[[Sequence[DeliveredMessage]], Awaitable[Collection[int]]],
        *,
        is_saved: Callable[[], bool],
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(
            settings,
            f"imds-relay hub {origin.relay}",
            clock,
            ConfirmedPublisher(command_exchange_name(settings.exchange), PUBLISH_TIMEOUT),
        )
        self.lost = False
        """Whether there has been no connection for `LOST_AFTER` seconds."""
        self.connected_since: float | None = None
        """Since when this is the hub of its fleet, by the monotonic clock; None: it is not.

        Without a connection no grant is claimed.
        """
        self.polls = 0
        self.failures = 0
        """How often the connection was lost or could not be made since it was there last."""
        self._settings = settings
        self._report = report
        self._take_messages = take
        self._is_saved = is_saved
        self._on_lost = on_lost
        self._deaf_since = clock.monotonic()
        self._was_connected = asyncio.Event()
        self._reports = report_queue_name(settings.exchange)
        self._is_taking = False
        self._taken = 0
        """The last delivery tag that is not acknowledged yet; 0: there is none."""

    async def wait_for_first_connection(self) -> None:
        """Return once this hub is or was connected. So it is not a second hub of its fleet."""
        await self._was_connected.wait()

    async def has_read_all(self) -> bool:
        """Whether the hub has taken all that agents had published when this was called.

        Most of a backlog waits in the broker. What has left its queue can still be on its way when
        the broker answers, but arrives before the next answer: so the broker is asked twice.
        """
        channel = self._listening
        if channel is None:
            return False
        with _channel_may_close():
            for _ in range(2):
                declared = await channel.queue_declare(self._reports, passive=True)
                if declared.message_count != 0:
                    return False
            is_idle = self._deliveries.empty() and not self._is_taking
            return is_idle and self._listening is channel
        return False

    async def send(self, key: str, event: CloudEvent) -> bool:
        """Publish to agents; return whether any of them is bound to the key.

        Raises Deferred, after `CONFIRM_TIMEOUT` at most, if the broker does not say so: the message
        may be there.
        """
        try:
            async with asyncio.timeout(CONFIRM_TIMEOUT):
                result = await self._publisher.publish(event, key)
        except TimeoutError:
            raise Deferred(f"the broker did not confirm it in {CONFIRM_TIMEOUT:g} s") from None
        receipt = interpret_publish_result(result, key, len(event.body), relay_declares=True)
        return receipt.status is None

    async def acknowledge(self) -> None:
        if self._taken and self._listening is not None and self._is_saved():
            last, self._taken = self._taken, 0
            # What is not acknowledged comes again.
            with suppress(TimeoutError), _channel_may_close():
                async with asyncio.timeout(CONFIRM_TIMEOUT):
                    await self._listening.basic_ack(last, multiple=True)

    @override
    async def _open_queue(
        self, connection: GuardedConnection, channel: AbstractChannel
    ) -> tuple[str, str]:
        settings = self._settings
        note = await declare_topology(
            connection, fleet_topology(settings.exchange), settings.declare
        )
        lock, queue = hub_lock_queue_name(settings.exchange), self._reports
        # Without the right to ask, the hub would lose its channel whenever it does.
        await channel.queue_declare(queue, passive=True)
        try:
            await channel.queue_declare(lock, exclusive=True)
        except ChannelLockedResource:
            raise Deferred(
                f"another hub reads {queue}, and a fleet has one hub: stop one of them. "
                "The broker frees the queue within half a minute after a lost connection"
            ) from None
        await channel.basic_qos(prefetch_count=PREFETCH)
        return queue, note

    @override
    async def _take(self, channel: AbstractChannel, batch: Sequence[DeliveredMessage]) -> None:
        self._is_taking = True
        try:
            await self._take_or_dead_letter(channel, batch)
        finally:
            self._is_taking = False
        await self.acknowledge()

    async def _take_or_dead_letter(
        self, channel: AbstractChannel, batch: Sequence[DeliveredMessage]
    ) -> None:
        """Hand messages over. A bug must not lose more than the message that shows it.

        Without this, the broker would deliver that message again and again.
        """
        try:
            unusable = await self._take_messages(batch)
        except DeliveryError:
            raise
        except Exception:  # noqa: BLE001  # whatever it is, the other messages must pass
            if len(batch) > 1:
                for message in batch:
                    await self._take_or_dead_letter(channel, [message])
                return
            _log.exception("internal error: a message of an agent was dead-lettered")
            unusable = [message.delivery_tag or 0 for message in batch]
        for message in batch:
            tag = message.delivery_tag or 0
            if tag in unusable:
                await channel.basic_reject(tag, requeue=False)
            else:
                self._taken = tag

    @override
    def _on_listening(self) -> None:
        self._taken = 0
        self.connected_since = self._clock.monotonic()
        self._was_connected.set()
        self.failures = 0
        if self.lost:
            self.lost = False
            self._report("relay.source-recovered", "the hub hears its agents again")

    @override
    def _on_deaf(self) -> None:
        self.connected_since = None
        self._deaf_since = self._clock.monotonic()
        self._on_lost()

    @override
    def _on_failure(self, failure: Deferred) -> None:
        self.failures += 1
        super()._on_failure(failure)

    async def watch(self) -> NoReturn:
        while True:
            await self._clock.sleep(1.0)
            deaf = self._clock.monotonic() - self._deaf_since
            if not (self.is_connected or self.lost or deaf < LOST_AFTER):
                self.lost = True
                self._report("relay.source-lost", f"{self.lost_reason} (for {LOST_AFTER:g} s)")
