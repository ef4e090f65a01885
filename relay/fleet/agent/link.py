"""The one AMQP connection of an agent: it publishes to the hub, and takes what the hub sends.

The agent makes only its own queue, which is exclusive to the connection. The exchanges are the
hub's. The agent does not check whether they exist, because that can demand a right of its own: it
publishes and binds, and reads the error.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import NoReturn, Protocol

from aio_pika import exceptions as amqp
from aiormq.abc import AbstractChannel, DeliveredMessage
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from relay.amqp.broker_url import host_port
from relay.amqp.cancellation_check import raise_if_cancelled
from relay.amqp.connection import HEARTBEAT, SETUP_TIMEOUT, GuardedConnection, keep_connected
from relay.amqp.delivery_buffer import (
    QUEUE_DELETED,
    Deliveries,
    make_delivery_buffer,
    open_consuming_channel,
)
from relay.amqp.event_message import content_header
from relay.amqp.failures import ConnectionFailure, broker_message
from relay.amqp.message_verification import UnusableMessage
from relay.amqp.publisher import (
    CONNECTION_WAIT,
    ConfirmedPublisher,
    PublishChannel,
    publish_transient_without_confirm,
)
from relay.clock import Clock
from relay.errors import Deferred
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.message_reader import read_message
from relay.fleet.messages import (
    MAX_BODY_BYTES,
    Content,
    PulseRequest,
    StartOrder,
    VoteAnswer,
)
from relay.fleet.routing import scope_key, verify_command_from_hub
from relay.fleet.settings import AgentSettings
from relay.fleet.topology import (
    AGENT_QUEUE_ARGUMENTS,
    agent_binding_keys,
    agent_publish_exchange_name,
    command_exchange_name,
)
from relay.log_once import LogOnce
from relay.sinks.rabbitmq.sink import interpret_publish_result

CONFIRM_TIMEOUT = 15.0
"""Seconds that a message waits while the broker lets nobody publish."""
SOCKET_BUFFERS = 32 * 1024
"""Bytes of each buffer of the socket. An agent sends little, and the broker has thousands."""
FIRST_RECONNECT_SPREAD = 10.0
MAX_RECONNECT_SPREAD = 60.0
"""Seconds over which agents spread their first and their later tries to connect again."""
LISTEN_RETRY_DELAY = 5.0
"""Seconds, up to twice as many, until the next try to bind the agent's queue."""

MESSAGES_PER_TURN = 10
"""Messages that are read in one turn of the event loop. The hub sends an agent few."""

_log = logging.getLogger(__name__)


class CommandHandler(Protocol):
    """What the agent does with the messages of the hub. No method may wait."""

    def on_agent_listening_to_hub(self) -> None:
        """The agent hears the hub from now on."""

    def handle_order(self, order: StartOrder) -> None:
        """The hub orders a StartRequest of this agent."""

    def handle_vote_answer(self, answer: VoteAnswer) -> None:
        """The hub answers a vote of this agent."""

    def handle_pulse_request(self, request: PulseRequest) -> None:
        """The hub asks the scope whether events are still there."""


def spread_reconnect_delay(failed_rounds: int, chance: float) -> float:
    """Return how many seconds an agent waits before it connects again.

    All agents lose the broker at once. Each waits a random part of a span that starts at
    `FIRST_RECONNECT_SPREAD` and doubles up to `MAX_RECONNECT_SPREAD`.
    """
    doublings = min(max(failed_rounds, 1) - 1, 10)
    return chance * min(FIRST_RECONNECT_SPREAD * 2.0**doublings, MAX_RECONNECT_SPREAD)


