"""Phrases that several parts of a message share: titles, outcomes, impacts and notices. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from relay.approvals.admission import hold_caveat
from relay.approvals.limits import LIMIT_NOTICE, describe_waits
from relay.approvals.status import ApprovalStatus
from relay.chat.cards.card import PrincipalRef, Text, Tone, join_texts
from relay.events.timestamps import duration_text

MAX_NAMES = 10
"""Machines or people that a text names; the rest are counted."""
UNNAMED_MACHINES = "no machine that is named"
WHAT_HOLD_DOES = (
    "Hold keeps this relay from starting it, whatever rules and votes say; other relays and Azure "
    "Resource Manager can still approve."
)
"""Part of each message with a button to hold."""
_OUTCOMES = {
    "completed": "It is over: Azure has completed it.",
    "canceled": "Azure has taken it back: it does not happen.",
}
_UNKNOWN_OUTCOME = "It is not in Azure's document any more; whether it happened is not known."
_IMPACTS = {
    "freeze": "is paused{duration}: memory and open files stay, connections can drop",
    "reboot": "is rebooted: what is in memory is lost",
    "redeploy": "is moved to another host: memory and temporary disks are lost",
    "preempt": "is taken away, being a Spot machine: its temporary disks are lost",
    "terminate": "is deleted",
}


def join_names(names: Sequence[str], *, most: int = MAX_NAMES) -> str:
    """Return names in one line: the first ``most``, and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def principals_text(principals: Sequence[str]) -> Text:
    """Return principals in one line: the first `MAX_NAMES`, and how many more there are."""
    text = join_texts([(PrincipalRef(principal),) for principal in principals[:MAX_NAMES]], ", ")
    more = len(principals) - MAX_NAMES
    return (*text, f" and {more} more") if more > 0 else text


def event_title(status: ApprovalStatus) -> str:
    """Return the type of an event and its machines."""
    event = status.occurrence.event
    machines = join_names(event.resources, most=3) or UNNAMED_MACHINES
    return f"{event.event_type or 'Maintenance'} of {machines}"


def follow_up_subject(statuses: Sequence[ApprovalStatus]) -> str:
    """Return the heading of a message that follows, where the platform has no threads.

    It distinguishes events of the same machines.
    """
    if len(statuses) > 1:
        return f"{len(statuses)} maintenance events"
    event_id = statuses[0].occurrence.event.event_id
    return f"{event_title(statuses[0])} ({event_id[:8]})"


def event_tone(status: ApprovalStatus) -> Tone:
    """Return the state that the color of a message shows."""
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


def event_outcome_text(outcome: str | None) -> str:
    """Return how an event ended; ``outcome`` is the field of ``event.ended``."""
    return _OUTCOMES.get(outcome or "unknown", _UNKNOWN_OUTCOME)


def impact_text(event_type: str | None, seconds: int | None, machines: int = 1) -> str:
    """Return what an event does to this many machines, and for how many ``seconds``.

    Source: Azure's documentation of Scheduled Events, event types.
    """
    unknown_impact = f"goes through “{event_type}”" if event_type else "goes through maintenance"
    impact = _IMPACTS.get((event_type or "").lower(), unknown_impact)
    if "{duration}" in impact:
        duration = f" for about {duration_text(seconds)}" if seconds is not None else " for a while"
        impact = impact.replace("{duration}", duration)
    elif seconds is not None:
        impact += f"; it takes about {duration_text(seconds)}"
    return f"{'The machine' if machines == 1 else 'Each machine'} {impact}."


def azure_proceeds_regardless_notice(
    statuses: Iterable[ApprovalStatus], *, can_hold: bool
) -> Iterator[Text]:
    """Yield the notice that Azure proceeds at NotBefore, if any event still has one.

    ``can_hold``: an event can be held now, so say what that does.
    """
    open_statuses = [status for status in statuses if status.is_scheduled_and_before_not_before]
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
    """Return for which limits an event waits, and until when if time alone frees a slot."""
    text: Text = (sentence(describe_waits(status.waiting_for)).removesuffix("."),)
    ends = [wait.until for wait in status.waiting_for]
    known = [end for end in ends if end is not None]
    return (
        (*text, ", until ", max(known), ".") if known and len(known) == len(ends) else (*text, ".")
    )


def sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:]}."
