"""Approvals from RabbitMQ: the body of ``POST /v1/approvals`` as a message, by the right of the user whom the broker vouches for.

A message is acknowledged only after its decision is on disk. What cannot be used is dead-lettered; what is refused to a
known client is acknowledged, and told as ``approval.refused`` on the main exchange.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NoReturn

from aio_pika import exceptions as amqp
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import ChannelAccessRefused

from relay.amqp.approval_message import UnusableMessage, parse_message
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
from relay.amqp.topology import Exchange, Queue, establish, not_seen
from relay.api import Client, Relay
from relay.api.auth.rejection_log import RejectionLog
from relay.approvals import AmqpSettings
from relay.errors import Deferred, StoreUnavailable

PREFETCH = 16
"""Messages that the broker hands over before the first is acknowledged."""
LOOK = 1.0
"""Seconds between two looks at whether approvals may be taken."""
LONGEST_REST = 60.0
"""Seconds: the longest pause after a decision that could not be recorded. Each try counts towards a queue's delivery limit."""

_log = logging.getLogger(__name__)


def queue_of(exchange: str, scope: str) -> str:
    """The queue in which the approvals of a scope wait."""
    return f"{exchange}.approvals.{scope}"


def topology(exchange: str, scope: str) -> tuple[Exchange | Queue, ...]:
    """What ``declare: true`` makes: the dead letters first, so that none falls between.

    See docs/rabbitmq.md#what-is-on-the-broker.
    """
    approvals, dlx = f"{exchange}.approvals", f"{exchange}.dlx"
    return (
        Exchange(dlx, "topic"),
        Queue(f"{exchange}.dead", source=dlx, key="#", arguments={"x-max-length": 10_000}),
        Exchange(approvals, "topic"),
        Queue(
            queue_of(exchange, scope),
            source=approvals,
            key=f"approve.{scope}",
            arguments={"x-single-active-consumer": True, "x-dead-letter-exchange": dlx},
        ),
    )


class ApprovalConsumer:
    """Consumes this scope's queue for as long as approvals may be taken."""

    def __init__(
        self,
        settings: AmqpSettings,
        exchange: str,
        clients: Sequence[Client],
        relay: Relay,
        strangers: RejectionLog,
    ) -> None:
        scope = relay.origin.scope
        self._settings = settings
        self._parts = topology(exchange, scope)
        self._exchange, self._queue, self._key = (
            f"{exchange}.approvals",
            queue_of(exchange, scope),
            f"approve.{scope}",
        )
        self._clients = clients
        self._relay = relay
        self._strangers = strangers
        self._logged = ""
        self._unseen = ""  # which parts the user may not look at, as the end of a sentence

    async def run(self, *, heartbeat: int = HEARTBEAT) -> NoReturn:
        """Connect for ever, and decide what comes, until cancelled. ``heartbeat`` is in seconds."""
        name = f"imds-relay approvals of {self._relay.origin.scope} at {self._relay.origin.relay}"
        await keep_connected(
            self._settings.targets,
            name,
            self._relay.clock,
            self._serve,
            self._tell,
            heartbeat=heartbeat,
        )

    async def _serve(self, connection: Connection) -> NoReturn:
        async with asyncio.timeout(SETUP_TIMEOUT):
            self._unseen = not_seen(
                await establish(connection, self._parts, self._settings.declare)
            )
        rest = LOOK
        while True:
            while (why := await self._closed()) is not None:
                self._log_once(
                    logging.INFO,
                    f"connected to {host_port(connection.url)}; messages wait: {why}{self._unseen}",
                )
                await self._relay.clock.sleep(LOOK)
                if connection.lost:
                    raise Deferred(f"the connection to {host_port(connection.url)} was lost")
            rest = LOOK if await self._consume(connection) else min(rest * 2, LONGEST_REST)
            await self._relay.clock.sleep(rest)

    async def _closed(self) -> str | None:
        """Why nothing may be taken now: while approvals are off, or nothing can be put on disk, messages wait in the queue."""
        if self._relay.store.write_error is not None:
            return "the state file cannot be written"
        try:
            return "approvals are off" if await self._relay.gate.mode() == "off" else None
        except StoreUnavailable:
            return "the state file cannot be read"

    async def _consume(self, connection: Connection) -> bool:
        """Take messages until none may be taken; what was not acknowledged then goes back to the queue.

        Returns False if that was found out by a decision that could not be recorded. Raises Deferred when queue or channel are gone.
        """
        channel = await connection.channel(publisher_confirms=False)
        came: asyncio.Queue[DeliveredMessage | str] = asyncio.Queue()
        channel.close_callbacks.add(
            lambda _, error: came.put_nowait(
                f"the channel was closed: {describe_failure(error or amqp.ChannelClosed()).reason}"
            )
        )
        line = await channel.get_underlay_channel()
        line.on_consumer_cancel_callbacks.add(
            lambda _: came.put_nowait(f"the queue {self._queue} is there no more")
        )
        await line.basic_qos(prefetch_count=PREFETCH)
        try:
            await line.basic_consume(
                self._queue, came.put, consumer_tag=f"imds-relay {self._relay.origin.relay}"
            )
        except amqp.ChannelNotFoundEntity as error:
            raise Deferred(
                f"the broker has no such queue ({broker_message(error)}): make it, or set declare: true"
            ) from None
        except ChannelAccessRefused as error:
            raise Deferred(
                f"the broker refused the queue ({broker_message(error)}): grant the user read on it"
            ) from None
        raise_if_cancelled()
        self._log_once(
            logging.INFO,
            f"connected to {host_port(connection.url)}; messages are taken from {self._queue}{self._unseen}",
        )
        recorded = True
        while recorded and await self._closed() is None:
            try:
                async with asyncio.timeout(LOOK):
                    message = await came.get()
            except TimeoutError:
                continue
            if isinstance(message, str):
                raise Deferred(message)
            recorded = await self._decide(message)
            raise_if_cancelled()
        with connection.cut_after(CLOSE_TIMEOUT):
            await channel.close()
        return recorded

    async def _decide(self, message: DeliveredMessage) -> bool:
        """Decide one message; False where the decision cannot be put on disk now, and the message must wait."""
        tag = message.delivery_tag or 0
        try:
            caller, identity, body = parse_message(
                message, self._exchange, self._key, self._clients
            )
        except UnusableMessage as error:
            self._strangers.unusable_message(
                message.header.properties.user_id, str(error), self._relay.clock.monotonic()
            )
            await message.channel.basic_reject(tag, requeue=False)
            return True
        approval = body.to_request(
            caller, self._relay.clock.now(), message.body, request_id=identity, message_id=identity
        )
        try:
            answer = await self._relay.gate.submit(approval)
        except Exception:  # noqa: BLE001  # an error of our own, logged with its traceback
            # Given back, it would come again at once, and so on: nobody else would be heard.
            _log.exception("a message for approvals could not be decided, and was dead-lettered")
            await message.channel.basic_reject(tag, requeue=False)
            return True
        if answer.status == 503:
            return False
        await message.channel.basic_ack(tag)
        return True

    def _tell(self, trouble: ConnectionFailure) -> None:
        self._log_once(logging.WARNING, trouble.reason)

    def _log_once(self, level: int, text: str) -> None:
        if text != self._logged:
            self._logged = text
            _log.log(level, "approvals over AMQP: %s", text)
