"""What everything that speaks AMQP shares: a connection that is made again for ever, what must exist on the broker, and reasons.

Why not aio-pika's robust connection: docs/decisions/0010-own-reconnect.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import aio_pika
import aiohappyeyeballs
from aio_pika import exceptions as amqp
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from relay.clock import Clock
from relay.egress import guarded_socket
from relay.errors import Deferred, Failure

HEARTBEAT = 10
"""Seconds, as both sides agree on it. A peer that is silent for three times that and a bit is given up."""
SETTING_UP = 10.0
"""Seconds within which the broker is dialled and greeted, and again within which exchanges and channel are there."""
CLOSING = 3.0
"""Seconds that leaving a connection may take at most."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds before the next attempt to connect; doubled from one to the other, and up to a quarter more by chance."""

Declare = Literal[True, False, "passive"]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why nothing can be sent now, as a sentence without secrets, and what kind of failure that is to the retry plan."""

    reason: str
    failure: Failure = "transient"
    status: int | None = None

    def deferred(self) -> Deferred:
        """The same as an error to raise, new each time: a raised error holds on to its traceback."""
        return Deferred(self.reason, failure=self.failure, status=self.status)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A durable exchange."""

    name: str
    type: Literal["topic", "fanout"]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What it is called in a sentence."""
        return f"exchange {self.name}"

    async def declare(self, channel: aio_pika.abc.AbstractChannel, *, passive: bool) -> None:
        """Make it, or only see that it exists. Raises what aio-pika raises."""
        await channel.declare_exchange(self.name, self.type, durable=True, passive=passive, arguments=dict(self.arguments))


@dataclass(frozen=True, slots=True)
class Queue:
    """A durable quorum queue, bound to one exchange."""

    name: str
    source: str
    key: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What it is called in a sentence."""
        return f"queue {self.name}"

    async def declare(self, channel: aio_pika.abc.AbstractChannel, *, passive: bool) -> None:
        """Make and bind it, or only see that it exists. Raises what aio-pika raises."""
        arguments = {"x-queue-type": "quorum", **self.arguments}
        queue = await channel.declare_queue(self.name, durable=True, passive=passive, arguments=arguments)
        if not passive:
            await queue.bind(self.source, self.key)


async def establish(connection: aio_pika.abc.AbstractConnection, parts: tuple[Exchange | Queue, ...], declare: Declare) -> None:
    """See to it that the parts exist, as ``declare`` says: True makes them, ``passive`` looks, False does neither.

    Raises Deferred with what is missing, refused or different, and what to do about it.
    """
    missing = []
    for part in parts if declare else ():
        # A channel each: a refusal closes it, and all that is missing is to be named at once.
        async with connection.channel(publisher_confirms=False) as channel:
            try:
                await part.declare(channel, passive=declare == "passive")
            except amqp.ChannelNotFoundEntity:
                missing.append(part.title)
            except ChannelAccessRefused as error:
                remedy = "grant the user configure, read and write on it, or have it made by somebody else and set declare: passive"
                raise Deferred(f"the broker refused to make {part.title} ({said(error)}): {remedy}", failure="slow", status=403) from None
            except amqp.ChannelPreconditionFailed as error:
                remedy = "delete it so that it is made anew, or set declare: passive to use it as it is"
                raise Deferred(f"{part.title} exists and is another than this relay makes ({said(error)}): {remedy}", status=406) from None
    if missing:
        remedy = "make what is missing, or set declare: true, or declare: false to go without"
        raise Deferred(f"the broker has no {', no '.join(missing)}: {remedy}", failure="slow", status=404)


def parse_url(text: str) -> URL:
    """Read the URL of a broker. Raises ValueError, which holds nothing of the URL."""
    try:
        url = URL(text)
    except ValueError:
        url = URL()
    if url.scheme not in {"amqp", "amqps"} or not url.host:
        raise ValueError("expected a URL such as amqps://user:password@broker.example.com/vhost, got something else")
    return url


def place(url: URL) -> str:
    """The broker as logs and errors name it: host and port, no user, no password."""
    host = f"[{url.host}]" if ":" in (url.host or "") else url.host
    return f"{host}:{url.port or (5671 if url.scheme == 'amqps' else 5672)}"


