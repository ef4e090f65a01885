"""Delivers events to RabbitMQ: persistent messages on a topic exchange, with publisher confirm.

`connect` keeps a connection and a channel open in the background, and `RabbitMQ.deliver` publishes
on that channel. `interpret_publish_result` decides what the answer of the broker means; the links
of the fleet use it, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator
from typing import NoReturn

from aio_pika import exceptions as amqp
from aiormq.exceptions import ChannelAccessRefused
from pamqp.commands import Basic

from relay.amqp.broker_url import host_port
from relay.amqp.connection import SETUP_TIMEOUT, GuardedConnection, keep_connected
from relay.amqp.diagnostics import check_publish
from relay.amqp.diagnostics import diagnose as diagnose_broker
from relay.amqp.failures import broker_message, explain_failure, raise_if_cancelled
from relay.amqp.publisher import ConfirmedPublisher, PublishResult, routing_key
from relay.amqp.topology import declare_topology, events_topology
from relay.clock import Clock
from relay.errors import Deferred, Rejected
from relay.events.cloudevent import CloudEvent
from relay.logs import Finding, LogOnce, log_extra
from relay.sinks import Receipt
from relay.sinks.rabbitmq import Settings

MAX_UNROUTED_KEYS = 10_000
"""Routing keys whose returned messages were logged. Of more, all are logged once again."""

_log = logging.getLogger("relay.sinks.rabbitmq")


def interpret_publish_result(
    result: PublishResult, key: str, size: int, *, relay_declares: bool
) -> Receipt:
    """Return the receipt for a message with this routing key and size in bytes, or raise. Pure.

    A message that the broker refuses closes the channel, and every message in flight gets the
    same error. Only the message that the error names is refused; the others can be sent again. If
    ``relay_declares``, a missing exchange is made before the next try. Raises Deferred, Rejected,
    or an internal error as it is.
    """
    match result:
        case Basic.Ack():
            return Receipt()
        case amqp.PublishError(frame=Basic.Return() as returned):
            return Receipt(
                status=returned.reply_code,
                response=f"{returned.reply_text}: no queue is bound for {key}",
            )
        case amqp.DeliveryError():
            raise Deferred(
                "the broker answered with a nack: a queue is full and rejects, "
                "or the message could not be stored"
            )
        case amqp.ChannelNotFoundEntity() if not relay_declares:
            raise Deferred(
                f"the broker has no such exchange ({broker_message(result)}): "
                "make it, or set declare: true",
                failure="slow",
                status=404,
            )
        case ChannelAccessRefused() if _refusal_covers_routing_key(result, key):
            raise Deferred(
                f"the broker refused the message ({broker_message(result)}): "
                "grant the user write on the exchange, and on the topic",
                failure="slow",
                status=403,
            )
        case amqp.ChannelPreconditionFailed() if f"message size {size} " in broker_message(result):
            raise Rejected(
                f"the broker takes no message of this size ({broker_message(result)})", status=406
            )
        case TypeError() | ValueError():
            raise result
        case amqp.ChannelInvalidStateError():
            raise Deferred("the channel to the broker closed before the message was sent")
        case BaseException():
            raise Deferred(
                f"the channel closed before the broker confirmed: "
                f"{explain_failure(result).reason}. "
                "The message may be stored, and is sent again with the same id"
            )
        case _:
            raise Deferred(f"expected the broker to confirm, got {type(result).__name__}")


def _refusal_covers_routing_key(error: ChannelAccessRefused, key: str) -> bool:
    """Return whether the refusal is for all topics or for this one."""
    text = broker_message(error)
    return "topic '" not in text or f"topic '{key}'" in text


class RabbitMQ:
    concurrency = 64
    longest_pause = 5.0  # a try costs nothing while there is no connection
    give_up_after = math.inf  # a broker that is back gets the whole history

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._publisher = ConfirmedPublisher(settings.exchange, settings.timeout)
        self._state_log = LogOnce(_log)
        self._unrouted_keys: set[str] = set()

    async def deliver(self, event: CloudEvent) -> Receipt:
        """Return when the broker has confirmed it, or returned it (312) for want of a queue."""
        key = routing_key(event)
        receipt = interpret_publish_result(
            await self._publisher.publish(event, key),
            key,
            len(event.body),
            relay_declares=self._settings.declare is True,
        )
        if receipt.status is not None and key not in self._unrouted_keys:
            if len(self._unrouted_keys) == MAX_UNROUTED_KEYS:  # a hub has keys of many scopes
                self._unrouted_keys.clear()
            self._unrouted_keys.add(key)
            _log.warning(
                "sink %s: no queue is bound for %s: no consumer got the message",
                self._settings.name,
                key,
                extra=log_extra(sink=self._settings.name, type=event.name, status=receipt.status),
            )
        return receipt

    async def keep_channel_open(self, connection: GuardedConnection) -> NoReturn:
        """Keep a channel open. Raises when the connection is unusable."""
        broker = host_port(connection.url)
        settings = self._settings
        while True:
            async with asyncio.timeout(SETUP_TIMEOUT):
                topology = events_topology(settings.exchange)
                note = await declare_topology(connection, topology, settings.declare)
            raise_if_cancelled()
            self._log_state(logging.INFO, f"connected to {broker}{note}")
            await self._publisher.serve(connection)

    def on_connection_failure(self, failure: Deferred) -> None:
        self._publisher.note_connection_failure(failure)
        self._log_state(logging.WARNING, failure.reason)

    def _log_state(self, level: int, state: str) -> None:
        name = self._settings.name
        self._state_log.log_if_changed(
            level, "sink %s: %s", name, state, extra=log_extra(sink=name)
        )


@contextlib.asynccontextmanager
async def connect(settings: Settings, clock: Clock) -> AsyncIterator[RabbitMQ]:
    async with asyncio.TaskGroup() as tasks:
        sink = RabbitMQ(settings)
        connection_task = tasks.create_task(
            keep_connected(
                settings.broker_urls,
                f"imds-relay {settings.name}",
                clock,
                sink.keep_channel_open,
                sink.on_connection_failure,
            )
        )
        try:
            yield sink
        finally:
            connection_task.cancel()


async def diagnose(settings: Settings, scope: str) -> list[Finding]:
    """Check whether the broker answers, has what is needed, and lets the user publish."""
    topology = events_topology(settings.exchange)
    parts = topology if settings.declare else topology[-1:]
    subject, key = f"sink {settings.name}", f"event.scheduled.none.{scope}"

    async def examine(connection: GuardedConnection) -> list[Finding]:
        remedy = "grant it write on the exchange, and on the topic"
        finding = await check_publish(subject, connection, settings.exchange, key, remedy)
        return [finding] if finding is not None else []

    urls = settings.broker_urls()
    return await diagnose_broker(subject, urls, parts, settings.declare, examine=examine)
