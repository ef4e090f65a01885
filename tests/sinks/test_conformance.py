"""Every member of the family through every case of `conformance`, each with its real far side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aio_pika.abc import AbstractQueue
from yarl import URL

from relay import plugins, sinks
from relay.clock import SystemClock
from relay.events.cloudevent import CloudEvent
from relay.sinks import Sink, rabbitmq, webhook
from tests.builders import cloudevent
from tests.ports import reserve
from tests.rabbitmq import Reachable
from tests.sinks import rabbitmq_consumer as bus
from tests.sinks.conformance import CASES, Case, FarSide
from tests.sinks.http_receiver import Connection, Receiver, listening
from tests.sinks.webhook_sink import SECRET, settings


@dataclass(slots=True)
class Door:
    """A port in front of a server: it can be shut, and what goes through it can be kept back."""

    host: str
    target: int
    port: int = field(default_factory=lambda: reserve(1)[0])
    open: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    async def listen(self) -> None:
        """Open the door, at the same port as before."""
        self.open.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def shut(self) -> None:
        """Cut what goes through, and refuse who comes."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in tuple(self._serving):
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.set_name("far side")
        self._serving.add(task)
        forward: asyncio.StreamWriter | None = None
        try:
            back, forward = await asyncio.open_connection(self.host, self.target)
            directions = [
                asyncio.create_task(self._copy(*direction), name="far side")
                for direction in ((reader, forward), (back, writer))
            ]
            try:
                await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for direction in directions:
                    direction.cancel()
                await asyncio.wait(directions)
        except (OSError, asyncio.CancelledError):
            pass  # asyncio's streams report a cancelled handler as an error
        finally:
            self._serving.discard(task)
            for end in (writer, forward):
                if end is not None:
                    end.transport.abort()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                await self.open.wait()
                target.write(data)
                await target.drain()


@dataclass(slots=True)
class ForWebhook:
    """A receiver that checks nothing: `test_webhook_delivery` does."""

    door: Door
    receiver: Receiver
    telltales: tuple[str, ...] = ("t0ken", SECRET[6:])

    @asynccontextmanager
    async def sink(self, *, unwanted: bool = False) -> AsyncIterator[Sink]:
        self.receiver.status = 422 if unwanted else 204
        url = f"http://127.0.0.1:{self.door.port}/t0ken-in-path"
        async with webhook.connect(
            settings(url=url, bearer="t0ken-in-header"), SystemClock()
        ) as opened:
            yield opened

    async def leave(self) -> None:
        await self.door.shut()

    async def come(self) -> None:
        await self.door.listen()

    async def hang(self) -> None:
        self.door.open.clear()

    async def got(self) -> list[CloudEvent]:
        return [
            CloudEvent.parse(request.body)
            for request in self.receiver.requests
            if self.receiver.status != 422
        ]


@asynccontextmanager
async def for_webhook(_: pytest.FixtureRequest) -> AsyncIterator[FarSide]:
    """A receiver behind a door."""

    async def takes(connection: Connection) -> None:
        while True:
            await connection.request()
            text = (
                b"you sent t0ken-in-header to /t0ken-in-path"
                if connection.receiver.status != 204
                else b""
            )
            await connection.answer(connection.receiver.status, {}, text)

    async with listening(takes) as receiver:
        door = Door("127.0.0.1", receiver.port)
        await door.listen()
        yield ForWebhook(door, receiver)
        await door.shut()


@dataclass(slots=True)
class ForRabbitMQ:
    """A broker behind a door, and a queue that gets everything."""

    door: Door
    url: URL
    exchange: str
    queue: AbstractQueue
    telltales: tuple[str, ...]
    taken: list[CloudEvent] = field(default_factory=list)

    def sink(self, *, unwanted: bool = False) -> AbstractAsyncContextManager[Sink]:
        url = str(self.url.with_host("127.0.0.1").with_port(self.door.port))
        exchange, declare = (f"{self.exchange}.none", False) if unwanted else (self.exchange, True)
        return rabbitmq.connect(bus.settings(url, exchange, declare=declare), SystemClock())

    async def leave(self) -> None:
        await self.door.shut()

    async def come(self) -> None:
        await self.door.listen()

    async def hang(self) -> None:
        self.door.open.clear()

    async def got(self) -> list[CloudEvent]:
        self.taken += [CloudEvent.parse(body) for body in await bus.waiting(self.queue)]
        return list(self.taken)


@asynccontextmanager
async def for_rabbitmq(request: pytest.FixtureRequest) -> AsyncIterator[FarSide]:
    """The broker of the tests behind a door."""
    broker: Reachable = request.getfixturevalue("broker")
    exchange: str = request.getfixturevalue("exchange")
    url = URL(broker.amqp_url())
    async with bus.sink(str(url), exchange) as opened:
        await bus.delivered(opened, cloudevent("relay.ping", subject="bus"))
    async with bus.channel(str(url)) as forward:
        door = Door(url.host or "", url.port or 5672)
        await door.listen()
        yield ForRabbitMQ(
            door, url, exchange, await bus.bound(forward, exchange), (f":{url.password}@",)
        )
        await door.shut()


MEMBERS: dict[str, Callable[[pytest.FixtureRequest], AbstractAsyncContextManager[FarSide]]] = {
    "webhook": for_webhook,
    "rabbitmq": for_rabbitmq,
}


def test_every_member_of_the_family_is_here() -> None:
    assert set(MEMBERS) == set(plugins.members(sinks))


@pytest.fixture(params=sorted(MEMBERS))
async def far_side(request: pytest.FixtureRequest, exchange: Any) -> AsyncIterator[FarSide]:
    """The far side of each member in turn."""
    assert exchange
    async with MEMBERS[request.param](request) as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_a_sink(
    case: Case, far_side: FarSide, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await case(far_side, tmp_path, caplog)
