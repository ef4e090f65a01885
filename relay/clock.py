"""Time as an argument, so that a test can replace it; durations and rates that are counted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime:
        """Return the wall-clock time in UTC, with its time zone: for timestamps that others see."""

    def monotonic(self) -> float:
        """Return seconds that never go back, to measure intervals."""

    async def sleep(self, seconds: float) -> None: ...

    async def wait(self, event: asyncio.Event, seconds: float | None) -> None:
        """Return when the event is set, or after a number of seconds; None sets no limit."""


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def wait(self, event: asyncio.Event, seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if seconds is None else max(0.0, seconds)):
                await event.wait()


class Histogram:
    """Counts durations in seconds: one search and two additions for each, while others read.

    ``bounds`` are the upper bounds of its buckets, in order, each included. `counts` has a number
    for each bucket, and one more for the durations above all bounds. One thread adds values.
    `relay.api.metrics` makes the cumulative counts of Prometheus of them.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


CALLER_RATE = 10.0
"""Calls a second of an identified caller: of a client, user or agent. HTTP, AMQP and the fleet each
count their own calls."""
CALLER_BURST = 50
"""Calls at once of such a caller."""


class TokenBuckets:
    """A bucket for each key; of more than `max_keys`, the least recently used is full again."""

    def __init__(self, rate: float, burst: int, max_keys: int = 4096) -> None:
        self._rate = rate
        self._burst = burst
        self._max_keys = max_keys
        # The tokens of a key, and the time at which they were counted.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str, now: float) -> float:
        """Take a token and return 0; without a token, return the seconds until there is one.

        `now` is seconds by a clock. If it is set back, no tokens come until it is as late again.
        """
        tokens = self._tokens(key, now)
        if tokens < 1.0:
            self._set_tokens(key, tokens, now)
            return (1.0 - tokens) / self._rate
        self._set_tokens(key, tokens - 1.0, now)
        return 0.0

    def refund(self, key: str, now: float) -> None:
        """Put the token of a `take` back, as for a caller who proved who it is."""
        self._set_tokens(key, min(self._tokens(key, now) + 1.0, self._burst), now)

    def _tokens(self, key: str, now: float) -> float:
        tokens, counted_at = self._buckets.get(key, (float(self._burst), now))
        return min(tokens + max(0.0, now - counted_at) * self._rate, self._burst)

    def _set_tokens(self, key: str, tokens: float, now: float) -> None:
        self._buckets[key] = (tokens, now)
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._max_keys:
            self._buckets.popitem(last=False)
