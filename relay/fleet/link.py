"""The one AMQP connection of an agent, and what that of a hub (`relay.fleet.hub.link`) shares.

It may be down: `Link.run` connects for ever. Both ends publish over one channel, whose messages
keep their order, and read from one queue over another. The broker vouches for who sent a message,
and whoever takes it decides what it means.

An agent makes its own queue, which is exclusive to the connection. The exchanges are the hub's: the
agent publishes and binds, and reads the error, because a check can demand a right of its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

from aio_pika import exceptions as amqp
from aiormq.abc import AbstractChannel, DeliveredMessage
from typing_extensions import override  # in typing from Python 3.12

from relay.amqp.broker_url import host_port
from relay.amqp.connection import (
    QUEUE_DELETED,
    SETUP_TIMEOUT,
    Deliveries,
    GuardedConnection,
    UnusableMessage,
    keep_connected,
    open_channel,
    start_consuming,
    take_batch,
)
from relay.amqp.failures import broker_message, explained_refusal, raise_if_cancelled
from relay.amqp.publisher import ConfirmedPublisher
from relay.clock import Clock
from relay.errors import Deferred, Rejected
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.messages import MAX_BODY_BYTES, Content, PulseRequest, read_message
from relay.fleet.routing import (
    AGENT_QUEUE_ARGUMENTS,
    agent_binding_keys,
    agent_publish_exchange_name,
    command_exchange_name,
    report_key,
    scope_key,
    verify_command_from_hub,
)
from relay.fleet.settings import AgentSettings, FleetBrokerSettings
from relay.logs import LogOnce
from relay.net import exponential_backoff
from relay.sinks import Receipt
from relay.sinks.rabbitmq.sink import interpret_publish_result

PUBLISH_TIMEOUT = 15.0
"""Seconds that a message of an agent waits while the broker lets nobody publish."""
MAX_BATCH = 256
"""Messages that are read in one turn of the event loop, and handed over together."""
FIRST_RECONNECT_SPREAD = 10.0
MAX_RECONNECT_SPREAD = 60.0
"""Seconds over which agents spread their first and their later tries to connect again."""
LISTEN_RETRY_DELAY = 5.0
"""Seconds, up to twice as many, until the next try to bind the agent's queue."""
RIGHTS = "rights that `imds-relay fleet definitions` prints"
_log = logging.getLogger(__name__)


class Link:
    """What both ends have in common. An end says what it reads, and what it does with that.

    ``options`` are those of `keep_connected`.
    """

    _no_ack: ClassVar[bool]
    _if_missing: str
    _if_refused: str
    """Why there is no queue to read from, with {} for what the broker says."""

    def __init__(
        self,
        settings: FleetBrokerSettings,
        name: str,
        clock: Clock,
        publisher: ConfirmedPublisher,
        **options: Any,
    ) -> None:
        self._urls = settings.broker_urls
        self._name = name
        self._clock = clock
        self._publisher = publisher
        self._options = options
        self._listening: AbstractChannel | None = None
        self._deliveries: Deliveries = asyncio.Queue()
        self._state_log = LogOnce(_log)

    @property
    def is_connected(self) -> bool:
        """Whether messages of the other end reach this one."""
        return self._listening is not None

    async def run(self) -> NoReturn:
        await keep_connected(
            self._urls,
            self._name,
            self._clock,
            self._serve,
            self._on_failure,
            max_body_bytes=MAX_BODY_BYTES,
            **self._options,
        )

    async def _serve(self, connection: GuardedConnection) -> NoReturn:
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

    async def _keep_publishing(self, connection: GuardedConnection) -> NoReturn:
        url = connection.url
        if not url.user and url.query.get("auth") == "external":
            raise Deferred(
                "fleet.url names no user, but the messages of a fleet do: write the user of the "
                "certificate before the host, as in amqps://user@host"
            )
        while True:
            await self._publisher.serve(connection, url.user or "guest")  # as aiormq logs in

    async def _keep_listening(self, connection: GuardedConnection) -> NoReturn:
        """Take messages until the channel or the queue is gone. Raises Deferred."""
        async with asyncio.timeout(SETUP_TIMEOUT):
            channel = await open_channel(connection, MAX_BATCH)
            with explained_refusal(self._if_missing, self._if_refused):
                queue, state = await self._open_queue(connection, channel)
                deliveries = await start_consuming(channel, queue, no_ack=self._no_ack)
        raise_if_cancelled()
        self._state_log.log_if_changed(
            logging.INFO, "fleet: connected to %s%s", host_port(connection.url), state
        )
        self._listening, self._deliveries = channel, deliveries
        try:
            self._on_listening()
            while True:
                await self._take(channel, await take_batch(deliveries, MAX_BATCH))
        finally:
            self._listening = None
            self._on_deaf()

    async def _open_queue(
        self, connection: GuardedConnection, channel: AbstractChannel
    ) -> tuple[str, str]:
        """Return the queue from which it reads, ready, and the end of a sentence for the log."""
        raise NotImplementedError

    async def _take(self, channel: AbstractChannel, batch: Sequence[DeliveredMessage]) -> None:
        raise NotImplementedError

    def _on_listening(self) -> None:
        raise NotImplementedError

    def _on_deaf(self) -> None:
        pass

    def _on_failure(self, failure: Deferred) -> None:
        self._publisher.note_connection_failure(failure)
        self._state_log.log_if_changed(logging.WARNING, "fleet: %s", failure.reason)


