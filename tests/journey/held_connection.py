"""A TCP proxy before the broker. A test can hold either direction, or cut all connections."""

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
    """A proxy between a relay and the broker.

    While `to_broker` or `to_relay` is not set, nothing arrives in this direction.
    """

    broker_port: int
    url: str = ""
    to_broker: asyncio.Event = field(default_factory=asyncio.Event)
    to_relay: asyncio.Event = field(default_factory=asyncio.Event)
    proxying: set[asyncio.Task[None]] = field(default_factory=set)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Proxy a new connection."""
        task = asyncio.create_task(self._proxy(reader, writer))
        self.proxying.add(task)
        task.add_done_callback(self.proxying.discard)

    async def _proxy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_broker, broker_writer = await asyncio.open_connection("127.0.0.1", self.broker_port)
        upstream = asyncio.create_task(self._copy(reader, broker_writer, self.to_broker))
        downstream = asyncio.create_task(self._copy(from_broker, writer, self.to_relay))
        try:
            await asyncio.wait({upstream, downstream}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task, output in ((upstream, broker_writer), (downstream, writer)):
                task.cancel()
                output.transport.abort()
                output.close()

    def release_answers(self) -> None:
        """Let pass the answers of the broker that wait now, and hold the next ones."""
        self.to_relay.set()
        self.to_relay.clear()

    async def cut(self) -> None:
        """End every connection, as the kernel does for a killed process."""
        for task in self.proxying:
            task.cancel()
        if self.proxying:
            await asyncio.wait(self.proxying)

    @staticmethod
    async def _copy(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await gate.wait()
                writer.write(data)


@asynccontextmanager
async def held_connection(broker: Broker) -> AsyncIterator[HeldConnection]:
    """Listen, and proxy each connection to the broker. Nothing is held at first."""
    proxy = HeldConnection(broker.port)
    proxy.to_broker.set()
    proxy.to_relay.set()
    async with await asyncio.start_server(proxy.accept, "127.0.0.1", 0) as server:
        proxy.url = str(URL(broker.amqp_url()).with_port(server.sockets[0].getsockname()[1]))
        yield proxy
        await proxy.cut()
