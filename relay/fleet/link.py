"""The one AMQP connection of an agent or a hub. It may be down: `Link.run` connects for ever.

Both ends publish over one channel, whose messages keep their order, and read from one queue over
another. `AgentLink` makes its own queue, which is exclusive to the connection. The exchanges are
the hub's: the agent publishes and binds, and reads the error, because a check can demand a right of
its own. `HubLink` makes the exchanges and the queue of reports. It also makes a queue that is
exclusive to its connection, so that a fleet has one hub.

The broker vouches for who sent a message, and whoever takes it decides what it means.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Literal, NoReturn

from aio_pika import exceptions as amqp
from aiormq.abc import AbstractChannel, DeliveredMessage
from aiormq.exceptions import (
    ChannelAccessRefused,
    ChannelInvalidStateError,
    ChannelLockedResource,
)
from typing_extensions import override  # in typing from Python 3.12
from yarl import URL

from relay.amqp.broker_url import host_port
from relay.amqp.connection import HEARTBEAT, SETUP_TIMEOUT, GuardedConnection, keep_connected
from relay.amqp.delivery_buffer import (
    QUEUE_DELETED,
    Deliveries,
    make_delivery_buffer,
    open_consuming_channel,
)
from relay.amqp.failures import ConnectionFailure, broker_message, raise_if_cancelled
from relay.amqp.message_verification import UnusableMessage
from relay.amqp.publisher import (
    CONNECTION_WAIT,
    ConfirmedPublisher,
    PublishChannel,
    PublishResult,
)
from relay.amqp.topology import declare_topology, log_suffix_for_unchecked_parts
from relay.clock import Clock
from relay.errors import Deferred, DeliveryError
from relay.events.build import Origin, RecordRelayEvent
from relay.events.cloudevent import CloudEvent
from relay.fleet.message_reader import read_message
from relay.fleet.messages import MAX_BODY_BYTES, Content, PulseRequest
from relay.fleet.routing import scope_key, verify_command_from_hub
from relay.fleet.settings import AgentSettings, HubSettings
from relay.fleet.topology import (
    AGENT_QUEUE_ARGUMENTS,
    agent_binding_keys,
    agent_publish_exchange_name,
    command_exchange_name,
    fleet_topology,
    hub_lock_queue_name,
    report_queue_name,
)
from relay.log_once import LogOnce
from relay.sinks.rabbitmq.sink import interpret_publish_result

AGENT_PUBLISH_TIMEOUT = 15.0
HUB_PUBLISH_TIMEOUT = 1.0
"""Seconds that a message waits while the broker lets nobody publish."""
CONFIRM_TIMEOUT = 3.0
"""Seconds that the broker may take to confirm a message of the hub. An order has at most five."""
SOCKET_BUFFERS = 32 * 1024
"""Bytes of each buffer of an agent's socket. It sends little, and the broker has thousands."""
FIRST_RECONNECT_SPREAD = 10.0
MAX_RECONNECT_SPREAD = 60.0
"""Seconds over which agents spread their first and their later tries to connect again."""
LISTEN_RETRY_DELAY = 5.0
"""Seconds, up to twice as many, until the next try to bind the agent's queue."""
PREFETCH = 2_000
"""Messages that the broker sends a hub before the first of them is acknowledged."""
MAX_BATCH = 256
"""Messages that are handed over together."""
LOST_AFTER = 90.0
"""Seconds without a connection to RabbitMQ after which the hub reports it."""
_RIGHTS = "rights that `imds-relay fleet definitions` prints"
_log = logging.getLogger(__name__)


