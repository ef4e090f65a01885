"""Events a second from recorded to settled, durable and in order, beside raw loops over the same wire in the same run."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aio_pika
import aiohttp
from aio_pika.abc import AbstractIncomingMessage, AbstractQueue
from aiohttp import web

from bench.figures import Figure, percentiles
from relay import sinks
from relay.clock import SystemClock
from relay.config import sink_members
from relay.delivery.dispatcher import Dispatcher
from relay.events.cloudevent import CONTENT_TYPE, CloudEvent
from relay.outbox import Identity, StoreSettings
from relay.outbox.sqlite import Store, open_store
from relay.outbox.transaction import Transaction
from relay.signature import sign
from relay.sinks.rabbitmq import build
from tests.journey.process import SECRET
from tests.make import cloudevent

EVENTS = 2000
EXCHANGE = "imds-relay.bench"
STEADY, ROUNDS = 300, 5
"""Events at a steady pace, and how often, to compare a healthy endpoint alone and beside a hung one."""
BACKLOG = 200
"""Events that wait before more are recorded."""
AT_ONCE = 10
"""Changes that one poll brings."""


async def measure(amqp_url: str) -> list[Figure]:
    """Each pair in turn, so that both meet the same noise; the relay's rate, the raw rate, and their ratio."""
    figures: list[Figure] = []
    async with _endpoint() as url:
        for endpoints in (1, 10):
            sections = [_webhook(url, f"w{number}") for number in range(endpoints)]
            before = await _raw_posts(url)
            rate, spans = await _relayed(sections)
            raw = (before + await _raw_posts(url)) / 2
            figures += _compared(f"deliveries to {endpoints} endpoint{'s' * (endpoints > 1)}", rate, raw, "0.7")
            figures += percentiles(f"recorded to delivered, {endpoints} endpoint{'s' * (endpoints > 1)}", spans)
        figures += await _isolation(url)
    return figures + await _published(amqp_url)


async def _published(amqp_url: str) -> list[Figure]:
    """To a queue that nobody reads, as the raw loop's; and once more, with somebody who does."""
    sections = [{"kind": "rabbitmq", "name": "bus", "url": amqp_url, "exchange": EXCHANGE}]
    before = await _raw_publishes(amqp_url)
    async with _queue(amqp_url):
        rate, spans = await _relayed(sections)
    raw = (before + await _raw_publishes(amqp_url)) / 2
    arrived: dict[str | None, float] = {}
    async with _queue(amqp_url) as queue:
        await queue.consume(lambda message: _note(arrived, message), no_ack=True)
        async with _dispatching(sections) as (store, dispatcher):
            await _flood(store, dispatcher)
            await _until(lambda: len(arrived) == EVENTS)
            recorded = await store.read(_recorded)
    consumed = [arrived[event_id] - moment for event_id, moment in recorded.items()]
    return [
        *_compared("publishes", rate, raw, "0.8"),
        *percentiles("recorded to confirmed", spans),
        *percentiles("recorded to consumed", consumed),
    ]


@asynccontextmanager
async def _queue(amqp_url: str) -> AsyncIterator[AbstractQueue]:
    """A queue on the sink's exchange, of the same sort as the raw loop's."""
    connection = await aio_pika.connect(amqp_url)
    async with connection, connection.channel() as channel:
        arguments: dict[str, Any] = {"alternate-exchange": f"{EXCHANGE}.unrouted"}
        await channel.declare_exchange(EXCHANGE, aio_pika.ExchangeType.TOPIC, durable=True, arguments=arguments)
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(EXCHANGE, "#")
        yield queue


async def _note(arrived: dict[str | None, float], message: AbstractIncomingMessage) -> None:
    arrived.setdefault(message.correlation_id, time.time())


def _compared(name: str, rate: float, raw: float, aim: str) -> list[Figure]:
    return [
        Figure(f"{name}, durable", rate, "/s"),
        Figure(f"{name}, raw loop", raw, "/s"),
        Figure(f"{name}, ratio", rate / raw, "", f"over {aim}"),
    ]


def _events(count: int) -> list[CloudEvent]:
    return [cloudevent(subject=f"EVENT-{number}") for number in range(count)]


def _webhook(url: str, name: str) -> dict[str, Any]:
    return {"kind": "webhook", "name": name, "url": url, "allow_http": True, "secrets": [SECRET]}


@asynccontextmanager
async def _endpoint() -> AsyncIterator[str]:
    async def receive(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(status=204)

    application = web.Application()
    application.router.add_post("/", receive)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


async def _raw_posts(url: str) -> float:
    events = iter(_events(EVENTS))

    async def client(session: aiohttp.ClientSession) -> None:
        for event in events:
            now = int(time.time())
            headers = {
                "Content-Type": CONTENT_TYPE,
                "webhook-id": event.id,
                "webhook-timestamp": str(now),
                "webhook-signature": sign([SECRET], event.id, now, event.body),
            }
            async with session.post(url, data=event.body, headers=headers) as answer:
                await answer.read()

    async with aiohttp.ClientSession() as session:
        began = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(16)))
        return EVENTS / (time.perf_counter() - began)


