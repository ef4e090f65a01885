"""A histogram of durations. It costs one search and two additions for each value."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts durations, in seconds, by the upper bounds of buckets. `counts` has one for the rest.

    One thread adds values. Others may read meanwhile.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count a duration. A bucket includes its bound."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds
