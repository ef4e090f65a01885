"""``python -m chaos``: lets the world fail, judges, and with ``--write`` writes docs/proof.md."""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.machine import machine, versions
from chaos import report
from chaos.faults import Fault, Place, all_faults
from chaos.judge import Counts
from tests.rabbitmq import Broker

FAILED = 1
PIPE_WIDTH = 160
ROUNDS_PER_LINE = 10
"""Where there is no terminal for a progress bar, a line says how far the rounds are."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen faults. Return 0 if nothing was lost, unexpected or started without votes."""
    faults = all_faults()
    chosen = _parser(faults).parse_args(arguments)
    names = chosen.only or [*faults]
    rounds = {name: chosen.rounds or getattr(faults[name], chosen.tier) for name in names}
    results: dict[str, report.Proof] = {}
    stamp = report.Stamp(
        date=f"{datetime.now(UTC):%Y-%m-%d}", machine=machine(), versions=versions()
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        Broker(Path(directory)) as broker,
        _progress(sum(rounds.values())) as advance,
    ):
        broker.start()
        for name in names:
            missing = faults[name].missing()
            if missing is not None:
                print(f"{name}: left out, this machine lacks {missing}", file=sys.stderr)
                continue
            counts = _run(faults[name], rounds[name], chosen.seed, broker, advance)
            results[name] = report.Proof(text=faults[name].text, counts=counts, stamp=stamp)
    if chosen.json:
        print(orjson.dumps(asdict(report.Report(results)), option=orjson.OPT_INDENT_2).decode())
    else:
        console = Console()
        report.print_table(results, console if console.is_terminal else Console(width=PIPE_WIDTH))
    if chosen.write:
        report.store(results)
        subprocess.run([sys.executable, "-m", "docs.generate"], check=True)
    return FAILED if any(proof.counts.has_failed for proof in results.values()) else 0


def _run(
    fault: Fault, rounds: int, seed: int, broker: Broker, advance: Callable[[str], None]
) -> Counts:
    """Run all rounds of a fault, in trials of some rounds."""
    counts = Counts()
    for first in range(0, rounds, fault.rounds_of_a_trial):
        number = min(fault.rounds_of_a_trial, rounds - first)
        again = f"make chaos ARGS='--only {fault.name} --rounds {number} --seed {seed + first}'"
        with tempfile.TemporaryDirectory() as folder:
            place = Place(
                folder=Path(folder),
                broker=broker,
                chance=random.Random(f"{fault.name}-{seed + first}"),  # noqa: S311  # no secret
                advance=lambda: advance(fault.name),
            )
            try:
                done = asyncio.run(_await(fault.run(place, number)))
            except Exception:  # noqa: BLE001  # one trial must not end the others
                done = Counts(rounds=number, problems=[traceback.format_exc()])
        done.problems = [f"{again}: {problem}" for problem in done.problems]
        counts.add(done)
    return counts


async def _await(counts: Awaitable[Counts]) -> Counts:
    return await counts


def _parser(faults: Mapping[str, Fault]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument(
        "--tier", choices=["quick", "full"], default="quick", help="quick takes under ten minutes"
    )
    parser.add_argument(
        "--only", action="append", choices=[*faults], metavar="FAULT", help=", ".join(faults)
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of each fault")
    parser.add_argument("--seed", type=int, default=0, help="what a failed round names")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument("--write", action="store_true", help="store the results in docs/proof.md")
    return parser


@contextmanager
def _progress(rounds: int) -> Iterator[Callable[[str], None]]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=rounds)
        begun: Counter[str] = Counter()

        def advance(name: str) -> None:
            begun[name] += 1
            bar.update(task, description=name, advance=1)
            if not console.is_terminal and begun[name] % ROUNDS_PER_LINE == 1:
                print(f"{name}: round {begun[name]} …", file=sys.stderr, flush=True)

        yield advance


if __name__ == "__main__":
    sys.exit(main())
