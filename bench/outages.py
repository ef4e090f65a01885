"""Measures what a hanging endpoint costs the others, and what a kill loses and repeats."""

from __future__ import annotations

import asyncio
from typing import cast

from bench.results import RELAY, Rounds, Section, percentile
from bench.run import Options
from bench.trial import RelaySender, Trial, trial

ENDPOINTS = 10
EVENTS_PER_POLL = 10
HANG = 10.0
"""Seconds until the hanging endpoint answers. The relay's timeout is longer."""
ALL_ANSWER, ONE_HANGS = "all answer", "one hangs"
LOSS_TIMEOUT = 60.0
"""Seconds after the restart in which everything must arrive."""
REPEATS_WAIT = 2.0
"""Seconds in which further repeats may arrive."""


async def isolation(options: Options) -> Section:
    """Compare nine endpoints while the tenth hangs with the same nine before."""
    rounds = Rounds()
    for _ in options.rounds("isolation"):
        async with trial("relay", ENDPOINTS) as one:
            for column in (ALL_ANSWER, ONE_HANGS):
                await one.receiver.delay(0, HANG if column == ONE_HANGS else 0.0)
                milliseconds = await _times_of_nine(one, options.scaled(16))
                rounds.add("p50", "ms", column, percentile(milliseconds, 50))
                rounds.add("p99", "ms", column, percentile(milliseconds, 99))
    return Section(
        metric="isolation",
        title="Nine endpoints while a tenth hangs",
        columns=(ALL_ANSWER, ONE_HANGS),
        ratio=(ONE_HANGS, ALL_ANSWER),
        rows=rounds.rows(),
        note=(
            f"Told to received, of the nine. Each document brings {EVENTS_PER_POLL} events to each "
            f"of {ENDPOINTS} endpoints; the hanging one answers after {HANG:g} s."
        ),
    )


async def _times_of_nine(one: Trial, polls: int) -> list[float]:
    await one.begin()
    told = []
    for number in range(1, polls + 1):
        await one.endpoint.poll_waits()
        told.append(one.tell(EVENTS_PER_POLL, keep=EVENTS_PER_POLL))
        await one.received(number * EVENTS_PER_POLL, ignored=0)
    arrivals = await one.receiver.arrivals()
    times = [
        (moment - told[event // EVENTS_PER_POLL]) / 1e6
        for endpoint, event, moment in arrivals["first"]
        if endpoint != 0
    ]
    await one.clear()
    return times


async def crash(options: Options) -> Section:
    """Kill the relay while it delivers a burst, start it again, and count."""
    rounds = Rounds()
    events = options.scaled(2000)
    for _ in options.rounds("kill -9"):
        for label, endpoints, amqp_url in (("webhook", 1, None), ("RabbitMQ", 0, options.amqp_url)):
            async with trial("relay", endpoints, amqp_url=amqp_url) as one:
                process = cast("RelaySender", one.sender).process
                await one.begin()
                one.tell(events)
                await one.receiver.wait(max(1, events * 3 // 10), LOSS_TIMEOUT)
                await process.kill()
                one.endpoint.forget_reader()
                await process.start()
                await one.receiver.wait(events, LOSS_TIMEOUT)
                await asyncio.sleep(REPEATS_WAIT)
                arrivals = await one.receiver.arrivals()
            lost = events - len(arrivals["first"])
            rounds.add(f"{label}, lost of {events:,}", "", RELAY, lost, "0")
            rounds.add(f"{label}, repeated", "", RELAY, arrivals["repeats"], "≤ 64")
    return Section(
        metric="crash",
        title="kill -9 in the middle of a burst",
        columns=(RELAY,),
        ratio=None,
        rows=rounds.rows(),
        note="Killed once 30 % have arrived, then started again on the same state file.",
    )
