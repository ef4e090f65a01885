"""A connection to a RabbitMQ, and a loop that makes it again for ever.

Why not aio-pika's robust connection: docs/decisions/0010-own-reconnect.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import aio_pika
import aiohappyeyeballs
from yarl import URL

from relay.amqp.broker_url import FILES, host_port
from relay.amqp.cancellation import is_cancelled, raise_if_cancelled
from relay.amqp.failures import ConnectionFailure, combine, describe_failure
from relay.amqp.frames import CoalescingWriter, SanitizingReader
from relay.clock import Clock
from relay.errors import Deferred
from relay.net.egress import guarded_socket
from relay.net.tls_context import client_context, load_certificate

HEARTBEAT = 10
"""Seconds, as both sides agree on it. A peer that is silent for three times that and a bit is given up."""
SETUP_TIMEOUT = 10.0
"""Seconds within which the broker is dialled and greeted, and again within which exchanges and channel are there."""
CLOSE_TIMEOUT = 3.0
"""Seconds that leaving a connection may take at most."""
MIN_RECONNECT_DELAY, MAX_RECONNECT_DELAY = 0.1, 2.0
"""Seconds before the next attempt to connect; doubled from one to the other, and up to a quarter more by chance."""


class Connection(aio_pika.Connection):
    """A connection whose socket is ours: made by the egress guard, and at hand when a dead peer would hold up the farewell."""

    def __init__(self, url: URL, name: str) -> None:
        super().__init__(url, client_properties={"connection_name": name})
        self._writer: asyncio.StreamWriter | None = None
        self.kwargs["transport_factory"] = self

    @property
    def lost(self) -> bool:
        """Whether it is no more, whoever ended it; ``is_closed`` is true only of one that we left."""
        return not self.connected.is_set()

    async def create(
        self, url: URL, **_: object
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Dial, as aiormq asks of a transport factory. Raises OSError."""
        loop = asyncio.get_running_loop()
        for name in FILES & url.query.keys():
            Path(url.query[name]).open("rb").close()  # noqa: ASYNC230  # the error of ssl does not say which file it is about
        context = await asyncio.to_thread(_context, url) if url.scheme == "amqps" else None
        addresses = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        dialled = await aiohappyeyeballs.start_connection(
            addresses, happy_eyeballs_delay=0.25, socket_factory=guarded_socket
        )
        reader = SanitizingReader()
        transport, protocol = await loop.create_connection(
            lambda: asyncio.StreamReaderProtocol(reader),
            sock=dialled,
            ssl=context,
            server_hostname=url.host if context else None,
            ssl_shutdown_timeout=CLOSE_TIMEOUT if context else None,
        )
        self._writer = CoalescingWriter(transport, protocol, reader)
        return reader, self._writer

    async def leave(self) -> None:
        """Close in order, or without a farewell after `CLOSE_TIMEOUT` seconds. Raises nothing but a cancellation."""
        try:
            with (
                contextlib.suppress(Exception),
                self.cut_after(CLOSE_TIMEOUT),
            ):  # it is over either way
                await self.close()
        finally:
            self._cut()
            await self.close()  # a farewell that was cut short leaves it marked as open

    @contextlib.contextmanager
    def cut_after(self, seconds: float) -> Iterator[None]:
        """Drop the socket if what is in the context takes longer.

        No timeout from outside ends a wait of aiormq's writer for a peer that takes no more bytes: being cancelled, it waits
        for the same peer to take its farewell.
        """
        cut = asyncio.get_running_loop().call_later(seconds, self._cut)
        try:
            yield
        finally:
            cut.cancel()

    def _cut(self) -> None:
        if self._writer is not None:
            # Before Python 3.11.5 a TLS transport that was closed twice has no `abort`; it ends after `ssl_shutdown_timeout`.
            with contextlib.suppress(AttributeError):
                self._writer.transport.abort()


def _context(url: URL) -> ssl.SSLContext:
    context = client_context(url.query.get("cafile"))
    if "certfile" in url.query:
        load_certificate(context, url.query["certfile"], url.query.get("keyfile"))
    return context


async def keep_connected(
    urls: Callable[[], Sequence[URL]],
    name: str,
    clock: Clock,
    serve: Callable[[Connection], Awaitable[NoReturn]],
    tell: Callable[[ConnectionFailure], None],
    *,
    heartbeat: int = HEARTBEAT,
    chance: Callable[[], float] = random.random,
) -> NoReturn:
    """Connect to one of the hosts, and to the next whenever that fails or ends, for ever; a pause is made after the last.

    ``urls`` is asked anew each time, since it may be in a file that changes; it raises ValueError. ``name`` is shown in the
    broker's list of connections. ``serve`` uses the connection and raises when it is of no more use; ``tell`` hears why.
    ``chance`` gives numbers in [0, 1).
    """
    pause, tried, hosts = MIN_RECONNECT_DELAY, 0, 1
    troubles: deque[ConnectionFailure] = deque()
    while True:
        began = clock.monotonic()
        try:
            found = urls()
            hosts = len(found)
            async with connected(found[tried % hosts], name, heartbeat) as connection:
                await serve(connection)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            trouble = describe_failure(error)
        except Exception as error:  # noqa: BLE001 - whatever it is: told as a sentence, and tried again
            trouble = describe_failure(error)
        raise_if_cancelled()
        if clock.monotonic() - began > 2 * SETUP_TIMEOUT:  # it had been well
            pause = MIN_RECONNECT_DELAY
            troubles.clear()
        troubles = deque((*troubles, trouble), maxlen=hosts)
        tell(combine(troubles))
        tried += 1
        if tried % hosts == 0:
            await clock.sleep(pause * (1 + chance() / 4))
            pause = min(pause * 2, MAX_RECONNECT_DELAY)


@contextlib.asynccontextmanager
async def connected(url: URL, name: str, heartbeat: int = HEARTBEAT) -> AsyncIterator[Connection]:
    """One connection, closed when the context is left. Raises Deferred where there is none."""
    connection = Connection(url.update_query(heartbeat=heartbeat), name)
    try:
        try:
            with connection.cut_after(SETUP_TIMEOUT + 1):
                async with asyncio.timeout(SETUP_TIMEOUT):
                    await connection.connect()
        except (Exception, asyncio.CancelledError) as error:
            if is_cancelled():
                raise
            trouble = describe_failure(error)
            raise Deferred(
                f"no connection to {host_port(url)}: {trouble.reason}", status=trouble.status
            ) from None
        raise_if_cancelled()
        yield connection
    finally:
        await connection.leave()