async def _raw_publishes(amqp_url: str) -> float:
    messages = iter([build(event) for event in _events(EVENTS)])  # the very bytes that the relay sends
    connection = await aio_pika.connect(amqp_url)
    async with connection, connection.channel(on_return_raises=True) as channel:
        exchange = await channel.declare_exchange("imds-relay.bench.raw", aio_pika.ExchangeType.FANOUT, auto_delete=True)
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(exchange)

        async def publisher() -> None:
            for message in messages:
                await exchange.publish(message, "bench", mandatory=True)

        began = time.perf_counter()
        await asyncio.gather(*(publisher() for _ in range(64)))
        return EVENTS / (time.perf_counter() - began)


async def _relayed(sections: Sequence[dict[str, Any]]) -> tuple[float, list[float]]:
    """Record every event and wait until all are settled: rate over all sinks, and the span of each delivery."""
    async with _dispatching(sections) as (store, dispatcher):
        began = time.perf_counter()
        await _flood(store, dispatcher)
        while await store.read(lambda tx: tx.deliveries.waiting()):  # noqa: ASYNC110  # the last are being written down
            await asyncio.sleep(0.001)
        rate = EVENTS * len(sections) / (time.perf_counter() - began)
        return rate, await store.read(_spans)


async def _flood(store: Store, dispatcher: Dispatcher) -> None:
    """Record every event, and return once all have been delivered."""
    events = _events(EVENTS)
    recorded: asyncio.Future[None] | None = None
    for first in range(0, EVENTS, AT_ONCE):
        recorded = _record(store, events[first : first + AT_ONCE])
        if first % BACKLOG == 0:
            await recorded
            await _until(lambda: max(status.waiting for status in dispatcher.status()) < BACKLOG)
    if recorded is not None:
        await recorded
    await _until(lambda: not any(status.waiting for status in dispatcher.status()))


@asynccontextmanager
async def _dispatching(sections: Sequence[dict[str, Any]]) -> AsyncIterator[tuple[Store, Dispatcher]]:
    """A store and a dispatcher with these sinks."""
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        settings = [sink_members()[section["kind"]].Settings.model_validate(section) for section in sections]
        names = [one.name for one in settings]
        store = await stack.enter_async_context(
            open_store(StoreSettings(path=Path(directory) / "bench.db"), Identity("bench", None), clock, lambda _: names)
        )
        opened: dict[str, tuple[sinks.SinkSettings, sinks.Sink]] = {
            one.name: (one, await stack.enter_async_context(sink_members()[one.kind].connect(one, clock))) for one in settings
        }
        dispatcher = Dispatcher(opened, store, clock, lambda *_: None)
        await dispatcher.start()
        running = asyncio.create_task(dispatcher.run())
        await asyncio.sleep(1)  # connected
        yield store, dispatcher
        running.cancel()
        await asyncio.wait({running})


async def _isolation(url: str) -> list[Figure]:
    """A healthy endpoint's p99 beside one that hangs over that alone: in turns, the middle of each."""
    async with _hung() as hung_url:
        healthy, hung = _webhook(url, "healthy"), _webhook(hung_url, "hung")
        alone, beside = [], []
        for _ in range(ROUNDS):
            alone.append(await _p99([healthy]))
            beside.append(await _p99([healthy, hung]))
    return [
        Figure("recorded to delivered, alone, p99", median(alone) * 1000, "ms"),
        Figure("recorded to delivered, beside a hung endpoint, p99", median(beside) * 1000, "ms"),
        Figure("isolation, ratio", median(beside) / median(alone), "", "under 1.2"),
    ]


async def _p99(sections: Sequence[dict[str, Any]]) -> float:
    """Of what the first sink gets, at a pace that it can keep."""
    async with _dispatching(sections) as (store, dispatcher):
        for event in _events(STEADY):
            await _record(store, [event])
            await asyncio.sleep(0.005)
        await _until(lambda: not dispatcher.status()[0].waiting)
        spans = await store.read(lambda tx: _spans(tx, sections[0]["name"]))
    return quantiles(spans, n=100, method="inclusive")[98]


@asynccontextmanager
async def _hung() -> AsyncIterator[str]:
    """An endpoint that takes every connection and never answers."""
    kept: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: kept.append(writer), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    finally:
        server.close()
        for writer in kept:
            writer.transport.abort()


def _record(store: Store, events: Sequence[CloudEvent]) -> asyncio.Future[None]:
    """As the recorder does with what one poll has brought: one transaction."""
    now = datetime.now(UTC)

    def work(tx: Transaction) -> None:
        for event in events:
            tx.say(event, now)

    return store.submit(work)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # what is waited for has no event
        await asyncio.sleep(0.002)


def _spans(tx: Transaction, sink: str | None = None) -> list[float]:
    shown = tx.deliveries.page(states=("delivered",), sink=sink, limit=20 * EVENTS)
    return [(_moment(one.settled) - _moment(one.recorded)).total_seconds() for one in shown]


def _moment(text: str | None) -> datetime:
    return datetime.fromisoformat(text or "")


def _recorded(tx: Transaction) -> dict[str | None, float]:
    shown = tx.deliveries.page(states=("delivered",), limit=20 * EVENTS)
    return {one.event_id: _moment(one.recorded).timestamp() for one in shown}
