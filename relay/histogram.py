"""A histogram of durations, for the metrics about commits, deliveries and polls.

It costs one search and two additions for each value. `relay.api.metrics` turns its counts
into the cumulative counts of Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts durations in seconds. ``bounds`` are the upper bounds of its buckets, in order.

    `counts` has a number for each bucket, and one more for the durations above all bounds. One
    thread adds values. Others may read meanwhile.
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