class Link:
    """What both ends have in common. An end says what it reads, and what it does with that.

    It publishes to ``exchange``. ``options`` are those of `keep_connected`.
    """

    _who: ClassVar[Literal["an agent", "a hub"]]
    _messages_per_turn: ClassVar[int]
    """Messages that are read in one turn of the event loop."""
    _no_ack: ClassVar[bool]

    def __init__(
        self,
        settings: AgentSettings | HubSettings,
        name: str,
        clock: Clock,
        exchange: str,
        publisher: ConfirmedPublisher,
        **options: Any,
    ) -> None:
        self._settings = settings
        self._name = name
        self._clock = clock
        self._exchange = exchange
        self._publisher = publisher
        self._options = options
        self._listening: AbstractChannel | None = None
        self._deliveries: Deliveries = asyncio.Queue()
        self._state_log = LogOnce(_log)

    @property
    def is_connected(self) -> bool:
        """Whether messages of the other end reach this one."""
        return self._listening is not None

    async def run(self, *, heartbeat: int = HEARTBEAT) -> NoReturn:
        """Stay connected until cancelled."""
        await keep_connected(
            self._settings.broker_urls,
            self._name,
            self._clock,
            self._serve,
            self._on_failure,
            heartbeat=heartbeat,
            max_body_bytes=MAX_BODY_BYTES,
            **self._options,
        )

    async def _publish(
        self, event: CloudEvent, key: str, expiration: int | None = None
    ) -> PublishResult:
        return await self._publisher.publish(event, key, expiration=expiration)

    async def _serve(self, connection: GuardedConnection) -> NoReturn:
        """Use a connection until it is over, which raises."""
        tasks = [
            asyncio.create_task(self._keep_publishing(connection)),
            asyncio.create_task(self._keep_listening(connection)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        raise_if_cancelled()
        raise next(
            (error for error in ended if not isinstance(error, asyncio.CancelledError)),
            Deferred(f"the connection to {host_port(connection.url)} was lost"),
        )

    def _user_of(self, url: URL) -> str:
        """Return the user whom the messages name. Raises Deferred if the URL does not name it."""
        if not url.user and url.query.get("auth") == "external":
            raise Deferred(
                f"fleet.url names no user, but the messages of {self._who} do: write the user "
                "of the certificate before the host, as in amqps://user@host"
            )
        return url.user or "guest"  # as aiormq logs in

    async def _keep_publishing(self, connection: GuardedConnection) -> NoReturn:
        user = self._user_of(connection.url)
        while True:
            async with asyncio.timeout(SETUP_TIMEOUT):
                channel = await PublishChannel.open(connection, self._exchange, user_id=user)
            raise_if_cancelled()
            await self._publisher.use_channel_until_closed(channel, host_port(connection.url))

    async def _keep_listening(self, connection: GuardedConnection) -> NoReturn:
        """Take messages until the channel or the queue is gone. Raises Deferred."""
        async with asyncio.timeout(SETUP_TIMEOUT):
            channel = await open_consuming_channel(connection, self._messages_per_turn)
            try:
                queue, state = await self._open_queue(connection, channel)
                deliveries = make_delivery_buffer(channel, queue)
                await channel.basic_consume(queue, deliveries.put, no_ack=self._no_ack)
            except (amqp.ChannelNotFoundEntity, ChannelAccessRefused) as error:
                is_missing = isinstance(error, amqp.ChannelNotFoundEntity)
                reason = self._explain(broker_message(error), is_missing=is_missing)
                raise Deferred(reason) from None
        raise_if_cancelled()
        self._state_log.log_if_changed(
            logging.INFO, "fleet: connected to %s%s", host_port(connection.url), state
        )
        self._listening, self._deliveries = channel, deliveries
        try:
            self._on_listening()
            while True:
                await self._take(channel, await _take_batch(deliveries))
        finally:
            self._listening = None
            self._on_deaf()

    async def _open_queue(
        self, connection: GuardedConnection, channel: AbstractChannel
    ) -> tuple[str, str]:
        """Return the queue from which it reads, ready, and the end of a sentence for the log."""
        raise NotImplementedError

    def _explain(self, error: str, *, is_missing: bool) -> str:
        """Return why there is no queue to read from: it, or its exchange, is missing or refused."""
        raise NotImplementedError

    async def _take(self, channel: AbstractChannel, batch: Sequence[DeliveredMessage]) -> None:
        raise NotImplementedError

    def _on_listening(self) -> None:
        pass

    def _on_deaf(self) -> None:
        pass

    def _on_failure(self, failure: ConnectionFailure) -> None:
        self._publisher.note_connection_failure(failure)
        self._state_log.log_if_changed(logging.WARNING, "fleet: %s", failure.reason)


async def _take_batch(deliveries: Deliveries) -> list[DeliveredMessage]:
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


# --- the agent


def spread_reconnect_delay(failed_rounds: int, chance: float) -> float:
    """Return how many seconds an agent waits before it connects again.

    All agents lose the broker at once. Each waits a random part of a span that starts at
    `FIRST_RECONNECT_SPREAD` and doubles up to `MAX_RECONNECT_SPREAD`.
    """
    doublings = min(max(failed_rounds, 1) - 1, 10)
    return chance * min(FIRST_RECONNECT_SPREAD * 2.0**doublings, MAX_RECONNECT_SPREAD)


class AgentLink(Link):
    """The end of an agent. ``on_message`` gets what the hub says, and ``on_listening`` no argument.

    Neither may wait. While the agent cannot listen, it tries again, and reports all the same.
    """

    _who = "an agent"
    _messages_per_turn = 10  # the hub sends an agent few
    _no_ack = True  # nothing is delivered again: an order is for now

    def __init__(
        self,
        settings: AgentSettings,
        origin: Origin,
        on_message: Callable[[Content], None],
        on_listening: Callable[[], None],
        clock: Clock,
        *,
        chance: Callable[[], float] = random.random,
        publish_timeout: float = AGENT_PUBLISH_TIMEOUT,
        connection_wait: float = CONNECTION_WAIT,
    ) -> None:
        super().__init__(
            settings,
            f"imds-relay agent {origin.relay} of {origin.scope}",
            clock,
            agent_publish_exchange_name(settings.exchange),
            ConfirmedPublisher(publish_timeout, connection_wait),
            chance=chance,
            delay=spread_reconnect_delay,
            socket_buffers=SOCKET_BUFFERS,
        )
        self._origin = origin
        self._on_message = on_message
        self._tell_listening = on_listening
        self._chance = chance
        self._hub_user = settings.hub_user
        self._commands = command_exchange_name(settings.exchange)
        self._keys = agent_binding_keys(origin)
        self._queue: str | None = None
        self._refusal_log = LogOnce(_log)

    async def publish(self, event: CloudEvent, key: str, expiration: int | None = None) -> None:
        """Return when the hub's queue holds the event. Raises Deferred or Rejected.

        It is dropped there after ``expiration`` milliseconds.
        """
        result = await self._publish(event, key, expiration)
        if isinstance(result, amqp.ChannelNotFoundEntity):
            raise Deferred(
                f"the broker has no exchange {self._exchange} ({broker_message(result)}): "
                "the hub makes it when it starts",
                status=404,
            )
        receipt = interpret_publish_result(result, key, len(event.body), relay_declares=True)
        if receipt.status is not None:
            raise Deferred(
                f"{receipt.response}: the hub makes the queue when it starts", status=receipt.status
            )

    @override
    async def _keep_listening(self, connection: GuardedConnection) -> NoReturn:
        self._queue = None  # it went with the connection before
        while True:
            try:
                await super()._keep_listening(connection)
            except Deferred as error:
                if connection.is_over or error.status == QUEUE_DELETED:
                    raise
                self._state_log.log_if_changed(logging.WARNING, "fleet: %s", error.reason)
            await self._clock.sleep(LISTEN_RETRY_DELAY * (1 + self._chance()))

    @override
    async def _open_queue(
        self, connection: GuardedConnection, channel: AbstractChannel
    ) -> tuple[str, str]:
        if self._queue is None:
            declared = await channel.queue_declare(
                "", exclusive=True, arguments=dict(AGENT_QUEUE_ARGUMENTS)
            )
            self._queue = str(declared.queue)
        for key in self._keys:
            await channel.queue_bind(self._queue, self._commands, key)
        return self._queue, f"; the hub's orders are taken from {self._queue}"

    @override
    def _explain(self, error: str, *, is_missing: bool) -> str:
        if is_missing:
            return (
                f"the broker has no exchange {self._commands} ({error}): "
                "the hub makes it when it starts; no orders until then"
            )
        refused = f"refused to {'make' if self._queue is None else 'bind'} the agent's queue"
        return f"the broker {refused} ({error}): give the user the {_RIGHTS}"

    @override
    async def _take(self, channel: AbstractChannel, batch: Sequence[DeliveredMessage]) -> None:
        for message in batch:
            try:
                self._on_message(self._read(message))
            except UnusableMessage as error:
                self._refusal_log.log_if_changed(
                    logging.WARNING, "fleet: a message to this agent was refused: %s", error
                )
            except Exception:  # noqa: BLE001  # a bug must not stop the next message
                _log.exception("internal error: a message of the hub was dropped")

    def _read(self, message: DeliveredMessage) -> Content:
        """Return what the hub says. Raises UnusableMessage if the message is not the hub's."""
        key = verify_command_from_hub(message, self._commands, self._keys, self._hub_user)
        content = read_message(message.body).content
        if isinstance(content, PulseRequest) is not (key == scope_key(self._origin.scope)):
            raise UnusableMessage(f"it is of another kind than its routing key {key}")
        return content

    @override
    def _on_listening(self) -> None:
        self._tell_listening()


# --- the hub


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

    _who = "a hub"
    _messages_per_turn = MAX_BATCH
    _no_ack = False
    lost_reason = "the hub has no connection to RabbitMQ, so it hears no agent"

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
        """``on_lost`` is called when the connection is lost."""
        super().__init__(
            settings,
            f"imds-relay hub {origin.relay}",
            clock,
            command_exchange_name(settings.exchange),
            ConfirmedPublisher(HUB_PUBLISH_TIMEOUT),
        )
        self.lost = False
        """Whether there has been no connection for `LOST_AFTER` seconds."""
        self.polls = 0
        """How many messages of agents were read."""
        self.failures = 0
        """How often the connection was lost or could not be made since it was there last."""
        self._hub_settings = settings
        self._report = report
        self._take_messages = take
        self._is_saved = is_saved
        self._on_lost = on_lost
        self._deaf_since = clock.monotonic()
        self._was_connected = asyncio.Event()
        self._reports = report_queue_name(settings.exchange)
        self._is_taking = False
        """Whether messages are handed over now."""
        self._taken: list[int] = []
        """The delivery tags that are not acknowledged yet."""

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
        waiting: int | None = None
        with _channel_may_close():
            for _ in range(2):
                declared = await channel.queue_declare(self._reports, passive=True)
                waiting = declared.message_count
                if waiting:
                    break
        is_idle = self._deliveries.empty() and not self._is_taking
        return waiting == 0 and is_idle and self._listening is channel

    async def send(self, key: str, event: CloudEvent) -> bool:
        """Publish to agents; return whether any of them is bound to the key.

        Raises Deferred if the message was not published. If the broker does not say, this returns
        True: the message may be there.
        """
        try:
            async with asyncio.timeout(CONFIRM_TIMEOUT):
                result = await self._publish(event, key)
        except TimeoutError:
            return True
        if isinstance(result, amqp.ConnectionClosed | asyncio.CancelledError):
            return True  # it was written before the connection was lost
        receipt = interpret_publish_result(result, key, len(event.body), relay_declares=True)
        return receipt.status is None

    async def acknowledge(self) -> None:
        """Acknowledge what was taken, if it is on disk now."""
        if self._taken and self._listening is not None and self._is_saved():
            last, self._taken = self._taken[-1], []
            # What is not acknowledged comes again.
            with suppress(TimeoutError), _channel_may_close():
                async with asyncio.timeout(CONFIRM_TIMEOUT):
                    await self._listening.basic_ack(last, multiple=True)

    @override
    async def _open_queue(
        self, connection: GuardedConnection, channel: AbstractChannel
    ) -> tuple[str, str]:
        settings = self._hub_settings
        unknown = await declare_topology(
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
        return queue, log_suffix_for_unchecked_parts(unknown)

    @override
    def _explain(self, error: str, *, is_missing: bool) -> str:
        if is_missing:
            return f"the broker has no such queue ({error}): make it, or set fleet.declare: true"
        return f"the broker refused the queue ({error}): give the hub's user the {_RIGHTS}"

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
                self._taken.append(tag)

    @override
    def _on_listening(self) -> None:
        self._taken = []
        self._was_connected.set()
        self.failures = 0
        if self.lost:
            self.lost = False
            self._report("relay.source-recovered", "the hub hears its agents again")

    @override
    def _on_deaf(self) -> None:
        self._deaf_since = self._clock.monotonic()
        self._on_lost()

    @override
    def _on_failure(self, failure: ConnectionFailure) -> None:
        self.failures += 1
        super()._on_failure(failure)

    async def watch(self) -> NoReturn:
        """Report the loss of the connection, until cancelled."""
        while True:
            await self._clock.sleep(1.0)
            deaf = self._clock.monotonic() - self._deaf_since
            if not (self.is_connected or self.lost or deaf < LOST_AFTER):
                self.lost = True
                self._report("relay.source-lost", f"{self.lost_reason} (for {LOST_AFTER:g} s)")
