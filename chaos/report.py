"""Shows the results: a table for people, and the generated part of docs/proof.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from chaos.judge import Counts

ROOT = Path(__file__).parent.parent
FILE = ROOT / "chaos" / "results.json"
PAGE = ROOT / "docs" / "proof.md"
COLUMNS = [each.name for each in fields(Counts) if each.name != "problems"]
HEADINGS = [name.replace("_", " ") for name in COLUMNS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """When, on what and with what a fault was run."""

    date: str
    machine: str
    versions: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    text: str
    counts: Counts
    stamp: Stamp


REPORT = TypeAdapter(dict[str, Proof])


def print_table(results: Mapping[str, Proof], console: Console) -> None:
    table = Table()
    table.add_column("fault", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for name, proof in results.items():
        style = "bold red" if proof.counts.has_failed else None
        table.add_row(name, *_cells(proof.counts), style=style)
    console.print(table)
    for name, proof in results.items():
        for problem in proof.counts.problems:
            console.print(f"{name}: {problem}", style="red", markup=False, highlight=False)


def stored() -> dict[str, Proof]:
    return REPORT.validate_json(FILE.read_bytes())


def store(results: Mapping[str, Proof]) -> None:
    earlier = stored() if FILE.exists() else {}
    FILE.write_bytes(REPORT.dump_json({**earlier, **results}, indent=1) + b"\n")


def page() -> str:
    return "\n".join(_page(stored()))


def _page(proofs: Mapping[str, Proof]) -> Iterator[str]:
    yield f"| fault | {' | '.join(HEADINGS)} |"
    yield f"| --- |{' ---: |' * len(HEADINGS)}"
    total = Counts()
    for name, proof in proofs.items():
        total.add(proof.counts)
        yield f"| `{name}`: {proof.text} | {' | '.join(_cells(proof.counts))} |"
    yield f"| **all** | {' | '.join(_cells(total))} |"
    yield ""
    stamps = {proof.stamp for proof in proofs.values()}
    for stamp in sorted(stamps, key=lambda each: each.date):
        names = [f"`{name}`" for name, proof in proofs.items() if proof.stamp == stamp]
        which = "All" if len(stamps) == 1 else ", ".join(names)
        yield f"{which}: {stamp.date}, {stamp.machine}; {stamp.versions}.\n"


def _cells(counts: Counts) -> list[str]:
    return [f"{getattr(counts, column):,}" for column in COLUMNS]