class AgentLink:
    """The connection of one agent to the broker. It may be down: `run` connects for ever."""

    def __init__(
        self,
        settings: AgentSettings,
        origin: Origin,
        handler: CommandHandler,
        clock: Clock,
        *,
        chance: Callable[[], float] = random.random,
        confirm_timeout: float = CONFIRM_TIMEOUT,
        connection_wait: float = CONNECTION_WAIT,
    ) -> None:
        self._settings = settings
        self._origin = origin
        self._handler = handler
        self._clock = clock
        self._chance = chance
        self._publisher = ConfirmedPublisher(confirm_timeout, connection_wait)
        self._exchange = agent_publish_exchange_name(settings.exchange)
        self._commands = command_exchange_name(settings.exchange)
        self._keys = agent_binding_keys(origin)
        self._user = ""
        self._listening: tuple[GuardedConnection, AbstractChannel] | None = None
        self._state_log = LogOnce(_log)
        self._refusal_log = LogOnce(_log)

    async def run(self, *, heartbeat: int = HEARTBEAT) -> NoReturn:
        """Stay connected until cancelled."""
        await keep_connected(
            self._settings.broker_urls,
            f"imds-relay agent {self._origin.relay} of {self._origin.scope}",
            self._clock,
            self._serve,
            self._on_failure,
            heartbeat=heartbeat,
            chance=self._chance,
            delay=spread_reconnect_delay,
            max_body_bytes=MAX_BODY_BYTES,
            socket_buffers=SOCKET_BUFFERS,
        )

    # --- publishing

    async def publish(self, event: CloudEvent, key: str) -> None:
        """Return when a queue of the hub holds the event. Raises Deferred or Rejected."""
        result = await self._publisher.publish(
            event.id, event.body, key, lambda: content_header(event, user_id=self._user)
        )
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

    def send_transient_if_connected(self, event: CloudEvent, key: str) -> bool:
        """Send an event that may be lost, if the agent is connected. Return whether it is."""
        if self._listening is None:
            return False
        connection, channel = self._listening
        return publish_transient_without_confirm(
            connection, channel, exchange=self._exchange, key=key, event=event, user=self._user
        )

    async def _keep_publish_channel_open(self, connection: GuardedConnection) -> NoReturn:
        broker = host_port(connection.url)
        while True:
            async with asyncio.timeout(SETUP_TIMEOUT):
                channel = await PublishChannel.open(connection, self._exchange)
            raise_if_cancelled()
            await self._publisher.use_channel_until_closed(channel, broker)

    # --- the connection

    async def _serve(self, connection: GuardedConnection) -> NoReturn:
        self._user = _user_of_url(connection.url)
        tasks = [
            asyncio.create_task(self._keep_publish_channel_open(connection), name="agent: publish"),
            asyncio.create_task(
                self._keep_listening_on_connection(connection), name="agent: listen"
            ),
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

    def _on_failure(self, failure: ConnectionFailure) -> None:
        self._publisher.note_connection_failure(failure)
        self._log_state(logging.WARNING, failure.reason)

    def _log_state(self, level: int, state: str) -> None:
        self._state_log.log_if_changed(level, "fleet: %s", state)

    # --- listening

    async def _keep_listening_on_connection(self, connection: GuardedConnection) -> NoReturn:
        """Take messages for ever, over one channel after the other. Raises Deferred."""
        queue: str | None = None
        while True:
            try:
                async with asyncio.timeout(SETUP_TIMEOUT):
                    channel = await open_consuming_channel(connection, MESSAGES_PER_TURN)
                    queue = queue or await _declare_agent_queue(channel)
                    deliveries = await self._consume_bound(channel, queue)
                raise_if_cancelled()
                await self._listen(connection, channel, deliveries, queue)
            except Deferred as error:
                if connection.is_over or error.status == QUEUE_DELETED:
                    raise
                self._log_state(logging.WARNING, error.reason)
            await self._clock.sleep(LISTEN_RETRY_DELAY * (1 + self._chance()))

    async def _listen(
        self,
        connection: GuardedConnection,
        channel: AbstractChannel,
        deliveries: Deliveries,
        queue: str,
    ) -> NoReturn:
        """Take messages until the channel or the queue is gone, which raises Deferred."""
        self._listening = connection, channel
        self._log_state(
            logging.INFO,
            f"connected to {host_port(connection.url)}; the hub's orders are taken from {queue}",
        )
        try:
            self._handler.on_agent_listening_to_hub()
            while True:
                delivery = await deliveries.get()
                if isinstance(delivery, Deferred):
                    raise delivery
                self._handle(delivery)
        finally:
            self._listening = None

    async def _consume_bound(self, channel: AbstractChannel, queue: str) -> Deliveries:
        """Return what will arrive: messages, and an error when the channel is gone.

        Raises Deferred.
        """
        deliveries = make_delivery_buffer(channel, queue)
        try:
            for key in self._keys:
                await channel.queue_bind(queue, self._commands, key)
            # Nothing is delivered again: an order is for now, and the hub repeats what it needs.
            await channel.basic_consume(queue, deliveries.put, no_ack=True)
        except amqp.ChannelNotFoundEntity as error:
            raise Deferred(
                f"the broker has no exchange {self._commands} ({broker_message(error)}): "
                "the hub makes it when it starts; no orders until then"
            ) from None
        except ChannelAccessRefused as error:
            raise Deferred(
                f"the broker refused to bind the agent's queue ({broker_message(error)}): give the "
                "user the rights that `imds-relay fleet definitions` prints"
            ) from None
        return deliveries

    def _handle(self, message: DeliveredMessage) -> None:
        """Hand a message to the handler if it is the hub's. Nothing may stop the next message."""
        try:
            self._dispatch_hub_message(self._parse_hub_message(message))
        except UnusableMessage as error:
            self._refusal_log.log_if_changed(
                logging.WARNING, "fleet: a message to this agent was refused: %s", error
            )
        except Exception:  # noqa: BLE001  # a bug must not stop the next message
            _log.exception("internal error: a message of the hub was dropped")

    def _parse_hub_message(self, message: DeliveredMessage) -> Content:
        """Return what the hub says. Raises UnusableMessage if the message is not the hub's."""
        key = verify_command_from_hub(message, self._commands, self._keys, self._settings.hub_user)
        content = read_message(message.body).content
        if isinstance(content, PulseRequest) is not (key == scope_key(self._origin.scope)):
            raise UnusableMessage(f"it is of another kind than its routing key {key}")
        return content

    def _dispatch_hub_message(self, content: Content) -> None:
        match content:
            case StartOrder():
                self._handler.handle_order(content)
            case VoteAnswer():
                self._handler.handle_vote_answer(content)
            case PulseRequest():
                self._handler.handle_pulse_request(content)
            case _:
                raise UnusableMessage("no hub sends a message of its kind")


async def _declare_agent_queue(channel: AbstractChannel) -> str:
    """Make the agent's queue; return the name that the broker gave it. Raises Deferred."""
    try:
        declared = await channel.queue_declare(
            "", exclusive=True, arguments=dict(AGENT_QUEUE_ARGUMENTS)
        )
    except ChannelAccessRefused as error:
        raise Deferred(
            f"the broker refused to make the agent's queue ({broker_message(error)}): give the "
            "user the rights that `imds-relay fleet definitions` prints"
        ) from None
    return str(declared.queue)


def _user_of_url(url: URL) -> str:
    """Return the user whom the messages name. Raises Deferred if the URL does not name it."""
    if url.user:
        return url.user
    if url.query.get("auth") == "external":
        raise Deferred(
            "fleet.url names no user, but the messages of an agent do: write the user of the "
            "certificate before the host, as in amqps://user@host"
        )
    return "guest"  # as aiormq logs in
