"""RabbitMQ: every event as one persistent message on a topic exchange, confirmed by the broker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import re
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Literal, NoReturn, cast

import aiormq
from aio_pika import exceptions as amqp
from aio_pika.abc import AbstractChannel, DeliveryMode
from aiormq.exceptions import ChannelAccessRefused
from pamqp.commands import Basic
from pydantic import Field

from relay.amqp.broker_url import host_port
from relay.amqp.cancellation import raise_if_cancelled
from relay.amqp.connection import HEARTBEAT, SETUP_TIMEOUT, Connection, keep_connected
from relay.amqp.diagnostics import diagnose as examine_broker
from relay.amqp.failures import ConnectionFailure, broker_message, describe_failure
from relay.amqp.settings import BrokerSection
from relay.amqp.topology import Declare, Exchange, Queue, establish, not_seen
from relay.clock import Clock
from relay.diagnostics import Finding
from relay.errors import Deferred, Rejected
from relay.events.cloudevent import CONTENT_TYPE, CloudEvent
from relay.settings import Duration
from relay.sinks import Receipt, SinkSettings

PATIENCE = 1.0
"""Seconds that a delivery waits for a connection that is just being made."""
_WIDEST = (40, 40, 92, 80)
"""Bytes of each word of a routing key, which may have 255 with its dots. A scope has at most 80, a sink's name 64."""
LONGEST_TEXT = 255
"""Bytes of AMQP's short strings, and of a header that AMQP 1.0 readers still see as text."""

_log = logging.getLogger("relay.sinks.rabbitmq")


class Settings(SinkSettings, BrokerSection):
    """A topic exchange on a RabbitMQ."""

    kind: Literal["rabbitmq"]
    exchange: str = Field(default="azure.scheduledevents", pattern=r"^[A-Za-z0-9_.:-]{1,127}$")
    """The topic exchange; the unrouted exchange and queue are named after it."""
    declare: Declare = True
    """true: make exchange, unrouted exchange and unrouted queue; passive: see that they exist; false: take them as given."""
    timeout: Duration = Field(default=15.0, gt=0)
    """How long the broker may take to confirm a message."""


def routing_key(event: CloudEvent) -> str:
    """``<family>.<change>.<detail>.<scope>``: lower case, always four words of ``[a-z0-9_-]``, at most 255 bytes."""
    family, _, change = event.name.partition(".")
    words = (family, change, event.routing_detail, event.scope)
    return ".".join(
        re.sub(r"[^a-z0-9_-]", "_", word.lower())[:widest] or "none"
        for word, widest in zip(words, _WIDEST, strict=True)
    )


def build(event: CloudEvent) -> Basic.Properties:
    """Make the message's properties. Pure. They and the headers are copies of what the body has, left out where they would not fit."""
    attributes = {
        name: value
        for name, value in event.attributes.items()
        if len(value.encode()) <= LONGEST_TEXT
    }
    return Basic.Properties(
        content_type=CONTENT_TYPE,
        delivery_mode=DeliveryMode.PERSISTENT,
        message_id=event.id,
        correlation_id=attributes.get("correlationid"),
        message_type=event.type,
        app_id="imds-relay",
        timestamp=datetime.fromisoformat(event.attributes["time"]),
        headers={f"ce-{name}": value for name, value in attributes.items()},
    )


def topology(exchange: str) -> tuple[Exchange | Queue, ...]:
    """What the sink makes on the broker. The unrouted pair comes first: no message then falls between the two."""
    unrouted = f"{exchange}.unrouted"
    return (
        Exchange(unrouted, "fanout"),
        Queue(unrouted, source=unrouted, key="", arguments={"x-max-length": 10_000}),
        Exchange(exchange, "topic", {"alternate-exchange": unrouted}),
    )


PublishResult = aiormq.abc.ConfirmationFrameType | BaseException | None
"""What came of a publish: what aiormq returned, or raised."""


