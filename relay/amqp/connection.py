"""A connection to RabbitMQ, a loop that reconnects for ever, and a buffer of what arrives.

The RabbitMQ sink, the consumer of approvals and both ends of a fleet each run `keep_connected`, and
hand it what they do with a connection. ``imds-relay doctor`` uses `open_connection` to check one.
Why this is not aio-pika's robust connection:
docs/decisions.md#rabbitmq-by-plain-connections-that-we-open-again.

Those that consume read from a buffer. If the channel or the queue goes away, it gets the error
behind the last message, so a reader need not watch them.

The reader of frames removes what would end the connection: aiormq closes it if it cannot decode a
property, such as a timestamp beyond the year 9999. The broker would then deliver the message again,
and so on: anybody who may publish to a queue could stop its consumer for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias, cast

import aio_pika
import aiohappyeyeballs
import pamqp.frame
from aio_pika import exceptions as amqp
from aiormq import Channel
from aiormq.abc import AbstractChannel, DeliveredMessage
from typing_extensions import override  # in typing from Python 3.12
from yarl import URL

from relay.amqp.broker_url import FILE_OPTIONS, host_port
from relay.amqp.failures import explain_failure, raise_if_cancelled
from relay.clock import Clock
from relay.errors import Deferred
from relay.files import require_small_regular_file
from relay.net import exponential_backoff, with_jitter
from relay.net.egress import guarded_socket
from relay.net.tls import client_context_trusting_ca_file, load_client_certificate

MAX_BODY_BYTES = 64 * 1024
"""Bytes of a message's body by default. A message with a larger body arrives without any body."""
_FRAME_HEAD = struct.Struct(">BHI")  # type, channel, size of the payload
_CONTENT_HEAD = struct.Struct(">HHQ")  # class, weight, size of the body; flags, properties follow
_HEADER_FRAME = 2
_BODY_FRAME = 3
_FRAME_END = b"\xce"


