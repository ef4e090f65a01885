"""``python -m bench [latency|idle|throughput|flood …] [--json]``: needs Linux and RabbitMQ.

``make bench`` installs RabbitMQ first.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from bench import flood, idle, latency, throughput
from bench.figure import Figure
from tests.rabbitmq import Broker

MEASUREMENTS: dict[str, Callable[[str], Awaitable[list[Figure]]]] = {
    "latency": latency.measure,
    "idle": idle.measure,
    "throughput": throughput.measure,
    "flood": flood.measure,
}


def main() -> None:
    """Run the named measurements, or all, one after the other."""
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    names = arguments or list(MEASUREMENTS)
    unknown = [name for name in names if name not in MEASUREMENTS]
    if unknown:
        sys.exit(f"expected some of {', '.join(MEASUREMENTS)}, got {', '.join(unknown)}")
    figures: dict[str, list[Figure]] = {}
    with tempfile.TemporaryDirectory() as directory, Broker(Path(directory)) as broker:
        broker.start()
        for name in names:
            print(f"measuring {name} …", file=sys.stderr, flush=True)
            figures[name] = asyncio.run(_measure(MEASUREMENTS[name], broker.amqp_url()))
    if "--json" in sys.argv:
        print(orjson.dumps(figures).decode())
        return
    table = Table("what", "value", "aim")
    for section in figures.values():
        for figure in section:
            table.add_row(figure.name, f"{figure.value:,.2f} {figure.unit}".rstrip(), figure.aim)
        table.add_section()
    Console().print(table)


async def _measure(
    measure: Callable[[str], Awaitable[list[Figure]]], amqp_url: str
) -> list[Figure]:
    return await measure(amqp_url)


if __name__ == "__main__":
    main()
