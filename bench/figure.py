"""The results of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its unit, and its aim."""

    name: str
    value: float
    unit: str
    aim: str = ""


def percentiles(name: str, seconds: Sequence[float], aim_p99: str = "") -> list[Figure]:
    """Return p50, p99 and the maximum of some times, in milliseconds."""
    cuts = quantiles(seconds, n=100, method="inclusive")
    return [
        Figure(f"{name}, p50", cuts[49] * 1000, "ms"),
        Figure(f"{name}, p99", cuts[98] * 1000, "ms", aim_p99),
        Figure(f"{name}, largest of {len(seconds)}", max(seconds) * 1000, "ms"),
    ]
