"""Stores what each run of the fuzzer tried, and shows it: a part of docs/proof.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path(__file__).parent / "results.json"
INTRODUCTION = """## Fuzzing

`make fuzz` lets a fuzzer that is guided by coverage invent the input of each parser of what others
send. Inputs that reach more are kept in `fuzz/corpus`, and each run of the tests tries them again.
A crash is an exception that the parser does not document, or a result that is not what
`fuzz/targets.py` says of it.

| parser | date | minutes | inputs tried | branches reached | inputs kept | crashes |
| --- | --- | ---: | ---: | ---: | ---: | ---: |"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetResult:
    """What the last run of a target tried. ``branches`` are those that its inputs reached."""

    date: str
    minutes: float
    runs: int
    branches: int
    files: int
    """Files in the corpus afterwards."""
    crashes: int


def stored() -> dict[str, TargetResult]:
    """Return the stored results by target."""
    if not FILE.exists():
        return {}
    fields = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: TargetResult(**each) for name, each in fields.items()}


def store(name: str, result: TargetResult) -> None:
    """Store the result of a target in the place of its earlier one."""
    results = stored() | {name: result}
    fields = {name: asdict(results[name]) for name in sorted(results)}
    FILE.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def section() -> str:
    """Return the section of the page."""
    return "\n".join(_lines(stored()))


def _lines(results: dict[str, TargetResult]) -> Iterator[str]:
    yield INTRODUCTION
    for name, each in results.items():
        yield (
            f"| `{name}` | {each.date} | {each.minutes:g} | {each.runs:,} | {each.branches:,} | "
            f"{each.files:,} | {each.crashes:,} |"
        )
