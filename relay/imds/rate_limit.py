"""How often the metadata service is called: the budget of calls, and the wait after a failed one. Pure."""

from __future__ import annotations

from collections import deque

MAX_CALLS = 2
"""So many calls fit into one window; Azure allows a VM five a second, shared with every other poller.

See docs/protocol.md#five-calls-a-second.
"""
CALL_WINDOW = 1.05
"""Seconds: a second, and room for the far side's clock and the network."""
MAX_BACKOFF = 5.0
"""Seconds before jitter. Low, since a Preempt can give ten seconds of notice, and a 410 is over after 70.

See docs/protocol.md#notice and docs/protocol.md#statuses-to-retry.
"""
MAX_RETRY_AFTER = 60.0
"""Seconds: more than this, no Retry-After can make us wait."""


class CallBudget:
    """No more than `MAX_CALLS` calls in any `CALL_WINDOW`, each counted from when it was sent.

    A call takes a place before it begins and holds it until it was sent, since connecting may take long. Whoever took a
    place says `sent` or `give_back`, once.
    """

    def __init__(self) -> None:
        self._unsent = 0
        self._sent: deque[float] = deque(maxlen=MAX_CALLS)

    def delay(self, now: float) -> float | None:
        """Seconds until a place may be taken; None while every place is held by a call that was not sent yet."""
        recent = [moment for moment in self._sent if now < moment + CALL_WINDOW]
        if self._unsent + len(recent) < MAX_CALLS:
            return 0.0
        return recent[0] + CALL_WINDOW - now if recent else None

    def reserve(self) -> None:
        """Take a place; only right after `delay` gave 0."""
        self._unsent += 1

    def mark_sent(self, now: float) -> None:
        """The call that took a place is being sent."""
        self._unsent -= 1
        self._sent.append(now)

    def release(self) -> None:
        """The call that took a place was never sent."""
        self._unsent -= 1


def retry_delay(failures: int, retry_after: float | None, interval: float, jitter: float) -> float:
    """Seconds to wait after the ``failures``-th failed call in a row.

    From ``interval`` it doubles up to `MAX_BACKOFF` (or stays at a longer interval). ``jitter`` (0 to 1) adds up to a
    quarter and never takes away. ``retry_after`` (seconds that the service asked for) only lengthens, up to `MAX_RETRY_AFTER`.
    """
    doublings = min(max(failures, 1) - 1, 16)
    backoff = min(interval * 2.0**doublings, max(interval, MAX_BACKOFF))
    return max(backoff, min(retry_after or 0.0, MAX_RETRY_AFTER)) + jitter * backoff / 4
