"""A proxy in front of RabbitMQ whose traffic a test can hold in either direction, or cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from yarl import URL

from tests.rabbitmq import Broker


@dataclass(slots=True)
class HeldConnection:
    """A TCP proxy between a relay and RabbitMQ.

    It holds the data of a direction while the event of that direction is not set.
    """

    broker_port: int
    url: str = ""
    there: asyncio.Event = field(default_factory=asyncio.Event)
    back: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a connection that was accepted."""
        task = asyncio.create_task(self._forward(reader, writer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        broker_reader, broker_writer = await asyncio.open_connection("127.0.0.1", self.broker_port)
        to_broker = asyncio.create_task(self._copy(reader, broker_writer, self.there))
        to_relay = asyncio.create_task(self._copy(broker_reader, writer, self.back))
        try:
            await asyncio.wait({to_broker, to_relay}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task, target in ((to_broker, broker_writer), (to_relay, writer)):
                task.cancel()
                target.transport.abort()
                target.close()

    def let_one_back(self) -> None:
        """Pass on the data that the broker has sent, and hold the data that it sends next."""
        self.back.set()
        self.back.clear()

    async def cut(self) -> None:
        """End every connection, as the kernel does for a killed process."""
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)

    @staticmethod
    async def _copy(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await gate.wait()
                writer.write(data)


@asynccontextmanager
async def way_to(broker: Broker) -> AsyncIterator[HeldConnection]:
    """Run a proxy to the broker that holds nothing at first."""
    proxy = HeldConnection(broker.port)
    proxy.there.set()
    proxy.back.set()
    async with await asyncio.start_server(proxy.accept, "127.0.0.1", 0) as server:
        proxy.url = str(URL(broker.amqp_url()).with_port(server.sockets[0].getsockname()[1]))
        yield proxy
        await proxy.cut()
