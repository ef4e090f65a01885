"""``python -m bench [METRIC …]``: measures, prints a table, and with ``--write`` writes the page.

It needs Linux and RabbitMQ. ``make bench`` installs RabbitMQ first. Without a metric it measures
all but those of growth and of a fleet; ``growth`` and ``fleet`` stand for these, ``all`` for
everything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import delivery, fleet, flood, growth, idle, outages, report
from bench.machine import machine, versions
from bench.results import Measured, Section, as_json
from bench.run import Options
from tests.rabbitmq import Broker

Measure = Callable[[Options], Awaitable[Section]]
METRICS: dict[str, Measure] = {
    "latency": delivery.latency,
    "burst": delivery.burst,
    "publish": delivery.publish,
    "isolation": outages.isolation,
    "crash": outages.crash,
    "idle": idle.idle,
    "flood": flood.flood,
}
GROWTH: dict[str, Measure] = {
    "documents": growth.documents,
    "sinks": growth.sinks,
    "backlog": growth.backlog,
    "journal": growth.journal,
}
FLEET: dict[str, Measure] = {
    "fleet-rate": fleet.hub_rate,
    "fleet-pulses": fleet.pulse_cost,
    "fleet-wave": fleet.wave,
    "fleet-idle": fleet.agent_idle,
}
GROUPS = {"growth": GROWTH, "fleet": FLEET, "all": {**METRICS, **GROWTH, **FLEET}}
ROUNDS = {"flood": 1, **dict.fromkeys(GROWTH, 1)}
"""Rounds of those that take long."""
PIPE_WIDTH = 140
"""Characters in a line where no terminal sets a width."""
NEED_BROKER = frozenset({"publish", "crash", "idle", *FLEET})


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and show or write the results."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.write and chosen.scale != 1:
        parser.error("expected a full run with --write, got --scale")
    measures = _chosen(chosen.metric)
    results: dict[str, Measured] = {}
    rounds = {name: chosen.repeat or ROUNDS.get(name, 3) for name in measures}
    console = Console(stderr=chosen.json)
    if not console.is_terminal:
        console = Console(stderr=chosen.json, width=PIPE_WIDTH)
    with _broker(needed=bool(NEED_BROKER & measures.keys())) as broker:
        date, on, with_versions = f"{datetime.now(UTC):%Y-%m-%d}", machine(), versions()
        with _progress(sum(rounds.values())) as advance:
            for name, measure in measures.items():
                options = Options(
                    repeats=rounds[name],
                    amqp_url=broker.amqp_url() if broker is not None else "",
                    broker=broker,
                    scale=chosen.scale,
                    advance=advance,
                )
                section = asyncio.run(_run(measure, options))
                results[name] = Measured(
                    section=section,
                    date=date,
                    machine=on,
                    versions=with_versions,
                    rounds=rounds[name],
                )
    if chosen.json:
        print(orjson.dumps(as_json(results), option=orjson.OPT_INDENT_2).decode())
    else:
        console.print(f"{on}; {with_versions}")
        for measured in results.values():
            report.print_table(measured.section, console)
    if chosen.write:
        report.store(results)
        subprocess.run([sys.executable, "-m", "docs.generate"], check=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "metric",
        nargs="*",
        choices=[*GROUPS["all"], *GROUPS, []],
        metavar="METRIC",
        help=f"one of {', '.join([*GROUPS['all'], *GROUPS])}",
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument("--repeat", type=int, metavar="N", help="rounds of each metric")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="a part of the usual number of events, such as 0.1"
    )
    parser.add_argument(
        "--write", action="store_true", help="store the results and write docs/performance.md"
    )
    return parser


def _chosen(names: Sequence[str]) -> dict[str, Measure]:
    every = GROUPS["all"]
    chosen: dict[str, Measure] = {}
    for name in names:
        chosen.update(GROUPS.get(name) or {name: every[name]})
    return {name: every[name] for name in every if name in (chosen or METRICS)}


async def _run(measure: Measure, options: Options) -> Section:
    return await measure(options)


@contextlib.contextmanager
def _broker(*, needed: bool) -> Iterator[Broker | None]:
    """Yield a private RabbitMQ, if one is needed."""
    if not needed:
        yield None
        return
    with tempfile.TemporaryDirectory() as directory, Broker(Path(directory)) as broker:
        broker.start()
        yield broker


@contextlib.contextmanager
def _progress(rounds: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on a terminal. It is drawn between rounds only, because drawing costs CPU time."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=rounds)
        begun = 0

        def advance(name: str) -> None:
            nonlocal begun
            bar.update(task, description=name, completed=begun, refresh=True)
            begun += 1
            if not console.is_terminal:
                print(f"measuring {name} …", file=sys.stderr, flush=True)

        yield advance


if __name__ == "__main__":
    main()
