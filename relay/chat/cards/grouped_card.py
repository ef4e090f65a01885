"""The card about several events, which appeared together and share one message. Pure.

It has one line with buttons for each event, those that wait for votes first. A line also says for
which limits of ``approvals.limits`` an approved event waits. The notes say when Azure proceeds
whether or not anybody answers.
`relay.chat.cards.event_card` makes the card about one event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from operator import itemgetter

from relay.approvals.status import ApprovalStatus
from relay.chat.cards.buttons import available_decisions, decision_buttons
from relay.chat.cards.card import Card, EventLine, Link, Text, Tone
from relay.chat.cards.deadlines import time_left
from relay.chat.cards.wording import (
    azure_proceeds_regardless_notice,
    event_title,
    event_tone,
    join_names,
    runbooks_of,
)

MAX_LISTED_EVENTS = 10
"""Events that get a line of their own; the rest are counted."""
_TONES_BY_URGENCY: tuple[Tone, ...] = ("waiting", "held", "running", "approved", "over")


def grouped_card(statuses: Sequence[ApprovalStatus], *, link: Link | None) -> Card:
    """Return the card about several events, of which there is at least one.

    ``link`` makes the URLs of the buttons. It is None if the relay has no address for links.
    """
    live = [status for status in statuses if status.occurrence.live]
    ordered = sorted(live or statuses, key=_awaiting_votes_first_sort_key)
    lines = tuple(
        EventLine(event_line(status), decision_buttons(status, link))
        for status in ordered[:MAX_LISTED_EVENTS]
    )
    notes: list[Text] = []
    omitted = len(ordered) - len(lines)
    if omitted:
        command = "“imds-relay events” on a machine of this scope"
        notes.append((f"And {omitted} more: {command} lists them, and decides about them.",))
    can_hold = any("hold" in available_decisions(status) for status in live)
    notes.extend(azure_proceeds_regardless_notice(live, can_hold=can_hold))
    tones = {event_tone(status) for status in statuses}
    machines = [name for status in statuses for name in status.occurrence.event.resources]
    return Card(
        title=f"{len(statuses)} maintenance events at once",
        tone=next(tone for tone in _TONES_BY_URGENCY if tone in tones),
        summary=_summary_text(statuses),
        facts=(("Machines", (join_names(list(dict.fromkeys(machines))),)),),
        notes=tuple(notes),
        lines=lines,
        footer=statuses[0].occurrence.scope,
        runbooks=runbooks_of(live)[:MAX_LISTED_EVENTS],
    )


def event_line(status: ApprovalStatus) -> Text:
    """Return one line about an event: its title, when it begins, and how its approval stands."""
    occurrence = status.occurrence
    title = event_title(status)
    if not occurrence.live:
        return (f"{title}: {occurrence.outcome or 'over'}",)
    if occurrence.event.is_started:
        return (f"{title}: under way",)
    text: Text = (title,)
    if status.not_before is not None:
        text += (", not before ", status.not_before)
    if status.is_held:
        text += (", held",)
    elif status.is_scheduled_and_before_not_before and status.waiting_for:
        limits = join_names([wait.limit for wait in status.waiting_for])
        text += (f", waits for limit {limits}",)
    elif status.is_granted_or_claimed:
        text += (", approved",)
    elif status.votes_required:
        text += (f", {status.vote_count} of {status.votes_required} votes",)
    return text


def _awaiting_votes_first_sort_key(status: ApprovalStatus) -> tuple[bool, bool, datetime, int]:
    """Sort events that wait for votes first, then by NotBefore."""
    return (
        not _waits_for_votes(status),
        status.not_before is None,
        status.not_before or status.now,
        status.occurrence.id,
    )


def _waits_for_votes(status: ApprovalStatus) -> bool:
    return (
        status.is_scheduled_and_before_not_before
        and status.votes_missing > 0
        and not status.is_past_voting_close_time
    )


def _summary_text(statuses: Sequence[ApprovalStatus]) -> Text:
    types = Counter(status.occurrence.event.event_type or "Maintenance" for status in statuses)
    parts = [", ".join(f"{count} × {event_type}" for event_type, count in types.most_common())]
    open_statuses = [status for status in statuses if status.is_scheduled_and_before_not_before]
    counts = {
        "waiting for votes": sum(_waits_for_votes(status) for status in statuses),
        "held": sum(status.is_held for status in open_statuses),
        "waiting for a limit": sum(bool(status.waiting_for) for status in open_statuses),
        "approved": sum(
            status.is_granted_or_claimed and not status.waiting_for for status in open_statuses
        ),
        "under way": sum(
            status.occurrence.live and status.occurrence.event.is_started for status in statuses
        ),
        "over": sum(not status.occurrence.live for status in statuses),
    }
    if any(counts.values()):
        parts.append(", ".join(f"{count} {state}" for state, count in counts.items() if count))
    text: Text = ("".join(f"{part}. " for part in parts),)
    dated = [(status.not_before, status) for status in open_statuses if status.not_before]
    if dated:
        first_not_before, first = min(dated, key=itemgetter(0))
        left = time_left(first, first_not_before)
        ending = " or soon after, whether or not anybody answers."
        ending += f" There are {left}." if left is not None else ""
        text += ("The first begins at ", first_not_before, ending)
    return text