class Connection(aio_pika.Connection):
    """A connection whose socket is ours: made by the egress guard, and at hand when a dead peer would hold up the farewell."""

    def __init__(self, url: URL, name: str) -> None:
        super().__init__(url, client_properties={"connection_name": name})
        self._writer: asyncio.StreamWriter | None = None
        self.kwargs["transport_factory"] = self

    async def create(self, url: URL, *, ssl_context_provider: Any, **_: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Dial, as aiormq asks of a transport factory. Raises OSError."""
        addresses = await asyncio.get_running_loop().getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        dialled = await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=0.25, socket_factory=guarded_socket)
        context = await ssl_context_provider.get_context() if url.scheme == "amqps" else None
        reader, self._writer = await asyncio.open_connection(sock=dialled, ssl=context, server_hostname=url.host if context else None)
        return reader, self._writer

    async def leave(self) -> None:
        """Close in order, or without a farewell after `CLOSING` seconds. Raises nothing but a cancellation."""
        try:
            with contextlib.suppress(Exception), self.cut_after(CLOSING):  # it is over either way
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
            self._writer.transport.abort()


async def keep_connected(
    url: Callable[[], URL],
    name: str,
    clock: Clock,
    serve: Callable[[Connection], Awaitable[NoReturn]],
    tell: Callable[[Trouble], None],
    *,
    heartbeat: int = HEARTBEAT,
    chance: Callable[[], float] = random.random,
) -> NoReturn:
    """Connect, and connect again whenever that fails or ends, for ever.

    ``url`` is asked anew each time, since it may be in a file that changes; it raises ValueError. ``name`` is shown in the
    broker's list of connections. ``serve`` uses the connection and raises when it is of no more use; ``tell`` hears why.
    ``chance`` gives numbers in [0, 1).
    """
    pause = FIRST_PAUSE
    while True:
        began = clock.monotonic()
        try:
            async with _connected(url(), name, heartbeat) as connection:
                await serve(connection)
        except asyncio.CancelledError as error:
            if asked_to_stop():
                raise
            trouble = explain(error)
        except Exception as error:  # noqa: BLE001 - whatever it is: told as a sentence, and tried again
            trouble = explain(error)
        tell(trouble)
        if clock.monotonic() - began > 2 * SETTING_UP:  # it had been well
            pause = FIRST_PAUSE
        await clock.sleep(pause * (1 + chance() / 4))
        pause = min(pause * 2, LONGEST_PAUSE)


@contextlib.asynccontextmanager
async def _connected(url: URL, name: str, heartbeat: int) -> AsyncIterator[Connection]:
    connection = Connection(url.update_query(heartbeat=heartbeat), name)
    try:
        try:
            with connection.cut_after(SETTING_UP + 1):
                async with asyncio.timeout(SETTING_UP):
                    await connection.connect()
        except (Exception, asyncio.CancelledError) as error:
            if asked_to_stop():
                raise
            trouble = explain(error)
            raise Deferred(f"no connection to {place(url)}: {trouble.reason}", status=trouble.status) from None
        yield connection
    finally:
        await connection.leave()


def asked_to_stop() -> bool:
    """Whether somebody cancelled this task.

    When its watchdog fires, aiormq makes everybody who waits on the connection raise CancelledError, cancelled or not.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def said(error: BaseException) -> str:
    """What the broker said, or the library, without the words that the library puts around it."""
    return str(error.args[-1]) if error.args else type(error).__name__


def explain(error: BaseException) -> Trouble:
    """Say why a connection or channel could not be had, or ended."""
    match error:
        case Deferred():
            return Trouble(error.reason, error.failure, error.status)
        case asyncio.CancelledError():
            return Trouble("nothing was heard from the broker for three heartbeats")
        case TimeoutError():
            return Trouble(f"the broker did not answer within {SETTING_UP:g} s")
        case amqp.ProbableAuthenticationError():
            return Trouble(f"the broker refused user or password ({said(error)}): correct the url", status=403)
        case amqp.InvalidFrameError() if "Connection.Close" in said(error):  # aiormq keeps the broker's own words to itself
            return Trouble("the broker did not open the virtual host: see that it exists and that the user has rights in it", status=530)
        case socket.gaierror():
            return Trouble(f"the host's name was not found ({error.strerror})")
        case OSError(errno=int(number)) if "Connect call failed" in said(error):  # asyncio's words, which hide the system's
            return Trouble(os.strerror(number))
        case _:
            return Trouble(said(error))
