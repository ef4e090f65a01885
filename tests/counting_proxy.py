"""A TCP proxy that counts its connections, to see whether a connection stays."""

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
    open: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on until both ends are closed."""
        self.accepted += 1
        self.open += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(self.host, self.port)
            try:
                await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
            finally:
                far_writer.close()
        finally:
            writer.close()
            self.open -= 1


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
    server = await asyncio.start_server(proxy.pass_on, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield proxy, str(target.with_host("127.0.0.1").with_port(port))
