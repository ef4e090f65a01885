"""``python -m chaos``: lets the world fail, judges, and with ``--write`` writes docs/proof.md."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from bench.machine import machine, versions
from chaos import report
from chaos.faults import Fault, Place, all_faults
from chaos.judge import Counts
from tests.rabbitmq import Broker

PIPE_WIDTH = 160
ROUNDS_PER_LINE = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen faults. Return 0 if nothing was lost, unexpected or started without votes."""
    faults = all_faults()
    chosen = _parser(faults).parse_args(arguments)
    names = chosen.only or [*faults]
    results: dict[str, report.Proof] = {}
    stamp = report.Stamp(
        date=f"{datetime.now(UTC):%Y-%m-%d}", machine=machine(), versions=versions()
    )
    with tempfile.TemporaryDirectory() as directory, Broker(Path(directory)) as broker:
        broker.start()
        for name in names:
            if not faults[name].can_run:
                print(f"{name}: left out, it needs {faults[name].needs}", file=sys.stderr)
                continue
            rounds = chosen.rounds or getattr(faults[name], chosen.tier)
            counts = _run(faults[name], rounds, chosen.seed, broker)
            results[name] = report.Proof(text=faults[name].text, counts=counts, stamp=stamp)
    if chosen.json:
        print(report.REPORT.dump_json(results, indent=2).decode())
    else:
        console = Console()
        report.print_table(results, console if console.is_terminal else Console(width=PIPE_WIDTH))
    if chosen.write:
        report.store(results)
        subprocess.run([sys.executable, "-m", "docs.generate"], check=True)
    return int(any(proof.counts.has_failed for proof in results.values()))


def _run(fault: Fault, rounds: int, seed: int, broker: Broker) -> Counts:
    counts, said = Counts(), _say_how_far(fault.name)
    for first in range(0, rounds, fault.rounds_of_a_trial):
        number = min(fault.rounds_of_a_trial, rounds - first)
        again = f"make chaos ARGS='--only {fault.name} --rounds {number} --seed {seed + first}'"
        with tempfile.TemporaryDirectory() as folder:
            place = Place(
                folder=Path(folder),
                broker=broker,
                chance=random.Random(f"{fault.name}-{seed + first}"),  # noqa: S311  # no secret
                advance=lambda: next(said),
            )
            try:
                done = asyncio.run(fault.run(place, number))
            except Exception:  # noqa: BLE001  # one trial must not end the others
                done = Counts(rounds=number, problems=[traceback.format_exc()])
        done.problems = [f"{again}: {problem}" for problem in done.problems]
        counts.add(done)
    return counts


def _say_how_far(name: str) -> Iterator[None]:
    for number in itertools.count(1):
        if number % ROUNDS_PER_LINE == 1:
            print(f"{name}: round {number} …", file=sys.stderr, flush=True)
        yield


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


if __name__ == "__main__":
    sys.exit(main())
