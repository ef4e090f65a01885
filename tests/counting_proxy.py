"""A TCP proxy that counts connections, and can hold, slow, slice or cut what passes, or go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from yarl import URL

from tests.ports import reserve

PIECE = 2**16


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


@dataclass(slots=True)
class CountingProxy:
    """Passes TCP connections on, and counts them.

    While `to_host` or `to_client` is not set, nothing arrives in this direction.
    """

    host: str
    port: int
    near_port: int = field(default_factory=lambda: reserve(1)[0])
    accepted: int = 0
    delay: float = 0.0
    """Seconds before each piece."""
    piece: int = PIECE
    """Bytes that pass at once."""
    server: asyncio.Server | None = None
    to_host: asyncio.Event = field(default_factory=_open_gate)
    to_client: asyncio.Event = field(default_factory=_open_gate)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _far_writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def open(self) -> int:
        return len(self._writers)

    def cut(self) -> None:
        """End every connection, as the kernel does for a killed process. What is held is lost."""
        for writer in (*self._writers, *self._far_writers):
            writer.transport.abort()

    def go_away(self) -> None:
        """Accept no more connections, and reset those that are open."""
        assert self.server is not None
        self.server.close()
        self.cut()

    def hold(self) -> None:
        self.to_host.clear()
        self.to_client.clear()

    async def listen(self) -> None:
        """Accept connections, at the same port as before, and hold nothing."""
        self.to_host.set()
        self.to_client.set()
        if self.server is None or not self.server.is_serving():
            self.server = await asyncio.start_server(self.pass_on, "127.0.0.1", self.near_port)

    def release_answers(self) -> None:
        """Let pass the answers of the host that wait now, and hold the next ones."""
        self.to_client.set()
        self.to_client.clear()

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on until both ends are closed."""
        if self.server is None or not self.server.is_serving():
            writer.transport.abort()  # the kernel took it before this went away
            return
        self.accepted += 1
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(self.host, self.port)
            self._far_writers.add(far_writer)
            try:
                await asyncio.gather(
                    self._copy(reader, far_writer, self.to_host),
                    self._copy(far_reader, writer, self.to_client),
                )
            finally:
                far_writer.close()
                self._far_writers.discard(far_writer)
        finally:
            writer.close()
            self._writers.discard(writer)

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(PIECE):
                await gate.wait()
                size = self.piece  # it may change meanwhile
                for start in range(0, len(data), size):
                    if self.delay:
                        await asyncio.sleep(self.delay)
                    writer.write(data[start : start + size])
                    await writer.drain()
        writer.close()


@asynccontextmanager
async def counting_proxy(url: str) -> AsyncIterator[tuple[CountingProxy, str]]:
    """Yield a proxy before the host of a URL, and its URL. Nothing is held at first."""
    target = URL(url)
    proxy = CountingProxy(target.host or "", target.port or 5672)
    await proxy.listen()
    try:
        yield proxy, str(target.with_host("127.0.0.1").with_port(proxy.near_port))
    finally:
        proxy.go_away()