def interpret_publish_result(
    answer: PublishResult, key: str, size: int, *, made_by_us: bool
) -> Receipt:
    """Say what the answer to a publish means for the message with this routing key and size in bytes. Pure.

    A message that the broker takes offence at closes the channel, and every neighbour in flight gets the same error: only
    the one that is meant is treated as such. ``made_by_us``: a missing exchange is made again before the next try.
    Raises Deferred, Rejected, or an error in the relay's own code as it came.
    """
    match answer:
        case Basic.Ack():
            return Receipt()
        case amqp.PublishError(frame=Basic.Return() as returned):
            return Receipt(
                status=returned.reply_code,
                response=f"{returned.reply_text}: no queue is bound for {key}",
            )
        case amqp.DeliveryError():
            raise Deferred(
                "the broker answered with a nack: a queue is full and rejects, or the message could not be stored"
            )
        case amqp.ChannelNotFoundEntity() if not made_by_us:
            reason = f"the broker has no such exchange ({broker_message(answer)}): make it, or set declare: true"
            raise Deferred(reason, failure="slow", status=404)
        case ChannelAccessRefused() if "topic '" not in broker_message(
            answer
        ) or f"topic '{key}'" in broker_message(answer):
            reason = f"the broker refused the message ({broker_message(answer)}): grant the user write on the exchange, and on the topic"
            raise Deferred(reason, failure="slow", status=403)
        case amqp.ChannelPreconditionFailed() if f"message size {size} " in broker_message(answer):
            raise Rejected(
                f"the broker takes no message of this size ({broker_message(answer)})", status=406
            )
        case TypeError() | ValueError():
            raise answer
        case amqp.ChannelInvalidStateError():
            raise Deferred("the channel to the broker closed before the message was sent")
        case BaseException():
            reason = (
                f"the channel closed before the broker confirmed: {describe_failure(answer).reason}"
            )
            raise Deferred(
                f"{reason}. The message may be stored, and is sent again with the same id"
            )
        case _:
            raise Deferred(f"expected the broker to confirm, got {type(answer).__name__}")


class PublishChannel:
    """An open channel, and what lives and dies with it."""

    def __init__(
        self, connection: Connection, channel: AbstractChannel, wire: aiormq.Channel, exchange: str
    ) -> None:
        self.unconfirmed: dict[str, asyncio.Task[PublishResult]] = {}
        """Publishes under way, by message id. One outlives the delivery that stopped waiting: see `RabbitMQ.deliver`."""
        self.why: BaseException | None = None
        """What closed the channel."""
        self._connection = connection
        self._channel = channel
        self._wire = wire
        self._exchange = exchange
        channel.close_callbacks.add(self._on_close)

    @property
    def gone(self) -> bool:
        """Whether the channel is closed. Publishes hear of that before those who wait for it."""
        return self._channel.is_closed

    def _on_close(self, _: object, why: BaseException | None) -> None:
        self.why = why

    async def unblocked(self) -> None:
        """Wait while the broker blocks all who publish, as it does under a memory or disk alarm."""
        if self._connection.transport is not None:
            await self._connection.transport.ready()

    async def publish(self, event: CloudEvent, key: str) -> PublishResult:
        """Send, and wait until the broker has answered or the channel is closed. Returns what would be raised.

        Ends as cancelled when aiormq's watchdog gives the connection up, though nobody cancelled it.
        """
        try:
            # Not to wait for the socket to take each is half the work; how many are under way is limited by their confirms.
            return await self._wire.basic_publish(
                event.body,
                exchange=self._exchange,
                routing_key=key,
                properties=build(event),
                mandatory=True,
                wait=False,
            )
        except Exception as error:  # noqa: BLE001 - aiormq hands on whatever closed the connection; `interpret_publish_result` looks at it
            return error

    async def closed(self) -> None:
        """Wait until the channel is closed. aiormq then ends whoever waits on it for an answer."""
        await self._channel.closed()

    def end(self) -> None:
        """End the publishes that are left: aiormq forgets those that wait for room in its queue, which nobody empties any more."""
        for publish in self.unconfirmed.values():
            publish.cancel()


