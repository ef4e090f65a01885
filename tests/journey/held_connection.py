"""A way to the broker that a test can hold in either direction, or cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from yarl import URL

from tests.rabbitmq import Broker


@dataclass(slots=True)
class Way:
    """A way from a relay to the broker and back. What is not set is held: nothing arrives that goes that way."""

    broker_port: int
    url: str = ""
    there: asyncio.Event = field(default_factory=asyncio.Event)
    back: asyncio.Event = field(default_factory=asyncio.Event)
    carrying: set[asyncio.Task[None]] = field(default_factory=set)

    def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take up a connection."""
        task = asyncio.create_task(self._carry(reader, writer))
        self.carrying.add(task)
        task.add_done_callback(self.carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", self.broker_port)
        there = asyncio.create_task(self._pass(reader, outer, self.there))
        back = asyncio.create_task(self._pass(inner, writer, self.back))
        try:
            await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task, end in ((there, outer), (back, writer)):
                task.cancel()
                end.transport.abort()
                end.close()

    def let_one_back(self) -> None:
        """Let pass what the broker said at once, and hold what it says next."""
        self.back.set()
        self.back.clear()

    async def cut(self) -> None:
        """End every connection, as the kernel does for a process that was killed."""
        for task in self.carrying:
            task.cancel()
        if self.carrying:
            await asyncio.wait(self.carrying)

    @staticmethod
    async def _pass(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await gate.wait()
                writer.write(data)


@asynccontextmanager
async def way_to(broker: Broker) -> AsyncIterator[Way]:
    """A listener that carries connections to the broker."""
    way = Way(broker.port)
    way.there.set()
    way.back.set()
    async with await asyncio.start_server(way.carry, "127.0.0.1", 0) as server:
        way.url = str(URL(broker.amqp_url()).with_port(server.sockets[0].getsockname()[1]))
        yield way
        await way.cut()
