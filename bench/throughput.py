"""Events a second from recorded to settled, durable and in order, beside raw loops over the same wire in the same run.

A round is the raw loop, the relay, and the raw loop again, on equal terms: the same bytes under the same signature or key,
from the same session with the same options, as many connections and requests under way, to the same far side. Events are
made before the clock starts; what recording them costs is the relay's, what building a message costs both have to pay.
The endpoint runs in this process, so its share of the time is in both figures; the broker is a process of its own.

The CPU is that of this process, the thread that keeps the store included: it varies less than the rates do on a machine
with neighbours. On two free cores the rates are nearer to each other than the CPU, as the store's thread has one of its own. Beside
many others they say nothing: a process of two threads then gets more of the machine than the raw loop with its one.
Where the CPU goes, part by part: docs/decisions/0020-what-a-delivery-costs.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from aio_pika.abc import AbstractIncomingMessage

from bench import far, raw
from bench.figures import Figure, percentiles
from bench.relayed import relaying, until
from relay.events.cloudevent import CloudEvent
from tests.builders import cloudevent
from tests.journey.relay_process import SECRET

DELIVERIES = 4000
"""In each half of a round, over all endpoints."""
ROUNDS = 5
STEADY = 1500
"""Events at a steady pace, each way, to compare a healthy endpoint alone and beside a hung one."""
PACE = 0.005
"""Seconds between them."""


@dataclass(frozen=True, slots=True)
class Half:
    """What one half of a round took for each delivery, in seconds: by the clock on the wall, and of CPU."""

    wall: float
    cpu: float


async def measure(amqp_url: str) -> list[Figure]:
    """The relay's rate, the raw rate and their ratio, for webhooks and for RabbitMQ; and what a hung neighbour costs."""
    figures: list[Figure] = []
    async with far.endpoint() as url:
        for count in (1, 10):
            sections = [_webhook(url, f"w{number}") for number in range(count)]
            label = f"{count} endpoint{'s' * (count > 1)}"
            figures += await _compare(
                f"deliveries to {label}",
                sections,
                lambda events, count=count: raw.posts(url, events, count),  # type: ignore[misc]  # mypy cannot infer a lambda with a default
                nullcontext,
                aim="over 0.7",
                spans=f"recorded to delivered, {label}",
            )
        figures += await _isolation(url)
    bus = {"kind": "rabbitmq", "name": "bus", "url": amqp_url, "exchange": far.EXCHANGE}
    figures += await _compare(
        "publishes",
        [bus],
        lambda events: raw.publishes(amqp_url, events),
        lambda: far.queue(amqp_url),
        aim="over 0.8",
        spans="recorded to confirmed",
    )
    return figures + await _consumed(amqp_url, bus)


async def _compare(
    name: str,
    sections: list[dict[str, Any]],
    send_raw: Callable[[list[CloudEvent]], Awaitable[None]],
    place: Callable[[], AbstractAsyncContextManager[Any]],
    *,
    aim: str,
    spans: str,
) -> list[Figure]:
    """``place``: where each half of a round sends to, made afresh for it."""
    events = _events(DELIVERIES // len(sections))
    took: list[float] = []

    async def half(send: Callable[[list[CloudEvent]], Awaitable[None]]) -> Half:
        wall, cpu = time.perf_counter(), time.process_time()
        await send(events)
        return Half(
            (time.perf_counter() - wall) / DELIVERIES, (time.process_time() - cpu) / DELIVERIES
        )

    async def raw_half() -> Half:
        async with place():
            return await half(send_raw)

    rounds: list[tuple[Half, Half]] = []
    await raw_half()  # what is made once is made
    for _ in range(ROUNDS):
        before = await raw_half()
        async with place(), relaying(sections) as relay:
            relayed = await half(relay.carry)
            took += await relay.spans()
        after = await raw_half()
        rounds.append((Half((before.wall + after.wall) / 2, (before.cpu + after.cpu) / 2), relayed))
    return [
        Figure(f"{name}, durable", median(1 / relayed.wall for _, relayed in rounds), "/s"),
        Figure(f"{name}, raw loop", median(1 / plain.wall for plain, _ in rounds), "/s"),
        Figure(
            f"{name}, ratio",
            median(plain.wall / relayed.wall for plain, relayed in rounds),
            "",
            aim,
        ),
        Figure(f"{name}, CPU", median(relayed.cpu for _, relayed in rounds) * 1e6, "µs each"),
        Figure(
            f"{name}, CPU of the raw loop",
            median(plain.cpu for plain, _ in rounds) * 1e6,
            "µs each",
        ),
        Figure(
            f"{name}, ratio of CPU",
            median(plain.cpu / relayed.cpu for plain, relayed in rounds),
            "",
        ),
        *percentiles(spans, took),
    ]


async def _consumed(amqp_url: str, bus: dict[str, Any]) -> list[Figure]:
    """Once more, with somebody who reads the queue."""
    arrived: dict[str | None, float] = {}

    async def note(message: AbstractIncomingMessage) -> None:
        arrived.setdefault(message.correlation_id, time.time())

    async with far.queue(amqp_url) as queue, relaying([bus]) as relay:
        await queue.consume(note, no_ack=True)
        await relay.carry(_events(DELIVERIES))
        await until(lambda: len(arrived) == DELIVERIES)
        recorded = await relay.recorded()
    return percentiles(
        "recorded to consumed",
        [arrived[event_id] - moment for event_id, moment in recorded.items()],
    )


async def _isolation(url: str) -> list[Figure]:
    """A healthy endpoint's p99 beside one that hangs over that alone.

    Two relays take turns, event by event, so that both meet the same noise. The hung endpoint's requests time out meanwhile.
    """
    async with far.hung_endpoint() as hung_url:
        healthy, hung = _webhook(url, "healthy"), {**_webhook(hung_url, "hung"), "timeout": "2s"}
        async with relaying([healthy]) as alone, relaying([healthy, hung]) as beside:
            for event in _events(STEADY):
                for relay in (alone, beside):
                    await relay.record([event])
                    await asyncio.sleep(PACE)
            for relay in (alone, beside):
                await relay.delivered("healthy")
            p99 = [
                quantiles(await relay.spans("healthy"), n=100, method="inclusive")[98]
                for relay in (alone, beside)
            ]
    return [
        Figure("recorded to delivered, alone, p99", p99[0] * 1000, "ms"),
        Figure("recorded to delivered, beside a hung endpoint, p99", p99[1] * 1000, "ms"),
        Figure("isolation, ratio", p99[1] / p99[0], "", "under 1.2"),
    ]


def _events(count: int) -> list[CloudEvent]:
    return [cloudevent(subject=f"EVENT-{number}") for number in range(count)]


def _webhook(url: str, name: str) -> dict[str, Any]:
    return {"kind": "webhook", "name": name, "url": url, "allow_http": True, "secrets": [SECRET]}
