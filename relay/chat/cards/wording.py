"""Phrases that several parts of a message share: titles, outcomes, impacts and notices. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from relay.approvals.admission import hold_caveat
from relay.approvals.limits import LIMIT_NOTICE, describe_waits
from relay.approvals.status import ApprovalStatus
from relay.chat.cards.card import Tone
from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import parse_timestamp
from relay.sentences import Text, event_subject, event_told, few_machines, sentence
from relay.store import TrackedEvent

WHAT_HOLD_DOES = (
    "Hold keeps this relay from starting it, whatever rules and votes say; other relays and Azure "
    "Resource Manager can still approve."
)
"""Part of each message with a button to hold."""


def event_title(status: ApprovalStatus) -> str:
    event = status.occurrence.event
    return event_subject(event.event_type, event.resources)


def follow_up_subject(statuses: Sequence[ApprovalStatus]) -> str:
    """Return the heading of a message that follows, where the platform has no threads.

    It distinguishes events of the same machines.
    """
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


def azure_proceeds_regardless_notice(
    statuses: Iterable[ApprovalStatus], *, can_hold: bool
) -> Iterator[Text]:
    """Yield the notice that Azure proceeds at NotBefore, if any event still has one.

    ``can_hold``: an event can be held now, so say what that does.
    """
    open_statuses = [status for status in statuses if status.is_startable]
    held = [status for status in open_statuses if status.is_held]
    if held:
        yield from dict.fromkeys((sentence(hold_caveat(status)),) for status in held)
    elif can_hold:
        yield (WHAT_HOLD_DOES,)
    if any(status.waiting_for for status in open_statuses):
        yield (sentence(LIMIT_NOTICE),)
    elif not held and any(status.not_before is not None for status in open_statuses):
        yield ("Azure proceeds at NotBefore regardless.",)


def limit_waits_text(status: ApprovalStatus) -> Text:
    text: Text = (sentence(describe_waits(status.waiting_for)).removesuffix("."),)
    ends = [wait.until for wait in status.waiting_for]
    known = [end for end in ends if end is not None]
    return (
        (*text, ", until ", max(known), ".") if known and len(known) == len(ends) else (*text, ".")
    )


MAX_HISTORY_LINES = 20
"""Lines in one reply. The newest stay; a first line counts the others."""


def history_lines(
    history: Sequence[tuple[TrackedEvent, CloudEvent]], *, is_grouped: bool, is_cut: bool = False
) -> tuple[Text, ...]:
    """Return the lines of one reply, oldest first.

    In a grouped message each line names the machines of its event. ``is_cut``: more happened
    before the history.
    """
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
    """Return the line that voting has closed, if votes are missing; nothing in other cases.

    It is for a message that cannot be edited and still asks for votes. ``since`` is the refresh
    time that was recorded for the message: voting that closed before it was told already.
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
