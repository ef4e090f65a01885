"""Runs every case of `conformance` with every sink, each with its real receiver."""

from __future__ import annotations

import pkgutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aio_pika.abc import AbstractQueue
from yarl import URL

from relay import sinks
from relay.clock import SystemClock
from relay.events.cloudevent import CloudEvent
from relay.sinks import Sink, rabbitmq, webhook
from tests.builders import cloudevent
from tests.counting_proxy import CountingProxy, counting_proxy
from tests.rabbitmq import Broker
from tests.sinks import rabbitmq_consumer as bus
from tests.sinks.conformance import CASES, Case, ReceiverControl
from tests.sinks.http_receiver import Connection, Receiver, listening
from tests.sinks.webhook_sink import SECRET, settings


@dataclass(slots=True)
class BehindProxy:
    proxy: CountingProxy

    async def disconnect(self) -> None:
        self.proxy.go_away()

    async def reconnect(self) -> None:
        await self.proxy.listen()

    async def hang(self) -> None:
        self.proxy.hold()


@dataclass(slots=True)
class WebhookReceiver(BehindProxy):
    """A receiver that checks nothing: `test_webhook_delivery` does."""

    receiver: Receiver
    secrets_in_settings: tuple[str, ...] = ("t0ken", SECRET[6:])

    @asynccontextmanager
    async def sink(self, *, unwanted: bool = False) -> AsyncIterator[Sink]:
        self.receiver.status = 422 if unwanted else 204
        url = f"http://127.0.0.1:{self.proxy.near_port}/t0ken-in-path"
        async with webhook.connect(
            settings(url=url, bearer="t0ken-in-header"), SystemClock()
        ) as opened:
            yield opened

    async def received(self) -> list[CloudEvent]:
        taken = [] if self.receiver.status == 422 else self.receiver.requests
        return [CloudEvent.parse(request.body) for request in taken]


@asynccontextmanager
async def webhook_receiver(_: pytest.FixtureRequest) -> AsyncIterator[ReceiverControl]:
    async def takes(connection: Connection) -> None:
        while True:
            await connection.request()
            status = connection.receiver.status
            text = b"" if status == 204 else b"you sent t0ken-in-header to /t0ken-in-path"
            await connection.answer(status, {}, text)

    async with listening(takes) as receiver, counting_proxy(receiver.url) as (proxy, _url):
        yield WebhookReceiver(proxy, receiver)


@dataclass(slots=True)
class RabbitMQReceiver(BehindProxy):
    """A broker behind a proxy, and a queue that gets everything."""

    url: URL
    exchange: str
    queue: AbstractQueue
    secrets_in_settings: tuple[str, ...]
    taken: list[CloudEvent] = field(default_factory=list)

    def sink(self, *, unwanted: bool = False) -> AbstractAsyncContextManager[Sink]:
        url = str(self.url.with_host("127.0.0.1").with_port(self.proxy.near_port))
        exchange, declare = (f"{self.exchange}.none", False) if unwanted else (self.exchange, True)
        return rabbitmq.connect(bus.settings(url, exchange, declare=declare), SystemClock())

    async def received(self) -> list[CloudEvent]:
        self.taken += [CloudEvent.parse(body) for body in await bus.waiting(self.queue)]
        return list(self.taken)


@asynccontextmanager
async def rabbitmq_receiver(request: pytest.FixtureRequest) -> AsyncIterator[ReceiverControl]:
    broker: Broker = request.getfixturevalue("broker")
    exchange: str = request.getfixturevalue("exchange")
    url = URL(broker.amqp_url())
    async with bus.sink(str(url), exchange) as opened:
        await bus.delivered(opened, cloudevent("relay.ping", subject="bus"))
    async with bus.channel(str(url)) as forward, counting_proxy(str(url)) as (proxy, _):
        queue = await bus.bound(forward, exchange)
        yield RabbitMQReceiver(proxy, url, exchange, queue, (f":{url.password}@",))


RECEIVERS: dict[
    str, Callable[[pytest.FixtureRequest], AbstractAsyncContextManager[ReceiverControl]]
] = {"webhook": webhook_receiver, "rabbitmq": rabbitmq_receiver}


def test_every_sink_has_a_receiver() -> None:
    assert set(RECEIVERS) == {module.name for module in pkgutil.iter_modules(sinks.__path__)}


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