# --- an agent


def spread_reconnect_delay(failed_rounds: int, chance: float) -> float:
    """Return how many seconds an agent waits before it connects again: a random part of a span.

    All agents lose the broker at once.
    """
    return chance * exponential_backoff(
        failed_rounds, first=FIRST_RECONNECT_SPREAD, maximum=MAX_RECONNECT_SPREAD
    )


class AgentLink(Link):
    """The end of an agent, and the sink of what it recorded.

    While it cannot listen, it tries again, and reports all the same. ``on_message`` gets what the
    hub says. Neither function may wait.
    """

    concurrency = 64
    longest_pause = 5.0  # a try costs nothing while there is no connection
    give_up_after = math.inf  # a hub that is back gets the whole history
    on_message: Callable[[Content], None]
    on_listening: Callable[[], None]
    _no_ack = True  # nothing is delivered again: an order is for now
    _if_refused = (
        f"the broker refused to make or bind the agent's queue ({{}}): give the user the {RIGHTS}"
    )

    def __init__(
        self,
        settings: AgentSettings,
        origin: Origin,
        clock: Clock,
        *,
        chance: Callable[[], float] = random.random,
    ) -> None:
        exchange = self._exchange = agent_publish_exchange_name(settings.exchange)
        super().__init__(
            settings,
            f"imds-relay agent {origin.relay} of {origin.scope}",
            clock,
            ConfirmedPublisher(exchange, PUBLISH_TIMEOUT),
            chance=chance,
            delay=spread_reconnect_delay,
        )
        self._origin = origin
        self._chance = chance
        self._hub_user = settings.hub_user
        self._commands = command_exchange_name(settings.exchange)
        self._if_missing = (
            f"the broker has no exchange {self._commands} ({{}}): "
            "the hub makes it when it starts; no orders until then"
        )
        self._keys = agent_binding_keys(origin)
        self._queue: str | None = None
        self._refusal_log = LogOnce(_log)

    async def deliver(self, event: CloudEvent) -> Receipt:
        """Return when the hub's queue has the event. Raises Deferred or Rejected."""
        if not event.name.startswith(("event.", "relay.")):
            # A relay without a fleet recorded it here for a sink with the same name.
            raise Rejected("an agent reports no decisions: the hub makes them")
        await self.publish(event, report_key(event, self._origin))
        return Receipt()

    async def publish(self, event: CloudEvent, key: str, expiration: int | None = None) -> None:
        """Return when the hub's queue has it, for ``expiration`` ms. Raises Deferred, Rejected."""
        result = await self._publisher.publish(event, key, expiration=expiration)
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
    async def _take(self, channel: AbstractChannel, batch: Sequence[DeliveredMessage]) -> None:
        for message in batch:
            try:
                self.on_message(self._read(message))
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
        self.on_listening()
