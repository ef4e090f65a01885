"""Measures single events, bursts and rest: the relay beside the bare outbox."""

from __future__ import annotations

import asyncio
import time

from bench.machine import cpu_seconds, peak_memory, resident_memory
from bench.results import BARE, RELAY, Options, Section, percentile
from bench.trial import SHOWN, SenderName, Trial, trial

SENDERS: tuple[SenderName, ...] = ("bare outbox", "relay")
SETTLE_SECONDS = 1.0
"""After the last arrival, the sender records what was delivered. That belongs to the CPU time."""
REST, IDLE_SECONDS = 3.0, 10.0
"""Seconds between the last event and the measurement of an idle relay, and those measured."""


async def latency(options: Options) -> Section:
    """Time single events from the change of the document to their arrival."""
    section = Section(
        "One event, told to received",
        (RELAY, BARE),
        f"Told: the document has changed, and a poll waits for that. It shows {SHOWN} other "
        "events. Received: the whole request has been read.",
    )
    for _ in options.rounds("one event"):
        for sender in SENDERS:
            async with trial(sender, 1) as one:
                milliseconds = await _one_by_one(one, options.scaled(100))
            section.add("p50, ms", sender, percentile(milliseconds, 50))
            section.add("p99, ms", sender, percentile(milliseconds, 99))
    return section


async def _one_by_one(one: Trial, count: int) -> list[float]:
    """Tell events one at a time. Return the milliseconds until each was received, in order."""
    await one.begin()
    told = []
    for number in range(count):
        await one.endpoint.poll_waits()
        told.append(one.tell(1, keep=SHOWN))
        await one.received(number + 1)
    arrivals = await one.receiver.call("arrivals")
    return [(moment - told[number]) / 1e6 for _, number, moment in sorted(arrivals["first"])]


async def burst(options: Options) -> Section:
    """Tell thousands of events with one document, to webhooks and to RabbitMQ."""
    places = {"1 endpoint": (1, 5000), "10 endpoints": (10, 1000), "RabbitMQ": (0, 5000)}
    section = Section(
        "Bursts",
        (RELAY, BARE),
        "5,000 events to 1 endpoint, 1,000 to 10, 5,000 confirmed by RabbitMQ, each time with one "
        "document. From the change of the document to the last arrival; a message has arrived "
        "when a consumer of a quorum queue has it. The peak is that of the process since its "
        "start. The broker runs on the same machine, with one scheduler.",
    )
    for _ in options.rounds("bursts"):
        for label, (endpoints, events) in places.items():
            for sender in SENDERS:
                amqp_url = None if endpoints else options.broker.amqp_url()
                async with trial(sender, endpoints, amqp_url=amqp_url) as one:
                    await deliver_burst(one, options.scaled(events), section, f"{label}, ")
    return section


async def deliver_burst(one: Trial, events: int, section: Section, label: str) -> None:
    await one.begin()
    cpu_before = cpu_seconds(one.sender.pid)
    told_at = one.tell(events)
    await one.received(events)
    await asyncio.sleep(SETTLE_SECONDS)
    cpu = cpu_seconds(one.sender.pid) - cpu_before
    arrivals = await one.receiver.call("arrivals")
    deliveries = len(arrivals["first"])
    elapsed = (max(moment for *_, moment in arrivals["first"]) - told_at) / 1e9
    section.add(f"{label}deliveries, /s", one.sender.name, deliveries / elapsed)
    section.add(f"{label}CPU per delivery, ms", one.sender.name, cpu / deliveries * 1000)
    section.add(f"{label}peak memory, MB", one.sender.name, peak_memory(one.sender.pid))
    section.add(f"{label}repeats", one.sender.name, arrivals["repeats"])


async def idle(options: Options) -> Section:
    """Poll once a second, as by default, with one sink."""
    section = Section(
        "Idle",
        (RELAY, BARE),
        "One sink, no events, after 20 that were delivered. Both poll once a second. PSS is the "
        "share of the resident memory that no other process uses.",
    )
    for _ in options.rounds("idle"):
        for label, endpoints in (("webhook", 1), ("RabbitMQ", 0)):
            for sender in SENDERS:
                amqp_url = None if endpoints else options.broker.amqp_url()
                async with trial(sender, endpoints, amqp_url=amqp_url, interval="1s") as one:
                    one.endpoint.answers_after = 1.0 if sender == BARE else 0.0
                    one.endpoint.tell([])
                    await asyncio.sleep(options.scale * REST)
                    cpu_before, began = cpu_seconds(one.sender.pid), time.monotonic()
                    await asyncio.sleep(options.scale * IDLE_SECONDS)
                    share = cpu_seconds(one.sender.pid) - cpu_before
                    percent = 100 * share / (time.monotonic() - began)
                    resident, proportional = resident_memory(one.sender.pid)
                section.add(f"{label}, CPU, % of a core", sender, percent)
                section.add(f"{label}, resident memory, MB", sender, resident)
                section.add(f"{label}, PSS, MB", sender, proportional)
    return section
