"""When a delivery that failed is tried again. Pure: the deadline, the history and chance come in.

Fixed schedules are blind to the deadline: a receiver that was down for 20 s may hear minutes later, when the notice was
for 30 s (FIELD 3.1). Here the tries fit the time that is left before NotBefore; after it, ordinary backoff carries on.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from relay.errors import Failure

WINDOW = 15 * 60.0
"""Seconds before NotBefore in which a try comes at least every `URGENT` + `JITTER` seconds."""
FIRST, URGENT, EARLY, SLOW, LATEST = 0.5, 7.0, 55.0, 55.0, 300.0
JITTER = 0.1
"""Jitter only adds: at most this share of the pause, so that relays that failed together do not come back together."""
LAST_CALL = 2.0
"""Seconds before NotBefore at which there is a last call."""
LONGEST_REST = 3600.0
"""Seconds: a Retry-After over this is cut."""
OWN_ERRORS = 5
"""An unexpected error in a sink's own code: parked after that many tries."""


@dataclass(frozen=True, slots=True)
class Again:
    """Try again after this many seconds. ``rest`` says that the far side asked for it: the whole sink rests."""

    after: float
    rest: bool = False


@dataclass(frozen=True, slots=True)
class Park:
    """Give up, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Disable:
    """The far side asked us to stop: keep the entry, and disable the sink."""


Verdict = Again | Park | Disable


def plan(
    failure: Failure,
    *,
    tries: int,
    now: datetime,
    recorded: datetime,
    not_before: datetime | None,
    give_up_after: float,
    longest_pause: float = LATEST,
    asked: float | None = None,
    chance: float = 0.0,
) -> Verdict:
    """What to do after a failed try.

    ``tries``: how often in a row it failed, this time included. ``asked``: Retry-After in seconds; it only lengthens.
    ``chance``: in [0, 1), makes the jitter.
    """
    if failure == "disabled":
        return Disable()
    left = (not_before - now).total_seconds() if not_before is not None else 0.0
    if failure == "slow" and left <= 0:
        return Park("refused, and no NotBefore ahead to keep trying for")
    if (now - recorded).total_seconds() >= give_up_after:
        return Park(f"given up after {give_up_after:g} s")
    pause = SLOW if failure == "slow" else min(pause_of(tries, left), longest_pause)
    pause *= 1 + JITTER * chance
    if asked is not None and min(asked, LONGEST_REST) > pause:
        return Again(min(asked, LONGEST_REST), rest=True)
    return Again(pause)


def pause_of(tries: int, left: float) -> float:
    """Seconds until the next try after so many failures in a row, with ``left`` seconds to NotBefore (none ahead: <= 0)."""
    grown = FIRST * 2.0 ** min(tries - 1, 16)
    if left <= 0:
        return min(grown, LATEST)
    if left > WINDOW:
        return min(grown, EARLY, max(left - WINDOW, URGENT))
    pause = min(grown, URGENT)
    # One last call while there is still something to be done about it.
    return left - LAST_CALL if LAST_CALL < left <= pause + LAST_CALL else pause


def moment_of(again: Again, now: datetime) -> datetime:
    """When that is."""
    return now + timedelta(seconds=again.after)
