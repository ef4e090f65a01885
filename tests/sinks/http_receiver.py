"""HTTP receivers on loopback that send exactly the bytes that a test wants."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from aiohttp.abc import AbstractResolver, ResolveResult
from multidict import CIMultiDict
from typing_extensions import override

from relay.clock import Clock, SystemClock
from tests.certificates import LOOPBACK


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it came over the wire.

    ``at`` is the monotonic time in seconds, ``peer`` the port of the client.
    """

    line: str
    headers: CIMultiDict[str]
    body: bytes
    at: float
    peer: int

    @property
    def method(self) -> str:
        return self.line.split(" ")[0]

    @property
    def target(self) -> str:
        return self.line.split(" ")[1]


@dataclass(slots=True)
class Connection:
    """One accepted connection, in the hands of the test's behaviour."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    receiver: Receiver

    async def request(self) -> Received:
        """Read one request. Raises IncompleteReadError when the client has closed."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *fields = head.strip().split("\r\n")
        headers = CIMultiDict[str]()
        for name, _, value in (text.partition(": ") for text in fields):
            headers.add(name, value)
        body = await self.reader.readexactly(int(headers.get("Content-Length", 0)))
        peer = self.writer.get_extra_info("peername")[1]
        received = Received(line, headers, body, self.receiver.clock.monotonic(), peer)
        self.receiver.requests.append(received)
        return received

    async def send(self, *parts: bytes) -> None:
        """Write the parts as they are."""
        self.writer.write(b"".join(parts))
        await self.writer.drain()

    async def answer(
        self, status: int = 204, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> None:
        """A proper answer, after which the connection stays open."""
        length = {} if status in {204, 304} or status < 200 else {"Content-Length": str(len(body))}
        everything = {**length, **(headers or {})}
        fields = "".join(f"{name}: {value}\r\n" for name, value in everything.items())
        await self.send(f"HTTP/1.1 {status} Said\r\n{fields}\r\n".encode("latin-1"), body)


Behaviour = Callable[[Connection], Awaitable[None]]


@dataclass(slots=True)
class Receiver:
    port: int = 0
    scheme: str = "http"
    status: int = 204
    """For behaviours that answer as a test tells them."""
    connections: int = 0
    requests: list[Received] = field(default_factory=list)
    clock: Clock = field(default_factory=SystemClock)

    @property
    def url(self) -> str:
        """Holds what must never be seen in an error: a token in the path and one in the query."""
        return f"{self.scheme}://127.0.0.1:{self.port}/hook/t0ken-in-path?key=t0ken-in-query"


@asynccontextmanager
async def listening(
    behaviour: Behaviour,
    *,
    tls: bool = False,
    certificate: Path = LOOPBACK,
    client_ca: Path | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[Receiver]:
    """A receiver with this behaviour for each connection; what is under way at the end is cut off.

    ``certificate`` is a file with certificate and key for TLS. ``client_ca`` must have signed the
    certificates of callers.
    """
    receiver = Receiver(scheme="https" if tls else "http", clock=clock or SystemClock())
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        receiver.connections += 1
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await behaviour(Connection(reader, writer, receiver))
        except asyncio.CancelledError:
            pass  # asyncio's streams report a cancelled handler as an error
        finally:
            serving.discard(task)
            writer.transport.abort()

    context = None
    if tls:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate)
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(client_ca)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        for task in tuple(serving):
            task.cancel()
        if serving:
            await asyncio.wait(serving)


async def good(connection: Connection) -> None:
    """Answers every request with 204, over one connection."""
    while True:
        await connection.request()
        await connection.answer()


def says(
    *parts: bytes,
    then: Literal["hang", "hang up", "half-close"] = "hang",
    drip: bytes = b"",
    pause: float = 0.01,
) -> Behaviour:
    """Return what answers with these bytes; ``drip`` follows for ever, after each ``pause``."""

    async def answer(connection: Connection) -> None:
        await connection.request()
        await connection.send(*parts)
        while drip:
            await connection.send(drip)
            await asyncio.sleep(pause)
        if then == "half-close":
            connection.writer.write_eof()
        if then != "hang up":
            await asyncio.Event().wait()

    return answer


class Names(AbstractResolver):
    """Resolves these names to addresses."""

    def __init__(self, names: Mapping[str, Sequence[str]]) -> None:
        self._names = names

    @override
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        assert family == socket.AF_UNSPEC, "both families are asked for"
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=0,
            )
            for address in self._names[host]
        ]

    @override
    async def close(self) -> None:
        """Nothing to close."""
