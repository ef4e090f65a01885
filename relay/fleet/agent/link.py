"""The link of an agent. It makes its own queue, which is exclusive to the connection.

The exchanges are the hub's: the agent publishes and binds, and reads the error, because a check can
demand a right of its own.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import NoReturn

from aio_pika import exceptions as amqp
from aiormq.abc import AbstractChannel, DeliveredMessage
from typing_extensions import override  # in typing from Python 3.12

from relay.amqp.connection import QUEUE_DELETED, GuardedConnection
from relay.amqp.failures import broker_message
from relay.amqp.message_verification import UnusableMessage
from relay.amqp.publisher import ConfirmedPublisher
from relay.clock import Clock
from relay.errors import Deferred
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.link import RIGHTS, Link
from relay.fleet.messages import Content, PulseRequest, read_message
from relay.fleet.routing import (
    AGENT_QUEUE_ARGUMENTS,
    agent_binding_keys,
    agent_publish_exchange_name,
    command_exchange_name,
    scope_key,
    verify_command_from_hub,
)
from relay.fleet.settings import AgentSettings
from relay.logs import LogOnce
from relay.net import exponential_backoff
from relay.sinks.rabbitmq.sink import interpret_publish_result

PUBLISH_TIMEOUT = 15.0
"""Seconds that a message waits while the broker lets nobody publish."""
SOCKET_BUFFERS = 32 * 1024
"""Bytes of each buffer of an agent's socket. It sends little, and the broker has thousands."""
FIRST_RECONNECT_SPREAD = 10.0
MAX_RECONNECT_SPREAD = 60.0
"""Seconds over which agents spread their first and their later tries to connect again."""
LISTEN_RETRY_DELAY = 5.0
"""Seconds, up to twice as many, until the next try to bind the agent's queue."""
_log = logging.getLogger(__name__)


def spread_reconnect_delay(failed_rounds: int, chance: float) -> float:
    """Return how many seconds an agent waits before it connects again: a random part of a span.

    All agents lose the broker at once.
    """
    return chance * exponential_backoff(
        failed_rounds, first=FIRST_RECONNECT_SPREAD, maximum=MAX_RECONNECT_SPREAD
    )


class AgentLink(Link):
    """The end of an agent. While it cannot listen, it tries again, and reports all the same.

    ``on_message`` gets what the hub says. Neither function may wait.
    """

    on_message: Callable[[Content], None]
    on_listening: Callable[[], None]
    _who = "an agent"
    _messages_per_turn = 10  # the hub sends an agent few
    _no_ack = True  # nothing is delivered again: an order is for now

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
            settings.broker_urls,
            f"imds-relay agent {origin.relay} of {origin.scope}",
            clock,
            ConfirmedPublisher(exchange, PUBLISH_TIMEOUT),
            chance=chance,
            delay=spread_reconnect_delay,
            socket_buffers=SOCKET_BUFFERS,
        )
        self._origin = origin
        self._chance = chance
        self._hub_user = settings.hub_user
        self._commands = command_exchange_name(settings.exchange)
        self._keys = agent_binding_keys(origin)
        self._queue: str | None = None
        self._refusal_log = LogOnce(_log)

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
    def _explain(self, error: str, *, is_missing: bool) -> str:
        if is_missing:
            return (
                f"the broker has no exchange {self._commands} ({error}): "
                "the hub makes it when it starts; no orders until then"
            )
        refused = f"refused to {'make' if self._queue is None else 'bind'} the agent's queue"
        return f"the broker {refused} ({error}): give the user the {RIGHTS}"

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
