"""Phrases that several parts of a message share, and how much time people have to answer. Pure.

A card says how much time is left, such as "at most 15 min left" (`time_left`). That text changes in
steps, because each change is an edit of the message. `next_refresh_time` returns the next moment at
which anything in a message becomes wrong, and the message is brought up to date then.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Literal

from relay.approvals.standing_holds import next_hold_change
from relay.approvals.status import ApprovalStatus
from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import parse_timestamp
from relay.sentences import Text, describe_waits, event_subject, event_told, few_machines, sentence
from relay.store import TrackedEvent

Tone = Literal["waiting", "held", "approved", "running", "over"]
"""The state of an event that the color of a message shows."""


def event_title(status: ApprovalStatus) -> str:
    event = status.occurrence.event
    return event_subject(event.event_type, event.resources)


def follow_up_subject(statuses: Sequence[ApprovalStatus]) -> str:
    """Return the heading of what follows where there are no threads. It tells events apart."""
    if len(statuses) > 1:
        return f"{len(statuses)} maintenance events"
    event_id = statuses[0].occurrence.event.event_id
    return f"{event_title(statuses[0])} ({event_id[:8]})"


def event_tone(status: ApprovalStatus) -> Tone:
    if not status.occurrence.live:
        return "over"
    if status.occurrence.event.is_started:
        return "running"
    if status.is_held:
        return "held"
    is_waiting = status.waiting_for and not status.is_grant_sent_or_accepted
    return "approved" if status.is_granted_or_claimed and not is_waiting else "waiting"


def runbooks_of(statuses: Iterable[ApprovalStatus]) -> tuple[tuple[str, str], ...]:
    """Return the runbooks of the rules of events that are not over, each with the rule's name."""
    rules = [status.rule for status in statuses if status.occurrence.live]
    found = ((rule.name, rule.runbook) for rule in rules if rule is not None)
    return tuple(dict.fromkeys((name, url) for name, url in found if url is not None))


def limit_waits_text(status: ApprovalStatus) -> Text:
    text = sentence(describe_waits(status.waiting_for))
    ends = [parse_timestamp(wait["until"]) for wait in status.waiting_for]
    known = [end for end in ends if end is not None]
    if len(known) < len(ends):
        return (text,)
    return (text.removesuffix("."), ", until ", max(known), ".")


MAX_HISTORY_LINES = 20
"""Lines in one reply. The newest stay; a first line counts the others."""


def history_lines(
    history: Sequence[tuple[TrackedEvent, CloudEvent]], *, is_grouped: bool, is_cut: bool = False
) -> tuple[Text, ...]:
    """Return the lines of one reply, oldest first. ``is_cut``: more happened before the history."""
    newest = history[-MAX_HISTORY_LINES:]
    omitted = len(history) - len(newest)
    lines: list[Text] = []
    if omitted or is_cut:
        number = f"more than {omitted}" if is_cut else f"{omitted} more"
        lines.append((f"… {number} happened before: “imds-relay show --all” lists them.",))
    for occurrence, event in newest:
        line = timeline_line(event)
        if is_grouped:
            line = (f"{few_machines(occurrence.event.resources)}: ", *line)
        lines.append(line)
    return tuple(lines)


def voting_closed_lines(status: ApprovalStatus, since: datetime | None) -> tuple[Text, ...]:
    """Return the line that voting has closed, if votes are missing, for a message without edits.

    ``since`` is its recorded refresh time: voting that closed before that was told already.
    """
    closed_at = status.voting_closes_at
    if since is None or closed_at is None or not since <= closed_at <= status.now:
        return ()
    if not status.is_startable or not status.votes_missing or status.is_grant_sent_or_accepted:
        return ()
    count = f"{status.vote_count} of {status.votes_required}"
    return ((closed_at, f": Voting closed, with {count} votes."),)


def timeline_line(event: CloudEvent) -> Text:
    """Return one line of history. A ``relay.*`` event is a message that consists of this line."""
    text = event_told(event.name, event.data)
    at = parse_timestamp(event.attributes.get("time"))
    return (at, ": ", *text) if at is not None else text


# --- how much time is left


_MINUTE = timedelta(minutes=1)
_MINUTES_PER_DAY = 24 * 60
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
        if (until := parse_timestamp(wait["until"])) is not None:
            yield until + timedelta(seconds=1)  # the gate gives the slot to another event then


def time_left(status: ApprovalStatus, until: datetime | None) -> str | None:
    """Return how much time is left at most until ``until``: NotBefore or the end of voting.

    The text stays true until `time_left_changes_at`. A message can say both times, so the steps
    count from one deadline: until when people can answer. None if no time is known, or if nobody
    need answer.
    """
    deadline = _voting_end_or_not_before(status)
    if deadline is None or until is None or not status.is_startable or status.is_granted_or_claimed:
        return None
    _, shown = _steps_around(deadline - status.now)
    minutes = shown + math.ceil((until - deadline) / _MINUTE)
    if minutes <= 90:  # longer times are in hours or days
        return f"at most {minutes} min left"
    if minutes > 2 * _MINUTES_PER_DAY:
        return f"at most {math.ceil(minutes / _MINUTES_PER_DAY)} days left"
    hours, rest = divmod(minutes, 60)
    return f"at most {hours} h {rest} min left" if rest else f"at most {hours} h left"


def time_left_changes_at(status: ApprovalStatus) -> datetime | None:
    """Return when `time_left` says another time; None if it never will."""
    deadline = _voting_end_or_not_before(status)
    if deadline is None or time_left(status, deadline) is None:
        return None
    below, _ = _steps_around(deadline - status.now)
    return deadline - below * _MINUTE if below else None


def _steps_around(left: timedelta) -> tuple[int, int]:
    """Return the minutes of the next step (0: there is none), and of the step that is shown."""
    days = math.ceil(left / _MINUTE / _MINUTES_PER_DAY)
    if days > 1:
        return (days - 1) * _MINUTES_PER_DAY, days * _MINUTES_PER_DAY
    index = bisect_left(_STEPS, left / _MINUTE)
    return (_STEPS[index - 1] if index else 0), _STEPS[index]


def _voting_end_or_not_before(status: ApprovalStatus) -> datetime | None:
    """Return the end of voting while votes are missing and can come; otherwise NotBefore."""
    if status.votes_missing and not status.is_past_voting_close_time:
        return status.voting_closes_at
    return status.not_before
