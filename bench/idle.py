"""Measures the CPU time and the memory of a relay that polls and has nothing to tell."""

from __future__ import annotations

import asyncio
import time

from bench.process import cpu_seconds, resident_memory
from bench.results import RELAY, Rounds, Section
from bench.run import Options
from bench.trial import trial

REST = 3.0
"""Seconds between the last event and the measurement."""
DURATION = 10.0


async def idle(options: Options) -> Section:
    """Poll once a second, as by default, with one sink."""
    rounds = Rounds()
    for _ in options.rounds("idle"):
        for label, endpoints, amqp_url in (("webhook", 1, None), ("RabbitMQ", 0, options.amqp_url)):
            async with trial("relay", endpoints, amqp_url=amqp_url, interval="1s") as one:
                one.endpoint.holds = False
                await asyncio.sleep(options.scale * REST)
                pid = one.sender.pid
                cpu_before, began = cpu_seconds(pid), time.monotonic()
                await asyncio.sleep(options.scale * DURATION)
                share = (cpu_seconds(pid) - cpu_before) / (time.monotonic() - began)
                resident, proportional = resident_memory(pid)
            rounds.add(f"{label}, CPU", "% of a core", RELAY, share * 100, "≤ 0.2 %")
            rounds.add(f"{label}, resident memory", "MB", RELAY, resident, "≤ 64 MB")
            rounds.add(f"{label}, its share of it (PSS)", "MB", RELAY, proportional)
    return Section(
        metric="idle",
        title="Idle",
        columns=(RELAY,),
        ratio=None,
        rows=rounds.rows(),
        note="One sink, a poll a second, no events. It has delivered 20 events before.",
    )
