"""Measures one event, bursts and publishes: the relay, the bare outbox, and the raw limits."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time

import orjson

from bench.process import cpu_seconds, peak_memory
from bench.receiver import receiver
from bench.results import BARE, RAW, RELAY, Rounds, Section, percentile
from bench.run import Options
from bench.trial import SHOWN, SenderName, Trial, trial

SENDERS: tuple[SenderName, ...] = ("bare outbox", "relay")
SETTLE_SECONDS = 1.0
"""After the last arrival, the sender records what was delivered. That belongs to the CPU time."""
COLUMNS = (RELAY, BARE, RAW)


async def latency(options: Options) -> Section:
    """Time single events from the change of the document to their arrival."""
    rounds = Rounds()
    times: dict[str, list[float]] = {RELAY: [], BARE: []}
    for _ in options.rounds("one event"):
        for sender in SENDERS:
            async with trial(sender, 1) as one:
                milliseconds = await one_by_one(one, options.scaled(100))
            times[sender] += milliseconds
            rounds.add("p50", "ms", sender, percentile(milliseconds, 50), "≤ 2 ms, ≤ 2 × bare")
            rounds.add("p99", "ms", sender, percentile(milliseconds, 99), "≤ 3 ms")
    return Section(
        metric="latency",
        title="One event, told to received",
        columns=(RELAY, BARE),
        rows=rounds.rows(),
        series={name: [round(value, 3) for value in sorted(all_)] for name, all_ in times.items()},
        note=(
            f"Told: the document has changed, and a poll waits for that. It shows {SHOWN} other "
            "events. Received: the whole request has been read."
        ),
    )


async def one_by_one(one: Trial, count: int) -> list[float]:
    """Tell events one at a time. Return the milliseconds until each was received, in order."""
    await one.begin()
    told = []
    for number in range(count):
        await one.endpoint.poll_waits()
        told.append(one.tell(1, keep=SHOWN))
        await one.received(number + 1)
    arrivals = await one.receiver.arrivals()
    return [(moment - told[number]) / 1e6 for _, number, moment in sorted(arrivals["first"])]


async def burst(options: Options) -> Section:
    """Tell thousands of events with one document."""
    rounds = Rounds()
    for _ in options.rounds("bursts"):
        raw = await _raw_posts(options.scaled(5000))
        for endpoints, events in ((1, options.scaled(5000)), (10, options.scaled(1000))):
            label = f"{endpoints} endpoint{'s' * (endpoints > 1)}"
            goal = "≥ 0.6 × bare" if endpoints == 1 else "≥ 0.7 × bare"
            for sender in SENDERS:
                async with trial(sender, endpoints) as one:
                    await deliver_burst(one, events, rounds, label, sender, goal)
            rounds.add(f"{label}, deliveries", "/s", RAW, raw["per_second"], goal)
            cost_goal = "≤ 1.6 × bare" if endpoints == 1 else ""
            rounds.add(f"{label}, CPU per delivery", "ms", RAW, raw["cpu_ms"], cost_goal)
        for rows in (1, 200):
            speed = await _raw("commits", "", options.scaled(2000), rows)
            rounds.add(f"rows with fsync, {rows} in a commit", "/s", RAW, speed["per_second"])
    return Section(
        metric="burst",
        title="Bursts to webhooks",
        columns=COLUMNS,
        rows=rounds.rows(),
        note=(
            f"{options.scaled(5000):,} events to 1 endpoint, {options.scaled(1000):,} to 10, each "
            "time with one document. From the change of the document to the last arrival. The raw "
            "limit is a loop of 64 signed POSTs in flight, which stores nothing; its receiver is "
            "another process too. Recorded: until the last event of the document is on disk. The "
            "peak is that of the process since its start."
        ),
    )


async def deliver_burst(
    one: Trial, events: int, rounds: Rounds, label: str, column: str, goal: str = ""
) -> None:
    """Measure one burst."""
    await one.begin()
    position, cpu_before = one.last_position(), cpu_seconds(one.sender.pid)
    told_at = one.tell(events)
    await one.recorded(position + events)
    recorded_after = (time.monotonic_ns() - told_at) / 1e9
    await one.received(events)
    await asyncio.sleep(SETTLE_SECONDS)
    cpu = cpu_seconds(one.sender.pid) - cpu_before
    arrivals = await one.receiver.arrivals()
    if arrivals["forged"]:
        raise RuntimeError(f"{arrivals['forged']} requests had a wrong signature")
    deliveries = len(arrivals["first"])
    elapsed = (max(moment for *_, moment in arrivals["first"]) - told_at) / 1e9
    cost_goal = "≤ 1.6 × bare" if one.targets == 1 and goal else ""
    memory_goal = "≤ 90 MB" if goal else ""
    record_goal = "≤ 1.3 × bare" if one.targets == 1 and goal else ""
    rounds.add(f"{label}, deliveries", "/s", column, deliveries / elapsed, goal)
    rounds.add(f"{label}, CPU per delivery", "ms", column, cpu / deliveries * 1000, cost_goal)
    rounds.add(f"{label}, until recorded", "s", column, recorded_after, record_goal)
    rounds.add(f"{label}, peak memory", "MB", column, peak_memory(one.sender.pid), memory_goal)
    rounds.add(f"{label}, repeats", "", column, arrivals["repeats"])


async def publish(options: Options) -> Section:
    """Publish a burst to RabbitMQ; each message is persistent and confirmed."""
    rounds = Rounds()
    events = options.scaled(5000)
    for _ in options.rounds("publishes"):
        async with receiver(0, options.amqp_url):
            raw = await _raw("publishes", options.amqp_url, events)
        for sender in SENDERS:
            async with trial(sender, 0, amqp_url=options.amqp_url) as one:
                await deliver_burst(one, events, rounds, "RabbitMQ", sender, "≥ 0.7 × bare")
        rounds.add("RabbitMQ, deliveries", "/s", RAW, raw["per_second"], "≥ 0.7 × bare")
        rounds.add("RabbitMQ, CPU per delivery", "ms", RAW, raw["cpu_ms"], "≤ 1.6 × bare")
    return Section(
        metric="publish",
        title="Confirmed publishes to RabbitMQ",
        columns=COLUMNS,
        rows=rounds.rows(),
        note=(
            f"{events:,} events of one document, to a topic exchange with a quorum queue and a "
            "consumer. A delivery ends when the consumer has the message. The broker runs on the "
            "same machine, with one scheduler."
        ),
    )


async def _raw_posts(count: int) -> dict[str, float]:
    async with receiver(1) as target:
        return await _raw("posts", target.urls[0], count)


async def _raw(kind: str, place: str, *numbers: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bench.raw",
            kind,
            folder if kind == "commits" else place,
            *map(str, numbers),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        return dict(orjson.loads(output))