class RabbitMQ:
    """One exchange."""

    concurrency = 64
    longest_pause = 5.0  # a try costs nothing while there is no connection
    give_up_after = math.inf  # a broker that is back wants the whole history

    def __init__(self, settings: Settings, publishes: asyncio.TaskGroup) -> None:
        self._settings = settings
        self._publishes = publishes
        self._line: PublishChannel | None = None
        self._there = asyncio.Event()
        self._trouble = ConnectionFailure("the connection to the broker is being made")
        self._logged = ""
        self._unrouted: set[str] = set()

    async def deliver(self, event: CloudEvent) -> Receipt:
        """Return once the broker has confirmed the message, or has returned it for want of a queue (status 312).

        A publish that nobody waits for any more stays under way, and the next delivery of the event waits for that one: two
        with one id in flight would get each other's answers (docs/protocol.md#one-publish-in-flight-for-each-id), and a broker
        that is slow to confirm, as a quorum queue without its majority is, would store a copy for every try.
        """
        key = routing_key(event)
        line = await self._open_line()
        sent = False
        try:
            async with asyncio.timeout(self._settings.timeout):
                if event.id not in line.unconfirmed:
                    await line.unblocked()
                sent = True
                publish = line.unconfirmed.get(event.id) or self._publish(line, event, key)
                await asyncio.wait({publish})
        except TimeoutError:
            late = f"within {self._settings.timeout:g} s the broker did not"
            if sent:
                raise Deferred(
                    f"{late} confirm. The message may be stored, and is sent again with the same id"
                ) from None
            raise Deferred(
                f"{late} let anybody publish: see its memory and disk alarms. Nothing was sent"
            ) from None
        answer = line.why or asyncio.CancelledError() if publish.cancelled() else publish.result()
        receipt = interpret_publish_result(
            answer, key, len(event.body), made_by_us=self._settings.declare is True
        )
        if receipt.status is not None and key not in self._unrouted:
            self._unrouted.add(key)
            _log.warning(
                "%s: no queue is bound for %s: the message went nowhere", self._settings.name, key
            )
        return receipt

    def _publish(
        self, line: PublishChannel, event: CloudEvent, key: str
    ) -> asyncio.Task[PublishResult]:
        publish = line.unconfirmed[event.id] = self._publishes.create_task(line.publish(event, key))
        publish.add_done_callback(lambda _: line.unconfirmed.pop(event.id))
        return publish

    async def _open_line(self) -> PublishChannel:
        if self._line is not None and self._line.gone:
            self._hang_up()
        if self._line is None and self._trouble.failure == "transient":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await self._there.wait()
        if self._line is None:
            raise self._trouble.deferred()
        return self._line

    def _hang_up(self) -> None:
        self._line = None
        self._there.clear()
        self._trouble = ConnectionFailure("the channel to the broker is being opened again")

    async def serve(self, connection: Connection) -> NoReturn:
        """Keep a publishing channel open on the connection. Raises when the connection is of no more use."""
        where = host_port(connection.url)
        while True:
            async with asyncio.timeout(SETUP_TIMEOUT):
                unseen = await establish(
                    connection, topology(self._settings.exchange), self._settings.declare
                )
                channel = connection.channel(on_return_raises=True)
                await channel.initialize()
                wire = cast("aiormq.Channel", await channel.get_underlay_channel())
            raise_if_cancelled()
            line = self._line = PublishChannel(connection, channel, wire, self._settings.exchange)
            self._there.set()
            self._log_once(logging.INFO, f"connected to {where}{not_seen(unseen)}")
            try:
                await line.closed()
            finally:
                self._hang_up()
                asyncio.get_running_loop().call_soon(
                    line.end
                )  # once those have run that got an answer
            if not isinstance(line.why, amqp.ChannelClosed) and line.why is not None:
                raise Deferred(
                    f"the connection to {where} was lost: {describe_failure(line.why).reason}"
                )

    def tell(self, trouble: ConnectionFailure) -> None:
        """Hear why there is no connection."""
        self._trouble = trouble
        self._log_once(logging.WARNING, trouble.reason)

    def _log_once(self, level: int, text: str) -> None:
        if text != self._logged:
            self._logged = text
            _log.log(level, "%s: %s", self._settings.name, text)


@contextlib.asynccontextmanager
async def connect(
    settings: Settings,
    clock: Clock,
    *,
    heartbeat: int = HEARTBEAT,
    chance: Callable[[], float] = random.random,
) -> AsyncIterator[RabbitMQ]:
    """Start connecting, and stay connected until the context is left. A broker that is not there is waited for."""
    async with asyncio.TaskGroup() as tasks:
        sink = RabbitMQ(settings, tasks)
        name = f"imds-relay {settings.name}"
        keeping = keep_connected(
            settings.targets, name, clock, sink.serve, sink.tell, heartbeat=heartbeat, chance=chance
        )
        keeper = tasks.create_task(keeping)
        try:
            yield sink
        finally:
            keeper.cancel()


async def diagnose(settings: Settings, clock: Clock, scope: str) -> list[Finding]:  # noqa: ARG001  # the contract of the family
    """Whether the broker is reached, has what is needed, and lets us publish. No message gets anywhere."""
    parts = topology(settings.exchange)[0 if settings.declare else -1 :]
    writes = (settings.exchange, f"event.scheduled.none.{scope}")
    return await examine_broker(
        f"sink {settings.name}", settings.targets(), parts, settings.declare, writes=writes
    )
