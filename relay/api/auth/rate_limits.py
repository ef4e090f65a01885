"""How many calls somebody may make: token buckets, in bounded memory. No clock: time is handed in."""

from __future__ import annotations

from collections import OrderedDict


class TokenBuckets:
    """One bucket for each key: ``rate`` calls a second, ``burst`` at once. At most ``most`` keys are remembered.

    The key that was touched longest ago is forgotten first; it then has a full bucket again.
    """

    def __init__(self, rate: float, burst: int, most: int = 4096) -> None:
        self._rate = rate
        self._burst = burst
        self._most = most
        self._buckets: OrderedDict[str, tuple[float, float]] = (
            OrderedDict()
        )  # tokens, and when they were counted

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, now: float) -> float:
        """Take a token; returns 0, or where there is none the seconds until there is one. ``now`` is monotonic."""
        tokens = self._tokens(key, now)
        taken = tokens >= 1.0
        self._put(key, tokens - taken, now)
        return 0.0 if taken else (1.0 - tokens) / self._rate

    def refund(self, key: str, now: float) -> None:
        """Undo a `take`: that call is not to count after all."""
        self._put(key, min(self._tokens(key, now) + 1.0, self._burst), now)

    def _tokens(self, key: str, now: float) -> float:
        tokens, at = self._buckets.get(key, (float(self._burst), now))
        return min(tokens + (now - at) * self._rate, self._burst)

    def _put(self, key: str, tokens: float, now: float) -> None:
        self._buckets[key] = (tokens, now)
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
