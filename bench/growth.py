"""Measures whether the relay's cost stays flat while documents, sinks, backlog or journal grow.

The ratio compares the last column with the first: 1 is flat.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.outbox import fill_backlog, fill_journal
from bench.process import cpu_seconds, peak_memory
from bench.results import Rounds, Row, Section, percentile
from bench.run import Options
from bench.trial import Trial, next_run, trial

DOCUMENTS = (10, 100, 1000, 10_000)
SINKS = (1, 10, 100)
BACKLOGS = (1000, 100_000)
JOURNALS = (0, 1_000_000)
CHANGES = 12
SETTLE_SECONDS = 1.0
FLAT = "≤ 1.2"


async def documents(options: Options) -> Section:
    """Change one event of a document of each size."""
    rounds = Rounds()
    sizes = options.scaled_all(DOCUMENTS)
    for _ in options.rounds("size of the document"):
        for size in sizes:
            async with trial("relay", 1) as one:
                changes = options.scaled(CHANGES)
                await _add_changes(one, size, changes, f"{size:,} events", rounds)
    return _section(
        "documents",
        "Growth: events in a document",
        [f"{size:,} events" for size in sizes],
        rounds.rows(),
        "Each change adds one event and ends one, and the document stays as large. Azure gives no "
        "differences: each document is read as a whole.",
    )


async def _add_changes(one: Trial, size: int, changes: int, column: str, rounds: Rounds) -> None:
    await one.begin()
    one.tell(size)
    await one.received(size)
    await asyncio.sleep(SETTLE_SECONDS)
    await one.endpoint.poll_waits()
    told = []
    cpu_before = cpu_seconds(one.sender.pid)
    for number in range(size, size + changes):
        await one.endpoint.poll_waits()
        told.append(one.tell(1, keep=size - 1))
        await one.received(number + 1)
    cpu = cpu_seconds(one.sender.pid) - cpu_before
    arrivals = {number: moment for _, number, moment in (await one.receiver.arrivals())["first"]}
    times = [(arrivals[size + index] - moment) / 1e6 for index, moment in enumerate(told)]
    rounds.add("told to received, p50", "ms", column, percentile(times, 50), FLAT)
    rounds.add("CPU per change", "ms", column, cpu / changes * 1000, FLAT)
    rounds.add("peak memory", "MB", column, peak_memory(one.sender.pid))


async def sinks(options: Options) -> Section:
    """Deliver as many times over more sinks, each event to all of them."""
    rounds = Rounds()
    deliveries, counts = options.scaled(4000), options.scaled_all(SINKS)
    for _ in options.rounds("number of sinks"):
        for count in counts:
            async with trial("relay", count) as one:
                await one.begin()
                cpu_before = cpu_seconds(one.sender.pid)
                told_at = one.tell(max(1, deliveries // count))
                await one.received(max(1, deliveries // count))
                await asyncio.sleep(SETTLE_SECONDS)
                cpu = cpu_seconds(one.sender.pid) - cpu_before
                arrivals = (await one.receiver.arrivals())["first"]
            elapsed = (max(moment for *_, moment in arrivals) - told_at) / 1e9
            column = f"{count} sink{'s' * (count > 1)}"
            rounds.add("CPU per delivery", "ms", column, cpu / len(arrivals) * 1000, FLAT)
            rounds.add("time per delivery", "ms", column, elapsed / len(arrivals) * 1000, FLAT)
    return _section(
        "sinks",
        "Growth: number of sinks",
        [f"{count} sink{'s' * (count > 1)}" for count in counts],
        rounds.rows(),
        f"{deliveries:,} deliveries in all: with more sinks there are fewer events.",
    )


async def backlog(options: Options) -> Section:
    """Start with entries that wait."""
    rounds = Rounds()
    sizes = options.scaled_all(BACKLOGS)
    for _ in options.rounds("backlog at the start"):
        for size in sizes:
            with tempfile.TemporaryDirectory() as folder:
                run = next_run()
                await fill_backlog(Path(folder, "relay.db"), run, size, "hook-0")
                async with trial("relay", 1, folder=Path(folder), backlog_of=run) as one:
                    await one.received(size)
                    await asyncio.sleep(SETTLE_SECONDS)
                    cpu = cpu_seconds(one.sender.pid)
                    arrivals = (await one.receiver.arrivals())["first"]
                    peak = peak_memory(one.sender.pid)
            moments = sorted(moment for *_, moment in arrivals)
            spread = (moments[-1] - moments[0]) / 1e6 / max(1, len(moments) - 1)
            column = f"{size:,} entries"
            rounds.add("start until ready", "s", column, one.started_after, "≤ 3 s")
            rounds.add("time per delivery", "ms", column, spread, FLAT)
            rounds.add("CPU per delivery, with the start", "ms", column, cpu / size * 1000)
            rounds.add("peak memory", "MB", column, peak)
    return _section(
        "backlog",
        "Growth: entries that wait at the start",
        [f"{size:,} entries" for size in sizes],
        rounds.rows(),
        "The relay is ready when /readyz answers 200. It delivers from the start on.",
    )


async def journal(options: Options) -> Section:
    """Compare an empty journal with one of a million rows."""
    rounds = Rounds()
    sizes = [options.scaled(size) if size else 0 for size in JOURNALS]
    for _ in options.rounds("length of the journal"):
        for size in sizes:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "relay.db")
                if size:
                    await fill_journal(file, size)
                column = f"{size:,} rows"
                async with trial("relay", 1, folder=Path(folder)) as one:
                    await _add_changes(one, 10, options.scaled(CHANGES), column, rounds)
                    await one.clear()
                    await _add_burst(one, options.scaled(3000), column, rounds)
                    began = time.monotonic()
                rounds.add("stop", "s", column, time.monotonic() - began)
                rounds.add("start until ready", "s", column, one.started_after, "≤ 3 s")
    return _section(
        "journal",
        "Growth: rows of the journal",
        [f"{size:,} rows" for size in sizes],
        rounds.rows(),
        "The rows are about events that have ended.",
    )


async def _add_burst(one: Trial, events: int, column: str, rounds: Rounds) -> None:
    await one.begin()
    cpu_before = cpu_seconds(one.sender.pid)
    told_at = one.tell(events)
    await one.received(events)
    await asyncio.sleep(SETTLE_SECONDS)
    cpu = cpu_seconds(one.sender.pid) - cpu_before
    last = max(moment for *_, moment in (await one.receiver.arrivals())["first"])
    rounds.add("time per delivery of a burst", "ms", column, (last - told_at) / 1e6 / events, FLAT)
    rounds.add("CPU per delivery of a burst", "ms", column, cpu / events * 1000, FLAT)


def _section(
    metric: str, title: str, columns: Sequence[str], rows: Sequence[Row], note: str
) -> Section:
    return Section(
        metric=metric,
        title=title,
        columns=columns,
        ratio=(columns[-1], columns[0]),
        rows=rows,
        note=note,
    )
