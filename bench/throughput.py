"""Measures deliveries per second of the relay, durable and in order, beside raw loops.

A round is the raw loop, the relay, and the raw loop again, on equal terms: the same bytes with the
same signatures, the same client options, as many open connections and requests, and the same
receiver. Events are made before the clock starts. The relay's time includes recording them, and
both sides pay for building each message. The HTTP endpoint runs in this process, so both figures
include it; the broker is a process of its own.

The CPU time is that of this process with the store's thread. It varies less than the rates on a
busy machine. On two free cores the ratio of the rates is better than that of the CPU times, because
the store's thread has its own core. On a busy machine the rates say nothing: a process of two
threads gets more of the machine than the raw loop with one. For the parts of the CPU time see
docs/decisions/0020-what-a-delivery-costs.md.
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

from bench import raw_loops, receivers
from bench.figure import Figure, percentiles
from bench.outbox import open_outbox, until
from relay.events.cloudevent import CloudEvent
from tests.builders import cloudevent
from tests.journey.relay_process import SECRET

DELIVERIES = 4000
"""Deliveries in each half of a round, to all endpoints together."""
ROUNDS = 5
ISOLATION_EVENTS = 1500
"""Events that compare a healthy endpoint alone and beside a hung one."""
ISOLATION_INTERVAL = 0.005
"""Seconds between these events."""


@dataclass(frozen=True, slots=True)
class Half:
    """Seconds for each delivery of half a round: elapsed time and CPU time."""

    wall: float
    cpu: float


async def measure(amqp_url: str) -> list[Figure]:
    """Measure the relay's rate, the raw rate and their ratio, and the cost of a hung neighbor."""
    figures: list[Figure] = []
    async with receivers.endpoint() as url:
        for count in (1, 10):
            sections = [webhook(url, f"w{number}") for number in range(count)]
            label = f"{count} endpoint{'s' * (count > 1)}"
            figures += await _compare(
                f"deliveries to {label}",
                sections,
                lambda events, count=count: raw_loops.post_all(url, events, count),  # type: ignore[misc]  # mypy cannot infer a lambda with a default
                nullcontext,
                aim="over 0.7",
                delivery_times=f"recorded to delivered, {label}",
            )
        figures += await _isolation(url)
    bus = {"kind": "rabbitmq", "name": "bus", "url": amqp_url, "exchange": receivers.EXCHANGE}
    figures += await _compare(
        "publishes",
        [bus],
        lambda events: raw_loops.publish_all(amqp_url, events),
        lambda: receivers.bound_queue(amqp_url),
        aim="over 0.8",
        delivery_times="recorded to confirmed",
    )
    return figures + await _consumed(amqp_url, bus)


async def _compare(
    name: str,
    sections: list[dict[str, Any]],
    send_raw: Callable[[list[CloudEvent]], Awaitable[None]],
    receiver: Callable[[], AbstractAsyncContextManager[Any]],
    *,
    aim: str,
    delivery_times: str,
) -> list[Figure]:
    """Compare the relay with a raw loop. ``receiver`` makes a new receiver for each half."""
    events = _events(DELIVERIES // len(sections))
    seconds: list[float] = []

    async def time_half(send: Callable[[list[CloudEvent]], Awaitable[None]]) -> Half:
        wall, cpu = time.perf_counter(), time.process_time()
        await send(events)
        return Half(
            (time.perf_counter() - wall) / DELIVERIES, (time.process_time() - cpu) / DELIVERIES
        )

    async def raw_half() -> Half:
        async with receiver():
            return await time_half(send_raw)

    rounds: list[tuple[Half, Half]] = []
    await raw_half()  # warms up
    for _ in range(ROUNDS):
        before = await raw_half()
        async with receiver(), open_outbox(sections) as outbox:
            relayed = await time_half(outbox.send_all)
            seconds += await outbox.delivery_times()
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
        *percentiles(delivery_times, seconds),
    ]


async def _consumed(amqp_url: str, bus: dict[str, Any]) -> list[Figure]:
    """Measure again with a consumer of the queue."""
    received_at: dict[str | None, float] = {}

    async def note(message: AbstractIncomingMessage) -> None:
        received_at.setdefault(message.correlation_id, time.time())

    async with receivers.bound_queue(amqp_url) as queue, open_outbox([bus]) as outbox:
        await queue.consume(note, no_ack=True)
        await outbox.send_all(_events(DELIVERIES))
        await until(lambda: len(received_at) == DELIVERIES)
        recorded_at = await outbox.recorded_at()
    return percentiles(
        "recorded to consumed",
        [received_at[event_id] - moment for event_id, moment in recorded_at.items()],
    )


async def _isolation(url: str) -> list[Figure]:
    """Compare the p99 of a healthy endpoint beside a hung one with its p99 alone.

    Two relays take turns, event by event, so that both meet the same noise. The requests to the
    hung endpoint time out meanwhile.
    """
    async with receivers.hung_endpoint() as hung_url:
        healthy, hung = webhook(url, "healthy"), {**webhook(hung_url, "hung"), "timeout": "2s"}
        async with open_outbox([healthy]) as alone, open_outbox([healthy, hung]) as beside:
            for event in _events(ISOLATION_EVENTS):
                for outbox in (alone, beside):
                    await outbox.record([event])
                    await asyncio.sleep(ISOLATION_INTERVAL)
            for outbox in (alone, beside):
                await outbox.wait_until_delivered("healthy")
            p99 = [
                quantiles(await outbox.delivery_times("healthy"), n=100, method="inclusive")[98]
                for outbox in (alone, beside)
            ]
    return [
        Figure("recorded to delivered, alone, p99", p99[0] * 1000, "ms"),
        Figure("recorded to delivered, beside a hung endpoint, p99", p99[1] * 1000, "ms"),
        Figure("isolation, ratio", p99[1] / p99[0], "", "under 1.2"),
    ]


def _events(count: int) -> list[CloudEvent]:
    return [cloudevent(subject=f"EVENT-{number}") for number in range(count)]


def webhook(url: str, name: str) -> dict[str, Any]:
    """Return the section of a webhook."""
    return {"kind": "webhook", "name": name, "url": url, "allow_http": True, "secrets": [SECRET]}