class SanitizingReader(asyncio.StreamReader):
    """Reads frames from the broker, without undecodable properties and without large bodies."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._max_body_bytes = max_body_bytes
        self._frame = b""  # the rest of a frame: aiormq reads each frame in three parts
        self._bytes_to_skip: dict[int, int] = {}  # by channel, of a body that is left out

    @override
    async def readexactly(self, n: int) -> bytes:
        if not self._frame:
            self._frame = await self._next_frame()
        part, self._frame = self._frame[:n], self._frame[n:]
        return part

    async def _next_frame(self) -> bytes:
        while True:
            head = await super().readexactly(_FRAME_HEAD.size)
            if head.startswith(b"AMQP"):  # another protocol version: aiormq reports it
                return head
            frame_type, channel, size = _FRAME_HEAD.unpack(head)
            payload = (await super().readexactly(size + 1))[:-1]
            if frame_type == _BODY_FRAME and self._bytes_to_skip.get(channel):
                self._bytes_to_skip[channel] -= size
                continue
            if frame_type == _HEADER_FRAME:
                payload, self._bytes_to_skip[channel] = sanitize_content_header(
                    payload, self._max_body_bytes
                )
            return _FRAME_HEAD.pack(frame_type, channel, len(payload)) + payload + _FRAME_END


def sanitize_content_header(
    header: bytes, max_body_bytes: int = MAX_BODY_BYTES
) -> tuple[bytes, int]:
    """Return a decodable payload for a header frame, and how many bytes of its body to skip."""
    class_id, weight, body_size = _CONTENT_HEAD.unpack_from(header)
    properties = header[_CONTENT_HEAD.size :]
    try:
        pamqp.frame.unmarshal(_FRAME_HEAD.pack(_HEADER_FRAME, 1, len(header)) + header + _FRAME_END)
    except Exception:  # noqa: BLE001  # a crafted property can raise anything in the decoder
        properties = bytes(2)  # the flags of none
    skipped = body_size if body_size > max_body_bytes else 0
    return _CONTENT_HEAD.pack(class_id, weight, body_size - skipped) + properties, skipped


HEARTBEAT = 10
"""Seconds. The connection ends after a little more than three heartbeats without a sign of life."""
SETUP_TIMEOUT = 10.0
"""Seconds to connect and log in, and again as many to open channels and make the topology."""
CLOSE_TIMEOUT = 3.0
"""Seconds to close a connection in order. Then its socket is dropped."""
Deliveries: TypeAlias = asyncio.Queue[DeliveredMessage | Deferred]
"""Messages, and at the end the error with which the channel or the queue went away."""
QUEUE_DELETED = 404
"""The status of the error if somebody deleted the queue."""


class GuardedConnection(aio_pika.Connection):
    """A connection whose socket is guarded, and can be dropped if the broker hangs."""

    def __init__(self, url: URL, name: str, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        super().__init__(url, client_properties={"connection_name": name})
        self._max_body_bytes = max_body_bytes
        self._writer: asyncio.StreamWriter | None = None
        self.kwargs["transport_factory"] = self

    @property
    def is_over(self) -> bool:
        """Whether it is over, whoever ended it. ``is_closed`` is true only after our own close."""
        return not self.connected.is_set()

    async def create(
        self, url: URL, **_: object
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect the socket. aiormq calls this on its transport factory. Raises OSError."""
        loop = asyncio.get_running_loop()
        for option in FILE_OPTIONS & url.query.keys():
            # An error of the ssl module would not name the file.
            require_small_regular_file(Path(url.query[option]))
            Path(url.query[option]).open("rb").close()  # noqa: ASYNC230  # a small local file
        context = await asyncio.to_thread(_tls_context, url) if url.scheme == "amqps" else None
        addresses = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        connected_socket = await aiohappyeyeballs.start_connection(
            addresses, happy_eyeballs_delay=0.25, socket_factory=guarded_socket
        )
        reader = SanitizingReader(self._max_body_bytes)
        transport, protocol = await loop.create_connection(
            lambda: asyncio.StreamReaderProtocol(reader),
            sock=connected_socket,
            ssl=context,
            server_hostname=url.host if context else None,
            ssl_shutdown_timeout=CLOSE_TIMEOUT if context else None,
        )
        self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        return reader, self._writer

    async def close_gracefully(self) -> None:
        """Close within `CLOSE_TIMEOUT` seconds. Raises nothing but a cancellation."""
        try:
            # The connection ends in any case, so errors do not matter.
            with contextlib.suppress(Exception), self.abort_if_slower_than(CLOSE_TIMEOUT):
                await self.close()
        finally:
            self._abort()
            await self.close()  # else a close that was cut short leaves it marked as open

    @contextlib.contextmanager
    def abort_if_slower_than(self, seconds: float) -> Iterator[None]:
        """Drop the socket if the block takes longer.

        A timeout around the block is not enough. aiormq's writer can wait for a broker that reads
        nothing; once cancelled, it waits for the same broker to read its farewell.
        """
        timer = asyncio.get_running_loop().call_later(seconds, self._abort)
        try:
            yield
        finally:
            timer.cancel()

    def _abort(self) -> None:
        if self._writer is not None:
            # Before Python 3.11.5 a TLS transport that was closed twice has no `abort`. It then
            # ends after `ssl_shutdown_timeout`.
            with contextlib.suppress(AttributeError):
                self._writer.transport.abort()


def _tls_context(url: URL) -> ssl.SSLContext:
    context = client_context_trusting_ca_file(url.query.get("cafile"))
    if "certfile" in url.query:
        load_client_certificate(context, url.query["certfile"], url.query.get("keyfile"))
    return context


def reconnect_delay(failed_rounds: int, chance: float) -> float:
    """Return the seconds after so many failed rounds of all hosts. ``chance`` is in [0, 1)."""
    return with_jitter(exponential_backoff(failed_rounds, first=0.1, maximum=2.0), chance)


