"""Approvals from RabbitMQ: the body of ``POST /v1/approvals`` as a message, by the right of the user whom the broker vouches for.

A message is acknowledged only after its decision is on disk. What cannot be used is dead-lettered; what is refused to a
known client is acknowledged, and told as ``approval.refused`` on the main exchange.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NoReturn

import orjson
from aio_pika.abc import AbstractIncomingMessage
from yarl import URL

from relay import amqp as broker
from relay.api import Client, Relay
from relay.api.auth import caller_of
from relay.approvals import AmqpSettings
from relay.approvals.request import Body, Caller, MalformedError, WrongFieldError, body_of
from relay.errors import Deferred

PREFETCH = 16
"""Messages that the broker hands over before the first is acknowledged."""
LARGEST = 64 * 1024
"""Bytes of a body, as over HTTP."""
CLOSED = 1.0
"""Seconds between two looks at whether approvals may be taken again."""

_log = logging.getLogger(__name__)


class UnusableError(Exception):
    """A message that no client's decision can be made of. The text says why."""


def topology(exchange: str, scope: str) -> tuple[broker.Exchange | broker.Queue, ...]:
    """What ``declare: true`` makes: the dead letters first, so that none falls between (contract, section 7)."""
    approvals, dlx = f"{exchange}.approvals", f"{exchange}.dlx"
    return (
        broker.Exchange(dlx, "topic"),
        broker.Queue(f"{exchange}.dead", source=dlx, key="#", arguments={"x-max-length": 10_000}),
        broker.Exchange(approvals, "topic"),
        broker.Queue(
            f"{approvals}.{scope}",
            source=approvals,
            key=f"approve.{scope}",
            arguments={"x-single-active-consumer": True, "x-dead-letter-exchange": dlx},
        ),
    )


def who(user_id: str | None, clients: Sequence[Client]) -> Caller:
    """The client whose ``amqp_user`` the broker has vouched for. Raises UnusableError where there is none.

    Nothing else of a message says who sent it: topic permissions do not cover the CC header (FIELD 5.7).
    """
    if not user_id:
        raise UnusableError("it has no user_id, so nobody vouches for its sender")
    for client in clients:
        if client.amqp_user == user_id:
            return caller_of(client, "amqp")
    raise UnusableError(f"its user_id {user_id!r} is no client's amqp_user")


def identity_of(message_id: str | None) -> str:
    """The id that makes a repeat known. Raises UnusableError where there is none."""
    if not message_id:
        raise UnusableError("it has no message_id, so a repeat could not be known")
    return message_id


def read(raw: bytes) -> Body:
    """The decision in a message, bare or as the ``data`` of a CloudEvent. Raises UnusableError."""
    if len(raw) > LARGEST:
        raise UnusableError(f"it has {len(raw)} bytes, more than {LARGEST}")
    try:
        fields = orjson.loads(raw)
        if isinstance(fields, dict) and "specversion" in fields and "data" in fields:
            fields = fields["data"]
        return body_of(fields)
    except (orjson.JSONDecodeError, MalformedError, WrongFieldError) as error:
        raise UnusableError(f"its body is no decision: {error}") from None


class Approvals:
    """Consumes this scope's queue for as long as approvals may be taken."""

    def __init__(self, settings: AmqpSettings, exchange: str, clients: Sequence[Client], relay: Relay) -> None:
        self._settings = settings
        self._exchange = exchange
        self._clients = clients
        self._relay = relay
        self._logged = ""

    async def run(self) -> NoReturn:
        """Connect for ever, and decide what comes, until cancelled."""
        name = f"imds-relay approvals of {self._relay.origin.scope} at {self._relay.origin.relay}"
        await broker.keep_connected(self._target, name, self._relay.clock, self._serve, self._tell)

    def _target(self) -> URL:
        return broker.parse_url(self._settings.reveal("url") or "")

    async def _serve(self, connection: broker.Connection) -> NoReturn:
        scope = self._relay.origin.scope
        async with asyncio.timeout(broker.SETTING_UP):
            await broker.establish(connection, topology(self._exchange, scope), self._settings.declare)
        self._log_once(logging.INFO, f"connected to {broker.place(connection.url)}")
        while True:
            while not await self._may_take():
                await self._relay.clock.sleep(CLOSED)
                if connection.is_closed:
                    raise Deferred("the connection was lost")
            await self._consume(connection, f"{self._exchange}.approvals.{scope}")
            await self._relay.clock.sleep(CLOSED)

    async def _may_take(self) -> bool:
        """Not while approvals are off, nor while nothing can be put on disk: messages wait then."""
        return self._relay.store.failing is None and await self._relay.gate.mode() != "off"

    async def _consume(self, connection: broker.Connection, queue: str) -> None:
        """Return when approvals may be taken no more; what was not acknowledged goes back to the queue."""
        async with connection.channel(publisher_confirms=False) as channel:
            await channel.set_qos(prefetch_count=PREFETCH)
            source = await channel.get_queue(queue, ensure=False)
            async with source.iterator() as messages:
                async for message in messages:
                    if not await self._may_take() or not await self._decide(message):
                        return
        raise Deferred("the channel to the broker was closed")

    async def _decide(self, message: AbstractIncomingMessage) -> bool:
        """Decide one message; False where the decision cannot be put on disk now, and the message must wait."""
        try:
            caller, identity, body = who(message.user_id, self._clients), identity_of(message.message_id), read(message.body)
        except UnusableError as error:
            _log.warning("a message for approvals was dead-lettered: %s", error)
            await message.reject(requeue=False)
            return True
        approval = body.approval(caller, self._relay.clock.now(), message.body, request_id=identity, message_id=identity)
        answer = await self._relay.gate.submit(approval)
        if answer.status == 503:
            return False
        await message.ack()
        return True

    def _tell(self, trouble: broker.Trouble) -> None:
        self._log_once(logging.WARNING, trouble.reason)

    def _log_once(self, level: int, text: str) -> None:
        if text != self._logged:
            self._logged = text
            _log.log(level, "approvals over AMQP: %s", text)
