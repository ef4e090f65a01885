"""``python -m bench [METRIC …]``: measures, prints a table, and with ``--write`` writes the page.

It needs Linux and RabbitMQ. ``make bench`` installs RabbitMQ first.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench import delivery
from bench.fleet import fleet
from bench.machine import machine, versions
from bench.results import Options, Section
from tests.rabbitmq import Broker

METRICS: dict[str, Callable[[Options], Awaitable[Section]]] = {
    "latency": delivery.latency,
    "burst": delivery.burst,
    "idle": delivery.idle,
    "fleet": fleet,
}
PAGE = Path(__file__).parent.parent / "docs" / "performance.md"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "metric",
        nargs="*",
        choices=[*METRICS, []],
        metavar="METRIC",
        help=f"one of {', '.join(METRICS)} (default: all)",
    )
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="rounds of each metric")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="a part of the usual number of events, such as 0.1"
    )
    parser.add_argument("--write", action="store_true", help="write docs/performance.md")
    chosen = parser.parse_args(arguments)
    if chosen.write and chosen.scale != 1:
        parser.error("expected a full run with --write, got --scale")
    made = f"{datetime.now(UTC):%Y-%m-%d}, {chosen.repeat} rounds, {machine()}; {versions()}."
    with tempfile.TemporaryDirectory() as directory, Broker(Path(directory)) as broker:
        names = chosen.metric or list(METRICS)
        if names != ["latency"]:  # which needs no broker
            broker.start()
        options = Options(
            repeats=chosen.repeat,
            broker=broker,
            scale=chosen.scale,
            advance=lambda name: print(f"measuring {name} …", file=sys.stderr, flush=True),
        )
        for name in names:
            section = asyncio.run(_run(name, options))
            print(section.markdown(made), end="\n\n", flush=True)
            if chosen.write:
                write(section, made)


async def _run(name: str, options: Options) -> Section:
    return await METRICS[name](options)


def write(section: Section, made: str, page: Path = PAGE) -> None:
    """Put a section in the place of the one with its title, or at the end of the page."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(rf"## {section.title}\n.*?(?=^## |\Z)", "", text, flags=re.DOTALL | re.MULTILINE)
    page.write_text(f"{text.rstrip()}\n\n{section.markdown(made)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
