"""``python -m bench [latency|idle|throughput …] [--json]``: needs Linux and RabbitMQ; ``make bench`` sees to both."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from bench import idle, latency, throughput
from bench.figures import Figure
from tests.rabbitmq import Broker

MEASURES: dict[str, Callable[[str], Awaitable[list[Figure]]]] = {
    "latency": latency.measure,
    "idle": idle.measure,
    "throughput": throughput.measure,
}


def main() -> None:
    """Measure what is named, or everything, one after the other."""
    named = [argument for argument in sys.argv[1:] if not argument.startswith("-")] or list(
        MEASURES
    )
    unknown = [name for name in named if name not in MEASURES]
    if unknown:
        sys.exit(f"expected some of {', '.join(MEASURES)}, got {', '.join(unknown)}")
    found: dict[str, list[Figure]] = {}
    with tempfile.TemporaryDirectory() as directory, Broker(Path(directory)) as broker:
        broker.start()
        for name in named:
            print(f"measuring {name} …", file=sys.stderr, flush=True)
            found[name] = asyncio.run(_measured(MEASURES[name], broker.amqp_url()))
    if "--json" in sys.argv:
        print(
            orjson.dumps(
                {name: [asdict(figure) for figure in figures] for name, figures in found.items()}
            ).decode()
        )
        return
    table = Table("what", "value", "aim")
    for figures in found.values():
        for figure in figures:
            table.add_row(figure.name, f"{figure.value:,.2f} {figure.unit}".rstrip(), figure.aim)
        table.add_section()
    Console().print(table)


async def _measured(
    measure: Callable[[str], Awaitable[list[Figure]]], amqp_url: str
) -> list[Figure]:
    return await measure(amqp_url)


if __name__ == "__main__":
    main()
