"""The one AMQP connection of an agent or a hub. It may be down: `Link.run` connects for ever.

Both ends publish over one channel, whose messages keep their order, and read from one queue over
another (`relay.fleet.agent.link`, `relay.fleet.hub.link`). The broker vouches for who sent a
message, and whoever takes it decides what it means.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NoReturn

from aio_pika import exceptions as amqp
from aiormq.abc import AbstractChannel, DeliveredMessage
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from relay.amqp.broker_url import host_port
from relay.amqp.connection import (
    SETUP_TIMEOUT,
    Deliveries,
    GuardedConnection,
    keep_connected,
    make_delivery_buffer,
    open_channel,
)
from relay.amqp.failures import broker_message, raise_if_cancelled
from relay.amqp.publisher import ConfirmedPublisher
from relay.clock import Clock
from relay.errors import Deferred
from relay.fleet.messages import MAX_BODY_BYTES
from relay.logs import LogOnce

MAX_BATCH = 256
"""Messages that are handed over together."""
RIGHTS = "rights that `imds-relay fleet definitions` prints"
_log = logging.getLogger(__name__)


class Link:
    """What both ends have in common. An end says what it reads, and what it does with that.

    ``options`` are those of `keep_connected`.
    """

    _who: ClassVar[Literal["an agent", "a hub"]]
    _messages_per_turn: ClassVar[int]
    """Messages that are read in one turn of the event loop."""
    _no_ack: ClassVar[bool]

    def __init__(
        self,
        urls: Callable[[], Sequence[URL]],
        name: str,
        clock: Clock,
        publisher: ConfirmedPublisher,
        **options: Any,
    ) -> None:
        self._urls = urls
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
            await self._publisher.serve(connection, user)

    async def _keep_listening(self, connection: GuardedConnection) -> NoReturn:
        """Take messages until the channel or the queue is gone. Raises Deferred."""
        async with asyncio.timeout(SETUP_TIMEOUT):
            channel = await open_channel(connection, self._messages_per_turn)
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

    def _on_failure(self, failure: Deferred) -> None:
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
