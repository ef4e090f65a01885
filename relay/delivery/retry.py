"""Decides when a failed delivery is tried again. Pure: deadline, history and jitter are arguments.

`sink_health` asks after each failed try. The sink says which kind of failure it was: *transient*
can pass by itself, *slow* is for a person to correct, and *disabled* asks the relay to stop.

A fixed schedule does not know the deadline: a receiver that was down for 20 s may get the event
minutes later, after 30 s of notice are over (docs/protocol.md#fixed-retry-schedules). So the tries
here fit the time that is left before NotBefore. After it, ordinary backoff applies.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from relay.errors import Failure
from relay.net import exponential_backoff
from relay.store import Entry

URGENT_WINDOW = 15 * 60.0
"""Seconds before NotBefore in which a try comes at least every `MAX_URGENT_PAUSE`."""
FIRST_PAUSE = 0.5
MAX_URGENT_PAUSE = 7.0
MAX_EARLY_PAUSE = 54.0
"""Before the urgent window."""
SLOW_PAUSE = 54.0
"""For failures that a person must correct."""
MAX_PAUSE = 300.0
"""If no NotBefore is ahead."""
MAX_JITTER = 0.1
"""Share of a pause. It is only added, so that relays that failed together spread out."""
LAST_TRY_LEAD = 2.0
"""Seconds before NotBefore for a last try. Jitter makes it later, by at most half of that."""
MAX_RETRY_AFTER = 3600.0
"""Seconds: a longer Retry-After is cut to this."""
MAX_INTERNAL_ERRORS = 5
"""After this many unexpected errors of a sink's code, an entry becomes a dead letter."""
DAY = 86400.0


@dataclass(frozen=True, slots=True)
class RetryAfterDelay:
    """Try again after ``delay`` seconds; ``sink_pause``: the receiver wants nothing so long."""

    delay: float
    sink_pause: float = 0.0


@dataclass(frozen=True, slots=True)
class DeadLetter:
    reason: str


RetryDecision = RetryAfterDelay | DeadLetter


def plan_retry(
    failure: Failure,
    *,
    tries: int,
    now: datetime,
    recorded: datetime,
    not_before: datetime | None,
    give_up_after: float,
    longest_pause: float = MAX_PAUSE,
    retry_after: float | None = None,
    jitter: float = 0.0,
) -> RetryDecision:
    """Return what to do after a failed try.

    ``tries`` counts failures in a row, this one included. ``retry_after`` (seconds) can only
    lengthen the pause. ``jitter`` is in [0, 1). A ``give_up_after`` of a day or more does not apply
    while NotBefore is ahead, because notice of degraded hardware comes days before. A shorter one
    always applies.
    """
    if failure == "disabled":
        return RetryAfterDelay(0.0)  # once the sink is on again
    seconds_left = _seconds_to_not_before(not_before, now)
    if failure == "slow" and seconds_left <= 0:
        return DeadLetter("refused, and no NotBefore ahead to keep trying for")
    may_give_up = seconds_left <= 0 or give_up_after < DAY
    if may_give_up and (now - recorded).total_seconds() >= give_up_after:
        return DeadLetter(f"given up after {give_up_after:g} s")
    pause = SLOW_PAUSE if failure == "slow" else backoff(tries, seconds_left)
    delay = _limited(pause, seconds_left, longest_pause, jitter)
    sink_pause = min(max(retry_after or 0.0, 0.0), MAX_RETRY_AFTER) * (1 + MAX_JITTER * jitter)
    return RetryAfterDelay(max(delay, sink_pause), sink_pause)


def probe_delay(
    failed: Entry,
    *,
    next_not_before: datetime | None,
    failures: int,
    now: datetime,
    longest_pause: float,
    jitter: float,
) -> float:
    """Return the seconds until the next probe of a failing sink.

    The most urgent waiting entry determines them: ``next_not_before`` is the first NotBefore that
    is ahead. ``failed`` was tried last; the sink has had ``failures`` failures in a row.
    """
    seconds_left = _seconds_to_not_before(next_not_before, now)
    is_urgent = _seconds_to_not_before(failed.not_before, now) > 0
    tries = min(failures, failed.attempts + 1) if is_urgent else failures
    return _limited(backoff(tries, seconds_left), seconds_left, longest_pause, jitter)


def backoff(tries: int, seconds_left: float) -> float:
    """Return the pause after this many failures; ``seconds_left`` to NotBefore, if above 0."""
    doubled = exponential_backoff(tries, first=FIRST_PAUSE, maximum=MAX_PAUSE)
    if seconds_left <= 0:
        return doubled
    if seconds_left > URGENT_WINDOW:
        return min(doubled, MAX_EARLY_PAUSE, max(seconds_left - URGENT_WINDOW, MAX_URGENT_PAUSE))
    return min(doubled, MAX_URGENT_PAUSE)


def _seconds_to_not_before(not_before: datetime | None, now: datetime) -> float:
    return (not_before - now).total_seconds() if not_before is not None else 0.0


def _limited(pause: float, seconds_left: float, longest_pause: float, jitter: float) -> float:
    """Return a pause with its upper limit and jitter, cut so that a last try precedes NotBefore."""
    delay = min(pause, longest_pause) * (1 + MAX_JITTER * jitter)
    if seconds_left > LAST_TRY_LEAD:
        delay = min(delay, seconds_left - LAST_TRY_LEAD * (1 - jitter / 2))
    return delay
