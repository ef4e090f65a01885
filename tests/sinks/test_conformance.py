"""Runs every case of `conformance` with every sink, each with its real receiver."""

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

from relay import sinks
from relay.clock import SystemClock
from relay.config.kinds import load_family
from relay.events.cloudevent import CloudEvent
from relay.sinks import Sink, rabbitmq, webhook
from tests.builders import cloudevent
from tests.ports import reserve
from tests.rabbitmq import Reachable
from tests.sinks import rabbitmq_consumer as bus
from tests.sinks.conformance import CASES, Case, ReceiverControl
from tests.sinks.http_receiver import Connection, Receiver, listening
from tests.sinks.webhook_sink import SECRET, settings


@dataclass(slots=True)
class TcpProxy:
    """A port in front of a server. It can be stopped, and can keep back what it gets."""

    host: str
    target: int
    port: int = field(default_factory=lambda: reserve(1)[0])
    forwards: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    async def listen(self) -> None:
        """Accept connections, at the same port as before."""
        self.forwards.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def stop(self) -> None:
        """Cut all connections, and refuse new ones."""
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
        task.set_name("receiver")
        self._serving.add(task)
        forward: asyncio.StreamWriter | None = None
        try:
            back, forward = await asyncio.open_connection(self.host, self.target)
            directions = [
                asyncio.create_task(self._copy(*direction), name="receiver")
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
                await self.forwards.wait()
                target.write(data)
                await target.drain()


@dataclass(slots=True)
class WebhookReceiver:
    """A receiver that checks nothing: `test_webhook_delivery` does."""

    proxy: TcpProxy
    receiver: Receiver
    secrets_in_settings: tuple[str, ...] = ("t0ken", SECRET[6:])

    @asynccontextmanager
    async def sink(self, *, unwanted: bool = False) -> AsyncIterator[Sink]:
        self.receiver.status = 422 if unwanted else 204
        url = f"http://127.0.0.1:{self.proxy.port}/t0ken-in-path"
        async with webhook.connect(
            settings(url=url, bearer="t0ken-in-header"), SystemClock()
        ) as opened:
            yield opened

    async def disconnect(self) -> None:
        await self.proxy.stop()

    async def reconnect(self) -> None:
        await self.proxy.listen()

    async def hang(self) -> None:
        self.proxy.forwards.clear()

    async def received(self) -> list[CloudEvent]:
        return [
            CloudEvent.parse(request.body)
            for request in self.receiver.requests
            if self.receiver.status != 422
        ]


@asynccontextmanager
async def webhook_receiver(_: pytest.FixtureRequest) -> AsyncIterator[ReceiverControl]:
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
        proxy = TcpProxy("127.0.0.1", receiver.port)
        await proxy.listen()
        yield WebhookReceiver(proxy, receiver)
        await proxy.stop()


@dataclass(slots=True)
class RabbitMQReceiver:
    """A broker behind a proxy, and a queue that gets everything."""

    proxy: TcpProxy
    url: URL
    exchange: str
    queue: AbstractQueue
    secrets_in_settings: tuple[str, ...]
    taken: list[CloudEvent] = field(default_factory=list)

    def sink(self, *, unwanted: bool = False) -> AbstractAsyncContextManager[Sink]:
        url = str(self.url.with_host("127.0.0.1").with_port(self.proxy.port))
        exchange, declare = (f"{self.exchange}.none", False) if unwanted else (self.exchange, True)
        return rabbitmq.connect(bus.settings(url, exchange, declare=declare), SystemClock())

    async def disconnect(self) -> None:
        await self.proxy.stop()

    async def reconnect(self) -> None:
        await self.proxy.listen()

    async def hang(self) -> None:
        self.proxy.forwards.clear()

    async def received(self) -> list[CloudEvent]:
        self.taken += [CloudEvent.parse(body) for body in await bus.waiting(self.queue)]
        return list(self.taken)


@asynccontextmanager
async def rabbitmq_receiver(request: pytest.FixtureRequest) -> AsyncIterator[ReceiverControl]:
    broker: Reachable = request.getfixturevalue("broker")
    exchange: str = request.getfixturevalue("exchange")
    url = URL(broker.amqp_url())
    async with bus.sink(str(url), exchange) as opened:
        await bus.delivered(opened, cloudevent("relay.ping", subject="bus"))
    async with bus.channel(str(url)) as forward:
        proxy = TcpProxy(url.host or "", url.port or 5672)
        await proxy.listen()
        yield RabbitMQReceiver(
            proxy, url, exchange, await bus.bound(forward, exchange), (f":{url.password}@",)
        )
        await proxy.stop()


RECEIVERS: dict[
    str, Callable[[pytest.FixtureRequest], AbstractAsyncContextManager[ReceiverControl]]
] = {
    "webhook": webhook_receiver,
    "rabbitmq": rabbitmq_receiver,
}


def test_every_sink_has_a_receiver() -> None:
    assert set(RECEIVERS) == set(load_family(sinks)[0])


@pytest.fixture(params=sorted(RECEIVERS))
async def receiver(request: pytest.FixtureRequest, exchange: Any) -> AsyncIterator[ReceiverControl]:
    assert exchange
    async with RECEIVERS[request.param](request) as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_a_sink(
    case: Case, receiver: ReceiverControl, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await case(receiver, tmp_path, caplog)
