"""Stores what became of the mutants of each module, and shows it: a part of docs/proof.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

FILE = Path(__file__).parent / "results.json"
INTRODUCTION = """## Mutation testing

`make mutants` changes one place at a time in the modules that decide. Some test must fail for each
change. `tests/mutation/equivalent.toml` explains each change that has no effect.

| module | date | changes | noticed by a test | without effect | not noticed |
| --- | --- | ---: | ---: | ---: | ---: |"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleResult:
    """What became of all mutants of a module."""

    date: str
    mutants: int
    killed: int
    """Mutants that a test noticed. It failed, or took ten times as long."""
    equivalent: int
    """Mutants that `equivalent.toml` explains."""
    survived: int


_RESULTS = TypeAdapter(dict[str, ModuleResult])


def stored() -> dict[str, ModuleResult]:
    """Return the stored results by the path of the module."""
    return _RESULTS.validate_json(FILE.read_bytes()) if FILE.exists() else {}


def store(path: str, result: ModuleResult) -> None:
    """Store the result of a module in the place of its earlier one."""
    results = dict(sorted((stored() | {path: result}).items()))
    FILE.write_bytes(_RESULTS.dump_json(results, indent=1) + b"\n")


def section() -> str:
    """Return the section of the page."""
    return "\n".join(_lines(stored()))


def _lines(results: dict[str, ModuleResult]) -> Iterator[str]:
    yield INTRODUCTION
    for path, each in results.items():
        numbers = (each.mutants, each.killed, each.equivalent, each.survived)
        yield f"| `{path}` | {each.date} | {' | '.join(f'{number:,}' for number in numbers)} |"
