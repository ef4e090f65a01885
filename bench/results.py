"""What a measurement returns: a value of each quantity for each round, and a table of medians."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from tests.rabbitmq import Broker

RELAY, BARE, HUB = "relay", "bare outbox", "hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a measurement runs. ``broker`` is a node of our own. ``scale``: a test needs few events.

    ``advance`` is called with the name of what is measured, at the begin of each round.
    """

    repeats: int
    broker: Broker
    scale: float = 1.0
    advance: Callable[[str], None]

    def rounds(self, name: str) -> Iterator[int]:
        """Yield the number of each round, from 1 on."""
        for number in range(1, self.repeats + 1):
            self.advance(f"{name}, round {number} of {self.repeats}")
            yield number

    def scaled(self, count: int) -> int:
        return max(1, round(count * self.scale))


@dataclass(slots=True)
class Section:
    """The results of one metric. Each row has the values of the rounds, by column.

    ``columns`` are shown beside each other, with the quotient of the first and the last.
    """

    title: str
    columns: tuple[str, str]
    note: str
    rows: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, name: str, column: str, value: float) -> None:
        """Add the value of one round."""
        self.rows.setdefault(name, {}).setdefault(column, []).append(value)

    def markdown(self, made: str) -> str:
        """Return the section of the page. ``made`` says when and on what it was measured."""
        first, last = self.columns
        lines = [f"| | {first} | {last} | {first} / {last} |", "| --- | ---: | ---: | ---: |"]
        for name, values in self.rows.items():
            pairs = zip(values.get(first, ()), values.get(last, ()), strict=False)
            cells = (values.get(first), values.get(last), [a / b for a, b in pairs if b])
            lines.append(f"| {name} | {' | '.join(_summary(cell) for cell in cells)} |")
        notes = (textwrap.fill(text, 100, break_on_hyphens=False) for text in (self.note, made))
        return "\n\n".join((f"## {self.title}", "\n".join(lines), *notes))


def _summary(values: Sequence[float] | None) -> str:
    """Return the median of the rounds, with the least and the largest."""
    if not values:
        return "–"
    middle, low, high = (_number(value) for value in (median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low}–{high})"


def _number(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.{1 if magnitude >= 10 else 2 if magnitude >= 0.1 else 3}f}"


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile: the least value that so many percent of the values do not exceed."""
    rank = -(-len(values) * percent // 100)  # rounded up
    return sorted(values)[max(0, int(rank) - 1)]
