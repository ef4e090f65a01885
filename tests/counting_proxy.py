"""A TCP proxy that counts its connections, to see whether one stays, and that can go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from yarl import URL


@dataclass(slots=True)
class CountingProxy:
    """Passes TCP connections on, and counts them."""

    host: str
    port: int
    accepted: int = 0
    server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def open(self) -> int:
        """How many connections are open now."""
        return len(self._writers)

    def go_away(self) -> None:
        """Accept no more connections, and reset those that are open."""
        assert self.server is not None
        self.server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on until both ends are closed."""
        self.accepted += 1
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(self.host, self.port)
            try:
                await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
            finally:
                far_writer.close()
        finally:
            writer.close()
            self._writers.discard(writer)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def counting_proxy(url: str) -> AsyncIterator[tuple[CountingProxy, str]]:
    """Yield a proxy before the host of a URL, and the URL of the proxy."""
    target = URL(url)
    proxy = CountingProxy(target.host or "", target.port or 5672)
    proxy.server = await asyncio.start_server(proxy.pass_on, "127.0.0.1", 0)
    async with proxy.server as server:
        port = server.sockets[0].getsockname()[1]
        yield proxy, str(target.with_host("127.0.0.1").with_port(port))
