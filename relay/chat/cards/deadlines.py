"""How much time people have to answer, and when time alone changes a message. Pure.

A card says how much time is left, such as "at most 15 min left" (`time_left`). That text changes in
steps, because each change is an edit of the message. `next_refresh_time` returns the next moment at
which anything in a message becomes wrong. `relay.chat.message_planner` records it, and the message
is then brought up to date.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from relay.approvals.standing_holds import next_hold_change
from relay.approvals.status import ApprovalStatus

_TIME_TO_FREE_SLOT = timedelta(seconds=1)
"""The gate gives a slot that a limit frees to another event a moment later."""
_MINUTES_PER_DAY = 24 * 60
_MAX_MINUTES = 90
"""`time_left` names longer times in hours or days."""
_STEPS = (1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, *(60 * hours for hours in (3, 4, 6, 8, 12, 24)))
"""Minutes before the deadline at which `time_left` changes. Earlier, it changes once a day."""


def next_refresh_time(statuses: Iterable[ApprovalStatus]) -> datetime | None:
    """Return when time alone will change a message about these events; None if it never will."""
    times = [
        time
        for status in statuses
        if status.occurrence.live
        for time in _content_change_times(status)
        if time is not None and time > status.now
    ]
    return min(times, default=None)


def _content_change_times(status: ApprovalStatus) -> Iterator[datetime | None]:
    """Yield the times, also past ones, at which a text about a live event becomes wrong."""
    if status.is_startable:
        yield status.voting_closes_at
    yield time_left_changes_at(status)
    if not status.occurrence.event.is_started:
        yield status.not_before
    yield from (next_hold_change(hold, status.now) for hold in status.standing_holds)
    yield from (status.decision_expires_at(decision) for decision in status.decisions)
    for wait in status.waiting_for:
        if wait.until is not None:
            yield wait.until + _TIME_TO_FREE_SLOT


def time_left(status: ApprovalStatus, until: datetime | None) -> str | None:
    """Return how much time is left at most until ``until``: NotBefore or the end of voting.

    The text stays true until `time_left_changes_at`. A message can say both times, so the steps
    count from one deadline: until when people can answer. None if no time is known, or if nobody
    need answer: the event is no longer open, or it is approved.
    """
    deadline = _voting_end_or_not_before(status)
    if deadline is None or until is None or not status.is_startable or status.is_granted_or_claimed:
        return None
    seconds = (deadline - status.now).total_seconds()
    shown = next((step for step in _STEPS if seconds <= step * 60), None)
    if shown is None:
        shown = math.ceil(seconds / 60 / _MINUTES_PER_DAY) * _MINUTES_PER_DAY
    minutes = shown + math.ceil((until - deadline).total_seconds() / 60)
    return f"at most {_minutes_text(minutes)} left"


def _minutes_text(minutes: int) -> str:
    if minutes <= _MAX_MINUTES:
        return f"{minutes} min"
    if minutes > 2 * _MINUTES_PER_DAY:
        return f"{math.ceil(minutes / _MINUTES_PER_DAY)} days"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


def time_left_changes_at(status: ApprovalStatus) -> datetime | None:
    """Return when `time_left` says another time; None if it never will."""
    deadline = _voting_end_or_not_before(status)
    if deadline is None or time_left(status, deadline) is None:
        return None
    days = range(
        2 * _MINUTES_PER_DAY, (deadline - status.now).days * _MINUTES_PER_DAY + 1, _MINUTES_PER_DAY
    )
    moments = (deadline - timedelta(minutes=step) for step in (*_STEPS, *days))
    return min((moment for moment in moments if moment > status.now), default=None)


def _voting_end_or_not_before(status: ApprovalStatus) -> datetime | None:
    """Return the end of voting while votes are missing and can come; otherwise NotBefore."""
    if status.votes_missing and not status.is_past_voting_close_time:
        return status.voting_closes_at
    return status.not_before
