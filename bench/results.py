"""What a measurement returns, and how it is summed up: a value for each round, their median."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import override

RELAY, BARE, RAW = "relay", "bare outbox", "raw limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity: a value for each round, by column. ``aim`` is for people."""

    name: str
    unit: str
    values: Mapping[str, Sequence[float]]
    aim: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The results of one metric.

    ``ratio`` names two columns; the quotient of the first and the second is shown with each row
    that has both. ``series`` are values to plot, by name.
    """

    metric: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    ratio: tuple[str, str] | None = (RELAY, BARE)
    note: str = ""
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A section, and when, on what and how often it was measured."""

    section: Section
    date: str
    machine: str
    versions: str
    rounds: int


RESULTS = TypeAdapter(dict[str, Measured])
"""The results file: each metric's latest results."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The median of some rounds, with the least and the largest."""

    median: float
    low: float
    high: float

    @override
    def __str__(self) -> str:
        middle, low, high = (number(value) for value in (self.median, self.low, self.high))
        return middle if low == high else f"{middle} ({low}–{high})"


def summarize(values: Iterable[float]) -> Summary | None:
    """Return the summary of the rounds; None if there are none."""
    measured = list(values)
    return Summary(median(measured), min(measured), max(measured)) if measured else None


def ratio(row: Row, columns: tuple[str, str]) -> Summary | None:
    """Return the quotient of two columns, round by round; None if one of them was not measured."""
    first, second = (row.values.get(column, ()) for column in columns)
    return summarize(a / b for a, b in zip(first, second, strict=False) if b)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile: the least value that so many percent of the values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)  # rounded up
    return ordered[max(0, int(rank) - 1)]


def number(value: float) -> str:
    """Return a number for people, with three significant digits or as an integer."""
    magnitude = abs(value)
    if magnitude >= 100 or value == int(value):
        return f"{value:,.0f}"
    return (
        f"{value:.1f}"
        if magnitude >= 10
        else f"{value:.2f}"
        if magnitude >= 0.1
        else f"{value:.3f}"
    )


class Rounds:
    """Collects the values of the rounds, by quantity and column."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], dict[str, list[float]]] = {}

    def add(self, name: str, unit: str, column: str, value: float, aim: str = "") -> None:
        """Add one round's value."""
        self._rows.setdefault((name, unit, aim), {}).setdefault(column, []).append(value)

    def rows(self) -> list[Row]:
        """Return a row for each quantity, in the order in which they came."""
        return [
            Row(name=name, unit=unit, aim=aim, values=values)
            for (name, unit, aim), values in self._rows.items()
        ]


def as_json(measured: Mapping[str, Measured]) -> Any:
    """Return the results as JSON values."""
    return RESULTS.dump_python(dict(measured), mode="json")
