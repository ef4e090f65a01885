"""Limits the rate of calls for each caller, with token buckets in bounded memory.

The HTTP API, approvals over AMQP and the votes of agents use it. Time is passed in.
"""

from __future__ import annotations

from collections import OrderedDict

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
