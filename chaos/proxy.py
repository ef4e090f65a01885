"""A TCP proxy that delays, slices, drops and resets what passes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from yarl import URL


@dataclass(slots=True)
class Proxy:
    """A proxy to one port of this machine. Its fields apply to what passes from now on."""

    target: int
    port: int = 0
    delay: float = 0.0
    """Seconds before each piece."""
    piece: int = 65536
    """Bytes that pass at once."""
    drops: bool = False
    """Whether nothing passes, and nobody is told: the other side seems to be there."""
    refuses: bool = False
    """Whether new connections are reset."""
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def redirect(self, url: str) -> str:
        return str(URL(url).with_port(self.port))

    def reset_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def heal(self) -> None:
        """Let all pass. Connections that lost something are reset."""
        if self.drops:
            self.reset_all()
        self.delay, self.piece, self.drops, self.refuses = 0.0, 65536, False, False

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._proxy(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        self.reset_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _proxy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.transport.abort()
            return
        try:
            answers, target = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, target}
        self._writers |= both
        try:
            copies = [
                asyncio.create_task(self._copy(reader, target)),
                asyncio.create_task(self._copy(answers, writer)),
            ]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                for start in range(0, len(data), self.piece):
                    if self.delay:
                        await asyncio.sleep(self.delay)
                    if not self.drops:
                        writer.write(data[start : start + self.piece])
                        await writer.drain()


@asynccontextmanager
async def proxy(url: str) -> AsyncIterator[Proxy]:
    port = URL(url).port
    assert port is not None
    running = Proxy(port)
    async with await asyncio.start_server(running.accept, "127.0.0.1", 0) as server:
        running.port = server.sockets[0].getsockname()[1]
        yield running
        await running.close()
