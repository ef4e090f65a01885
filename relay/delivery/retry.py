"""When a delivery that failed is tried again. Pure: the deadline, the history and chance come in.

Fixed schedules are blind to the deadline: a receiver that was down for 20 s may hear minutes later, when the notice was
for 30 s (docs/protocol.md#fixed-retry-schedules). Here the tries fit the time that is left before NotBefore; after it,
ordinary backoff carries on.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from relay.errors import Failure

URGENT_WINDOW = 15 * 60.0
"""Seconds before NotBefore in which a try comes at least every 8 s."""
FIRST_PAUSE, MAX_URGENT_PAUSE, MAX_EARLY_PAUSE, SLOW_PAUSE, MAX_PAUSE = 0.5, 7.0, 54.0, 54.0, 300.0
MAX_JITTER = 0.1
"""Jitter only adds: at most this share of the pause, so that relays that failed together do not come back together."""
LAST_TRY_LEAD = 2.0
"""Seconds before NotBefore at which there is a last call; jitter makes it later by at most half of that."""
MAX_RETRY_AFTER = 3600.0
"""Seconds: a Retry-After over this is cut."""
DAY = 86400.0
MAX_INTERNAL_ERRORS = 5
"""An unexpected error in a sink's own code: parked after that many tries."""


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """Try again after so many seconds. ``rest``: the far side asked that nothing at all be sent for so long; 0 if not."""

    delay: float
    sink_pause: float = 0.0


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Give up, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class DisableSink:
    """The far side asked us to stop: keep the entry, and disable the sink."""


RetryDecision = RetryAfter | DeadLetter | DisableSink


def plan_retry(
    failure: Failure,
    *,
    tries: int,
    now: datetime,
    recorded: datetime,
    not_before: datetime | None,
    give_up_after: float,
    longest_pause: float = MAX_PAUSE,
    asked: float | None = None,
    chance: float = 0.0,
) -> RetryDecision:
    """What to do after a failed try.

    ``tries``: how often in a row it failed, this time included. ``asked``: Retry-After in seconds; it only lengthens.
    ``chance``: in [0, 1), makes the jitter. A limit of a day or more yields to a NotBefore that is still ahead: notice of
    degraded hardware comes days before. Who sets a shorter one wants to hear of the failure first.
    """
    if failure == "disabled":
        return DisableSink()
    left = (not_before - now).total_seconds() if not_before is not None else 0.0
    if failure == "slow" and left <= 0:
        return DeadLetter("refused, and no NotBefore ahead to keep trying for")
    if (left <= 0 or give_up_after < DAY) and (now - recorded).total_seconds() >= give_up_after:
        return DeadLetter(f"given up after {give_up_after:g} s")
    stretch = 1 + MAX_JITTER * chance
    pause = min(SLOW_PAUSE if failure == "slow" else backoff(tries, left), longest_pause) * stretch
    if left > LAST_TRY_LEAD:
        pause = min(pause, left - LAST_TRY_LEAD * (1 - chance / 2))
    rest = min(max(asked or 0.0, 0.0), MAX_RETRY_AFTER) * stretch
    return RetryAfter(max(pause, rest), rest)


def backoff(tries: int, left: float) -> float:
    """Seconds until the next try after so many failures in a row, with ``left`` seconds to NotBefore (none ahead: <= 0)."""
    grown = FIRST_PAUSE * 2.0 ** min(tries - 1, 16)
    if left <= 0:
        return min(grown, MAX_PAUSE)
    if left > URGENT_WINDOW:
        return min(grown, MAX_EARLY_PAUSE, max(left - URGENT_WINDOW, MAX_URGENT_PAUSE))
    return min(grown, MAX_URGENT_PAUSE)


def retry_time(again: RetryAfter, now: datetime) -> datetime:
    """When that is."""
    return now + timedelta(seconds=again.delay)
