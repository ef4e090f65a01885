"""Limits calls to the metadata service: a budget of calls, and the pause after a failed one.

It does no I/O and reads no clock.
"""

from __future__ import annotations

from collections import deque

from relay.net.backoff import exponential_backoff

MAX_CALLS = 2
"""Calls in one window. Azure allows five a second for each VM, shared by all its programs.

See docs/protocol.md#five-calls-a-second.
"""
CALL_WINDOW = 1.05
"""Seconds: one second, and a margin for the clock of the service and for the network."""
MAX_BACKOFF = 5.0
"""Seconds before jitter. It is short because a Preempt can give ten seconds of notice.

See docs/protocol.md#notice.
"""
MAX_RETRY_AFTER = 60.0
"""Seconds: a longer Retry-After is cut to this."""


class CallBudget:
    """Allows at most `MAX_CALLS` calls in any `CALL_WINDOW`. A call counts from when it was sent.

    A caller reserves a place before it connects, which can take long. Then it calls `mark_sent` or
    `release`, once.
    """

    def __init__(self) -> None:
        self._reserved = 0
        self._sent: deque[float] = deque(maxlen=MAX_CALLS)

    def delay(self, now: float) -> float | None:
        """Return the seconds until a place is free; None if calls not yet sent hold every place."""
        recent = [moment for moment in self._sent if now < moment + CALL_WINDOW]
        if self._reserved + len(recent) < MAX_CALLS:
            return 0.0
        return recent[0] + CALL_WINDOW - now if recent else None

    def reserve_call(self) -> None:
        """Take a place. Call this only directly after `delay` returned 0."""
        self._reserved += 1

    def mark_sent(self, now: float) -> None:
        """The call that holds a place is being sent."""
        self._reserved -= 1
        self._sent.append(now)

    def release(self) -> None:
        """The call that holds a place was never sent."""
        self._reserved -= 1


def retry_delay(failures: int, retry_after: float | None, interval: float, jitter: float) -> float:
    """Return the seconds to wait after this many failed calls in a row.

    The pause starts at ``interval`` and doubles up to `MAX_BACKOFF`, or stays at a longer interval.
    ``jitter`` (0 to 1) adds up to a quarter. ``retry_after`` (seconds, from the service) can only
    lengthen the pause, up to `MAX_RETRY_AFTER`.
    """
    backoff = exponential_backoff(failures, first=interval, maximum=max(interval, MAX_BACKOFF))
    return max(backoff, min(retry_after or 0.0, MAX_RETRY_AFTER)) + jitter * backoff / 4