async def keep_connected(
    urls: Callable[[], Sequence[URL]],
    name: str,
    clock: Clock,
    serve: Callable[[GuardedConnection], Awaitable[NoReturn]],
    on_failure: Callable[[Deferred], None],
    *,
    chance: Callable[[], float] = random.random,
    delay: Callable[[int, float], float] = reconnect_delay,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> NoReturn:
    """Connect to one host after the other for ever, with a pause after each round of all hosts.

    ``urls`` returns the current URL of each host, or raises ValueError. ``name`` appears in the
    broker's list of connections. ``serve`` uses the connection until it is unusable, and then
    raises. ``on_failure`` gets the failures of the last round as one. ``chance`` returns a random
    number in [0, 1), and ``delay`` what `reconnect_delay` does. A message with more than
    ``max_body_bytes`` arrives without its body.
    """
    attempts = 0
    failed_rounds = 0
    host_count = 1
    failures: deque[Deferred] = deque()
    while True:
        start = clock.monotonic()
        try:
            hosts = urls()
            host_count = len(hosts)
            url = hosts[attempts % host_count]
            async with open_connection(url, name, max_body_bytes) as connection:
                await serve(connection)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # after any error the next one is made
            raise_if_cancelled()
            failure = explain_failure(error)
        if clock.monotonic() - start > 2 * SETUP_TIMEOUT:  # a success: the delays start again
            failed_rounds = 0
            failures.clear()
        failures = deque((*failures, failure), maxlen=host_count)
        reasons = sorted({each.reason for each in failures})  # always in the same order
        on_failure(Deferred("; ".join(reasons), status=failure.status))
        attempts += 1
        if attempts % host_count == 0:
            failed_rounds += 1
            await clock.sleep(delay(failed_rounds, chance()))


@contextlib.asynccontextmanager
async def open_connection(
    url: URL, name: str, max_body_bytes: int = MAX_BODY_BYTES
) -> AsyncIterator[GuardedConnection]:
    """Yield one connection, and close it at the end. Raises Deferred if it cannot be opened."""
    url_of_connection = url.update_query(heartbeat=HEARTBEAT)
    connection = GuardedConnection(url_of_connection, name, max_body_bytes)
    try:
        try:
            with connection.abort_if_slower_than(SETUP_TIMEOUT + 1):
                async with asyncio.timeout(SETUP_TIMEOUT):
                    await connection.connect()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # all are explained
            raise_if_cancelled()
            failure = explain_failure(error)
            raise Deferred(
                f"no connection to {host_port(url)}: {failure.reason}",
                remedy=failure.remedy,
                status=failure.status,
            ) from None
        raise_if_cancelled()
        yield connection
    finally:
        await connection.close_gracefully()


# --- messages that arrive


async def open_channel(
    connection: GuardedConnection, messages_per_turn: int, *, publisher_confirms: bool = False
) -> Channel:
    """Return an open channel whose buffer takes what is read in one turn of the event loop.

    aio-pika's channels have room for ten frames. A message has three, so only about two are read in
    each turn, and messages wait while other work makes the turns long. Raises Deferred.
    """
    if connection.transport is None:
        raise Deferred(f"the connection to {host_port(connection.url)} was lost")
    channel = await connection.transport.connection.channel(
        publisher_confirms=publisher_confirms, frame_buffer_size=3 * messages_per_turn
    )
    return cast("Channel", channel)


async def start_consuming(
    channel: AbstractChannel, queue: str, *, no_ack: bool = False, consumer_tag: str | None = None
) -> Deliveries:
    """Return where the messages of a queue arrive, and at the end the error of the channel."""
    deliveries: Deliveries = asyncio.Queue()

    def on_close(closing: asyncio.Future[object]) -> None:
        error = None if closing.cancelled() else closing.exception()
        reason = explain_failure(error or amqp.ChannelClosed()).reason
        deliveries.put_nowait(Deferred(f"the channel was closed: {reason}"))

    def on_cancel(_: object) -> None:
        deliveries.put_nowait(Deferred(f"the queue {queue} was deleted", status=QUEUE_DELETED))

    # Before the consumer begins: the channel can close at any time.
    channel.closing.add_done_callback(on_close)
    channel.on_consumer_cancel_callbacks.add(on_cancel)
    await channel.basic_consume(queue, deliveries.put, no_ack=no_ack, consumer_tag=consumer_tag)
    return deliveries


async def take_batch(deliveries: Deliveries, most: int) -> list[DeliveredMessage]:
    """Return the messages that have arrived, at least one. Raises the error behind the last."""
    batch: list[DeliveredMessage] = []
    while True:
        delivery = await deliveries.get()
        if isinstance(delivery, Deferred):
            raise delivery
        batch.append(delivery)
        if deliveries.empty() or len(batch) == most:
            return batch


class UnusableMessage(Exception):
    """The message is of no use, or of no known sender. The text can quote the message."""


def require_publishing_user(message: DeliveredMessage) -> str:
    """Return the user who published a message. Raises UnusableMessage if nobody vouches for it."""
    properties = message.header.properties
    if "x-death" in (properties.headers or {}):
        raise UnusableMessage("it is the dead letter of a queue, and was not published here")
    if not properties.user_id:
        raise UnusableMessage("it has no user_id, so its sender is unknown")
    return properties.user_id
