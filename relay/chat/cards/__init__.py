"""What a message says, the same on every platform. Pure: an approval status makes a card.

`event_card` is the card about one event, `grouped_card` that about several which appeared together.
A card says when Azure begins, what happens to which machines, which rule and votes decide, who
holds the event, and what can be decided now. `relay.approvals.status` explains the terms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from operator import itemgetter

from relay.approvals.admission import hold_caveat
from relay.approvals.rules import Quorum
from relay.approvals.standing_holds import latest_ending_holds
from relay.approvals.status import ApprovalStatus, approval_state
from relay.chat.cards.card import Buttons, Card, EventLine, available_decisions
from relay.chat.cards.wording import (
    Tone,
    event_title,
    event_tone,
    limit_waits_text,
    runbooks_of,
    time_left,
)
from relay.sentences import (
    LIMIT_NOTICE,
    PrincipalRef,
    Text,
    event_outcome_text,
    impact_text,
    join_texts,
    principals_text,
    sentence,
)
from relay.settings import MAX_NAMES, join_names

WHAT_HOLD_DOES = (
    "Hold keeps this relay from starting it, whatever rules and votes say; other relays and Azure "
    "Resource Manager can still approve."
)
_SOURCES = {"platform": "Azure itself", "user": "a user of the subscription"}
_STATE_NOTES = {
    "granted": "It is approved: the StartRequest is about to be sent.",
    "sent": "It is approved, and the StartRequest was sent.",
    "accepted": "It is approved: Azure has accepted the StartRequest.",
    "failed": "The StartRequest failed; the thread says why.",
}


def event_card(status: ApprovalStatus, buttons: Buttons) -> Card:
    """Return the card about one event. Without buttons it names the command that decides."""
    event = status.occurrence.event
    notes = list(_note_texts(status))
    decisions = available_decisions(status)
    notes += _hold_and_regardless_notices([status])
    possible_decisions = "|".join(decisions)
    if buttons.lead_nowhere and possible_decisions:
        command = f"imds-relay {possible_decisions} {status.occurrence.reference}"
        notes.append((f"To decide, on the machine: {command}",))
    return Card(
        title=event_title(status),
        tone=event_tone(status),
        summary=_begin_or_outcome_text(status),
        facts=(*_event_facts(status), *_approval_facts(status)),
        notes=tuple(notes),
        buttons=buttons.about(status),
        footer=f"{event.event_id} · {status.occurrence.scope}",
        runbooks=runbooks_of([status]),
    )


def _begin_or_outcome_text(status: ApprovalStatus) -> Text:
    not_before = status.not_before
    if not status.occurrence.live:
        return (event_outcome_text(status.occurrence.outcome),)
    if status.occurrence.event.is_started:
        return ("Azure has begun.",)
    if not_before is None:
        return ("Azure has not said when it begins.",)
    if status.now >= not_before:
        return ("NotBefore was ", not_before, ": Azure can begin at any moment.")
    ending = " or soon after, whether or not anybody answers; earlier only when it is approved."
    left = time_left(status, not_before)
    if left is not None:
        ending += f" There are {left}."
    return ("Azure begins at ", not_before, ending)


def _event_facts(status: ApprovalStatus) -> Iterator[tuple[str, Text]]:
    event = status.occurrence.event
    yield "Machines", (join_names(event.resources) or "none is named",)
    yield "What happens", (impact_text(event.event_type, event.duration, len(event.resources)),)
    source = event.event_source or "not said"
    yield "Who started it", (_SOURCES.get(source.lower(), source),)
    if event.description:
        yield "Azure says", (event.description,)


def _approval_facts(status: ApprovalStatus) -> Iterator[tuple[str, Text]]:
    if not status.occurrence.live:
        return
    if status.rule is None:
        yield "Rule", ("no rule allows this relay to approve it",)
        return
    if status.quorum is None:
        yield "Rule", (f"{status.rule.name}: approved automatically",)
    else:
        yield "Rule", (f"{status.rule.name}: ", *_required_votes_text(status.quorum))
        # Votes are void once the event has started, or changed after its StartRequest. Then they
        # are missing again, but the relay sends no second StartRequest.
        is_void = status.is_grant_sent_or_accepted and status.votes_missing > 0
        if not status.occurrence.event.is_started and not is_void:
            votes: Text = (f"{status.vote_count} of {status.votes_required}",)
            voters = [vote.principal for vote in status.counted_votes[:MAX_NAMES]]
            votes += (": ", *principals_text(voters)) if voters else ()
            yield "Votes", (*votes, *_missing_votes_text(status))
    if status.is_held:
        holds: list[Text] = []
        for hold in status.active_holds:
            until = (" until ", hold.expires) if hold.expires is not None else ()
            holds.append((PrincipalRef(hold.principal), *until))
        for standing in latest_ending_holds(status.active_standing_holds):
            reason = f" by a standing hold (“{standing.reason}”)"
            holds.append((PrincipalRef(standing.principal), " until ", standing.ends, reason))
        yield "Held by", join_texts(holds, ", ")


def _required_votes_text(quorum: Quorum) -> Text:
    voters: list[Text] = [
        (voter if voter.startswith(("group:", "person:")) else PrincipalRef(voter),)
        for voter in quorum.from_
    ]
    plural = "s" if quorum.votes != 1 else ""
    text: Text = (f"{quorum.votes} vote{plural} from ", *join_texts(voters, ", "))
    return (*text, ", for every machine") if quorum.each_resource else text


def _missing_votes_text(status: ApprovalStatus) -> Text:
    if not status.is_startable or not status.votes_missing:
        return ()
    uncovered = join_names(status.uncovered_resources)
    if status.is_past_voting_close_time and status.voting_closes_at is not None:
        text: Text = ("; voting closed at ", status.voting_closes_at)
        return (*text, f"; nobody has spoken for {uncovered}") if uncovered else text
    text = (
        f"; {status.votes_missing} missing, from ",
        *principals_text(status.voters_without_vote),
    )
    if status.voting_closes_at is not None and status.voting_closes_at != status.not_before:
        text += (", until ", status.voting_closes_at)
        left = time_left(status, status.voting_closes_at)
        text += (f" ({left})",) if left is not None else ()
    if uncovered:
        text += (f"; nobody has spoken for {uncovered} yet",)
    return text


def _note_texts(status: ApprovalStatus) -> Iterator[Text]:
    if not status.occurrence.live:
        return
    if status.mode == "dry-run":
        yield ("Approvals are a dry run: no StartRequest is sent.",)
    if status.mode == "off" and status.is_startable:
        yield ("Approvals are off: nothing can be decided now.",)
    state = approval_state(status)
    if state == "granted" and status.mode == "dry-run":
        yield ("It would be approved.",)
    elif state in _STATE_NOTES:
        yield (_STATE_NOTES[state],)
    if status.waiting_for:
        yield limit_waits_text(status)


def _hold_and_regardless_notices(statuses: Sequence[ApprovalStatus]) -> Iterator[Text]:
    """Yield what a hold does, and that Azure proceeds at NotBefore."""
    open_statuses = [status for status in statuses if status.is_startable]
    held = [status for status in open_statuses if status.is_held]
    if held:
        yield from dict.fromkeys((sentence(hold_caveat(status)),) for status in held)
    elif any("hold" in available_decisions(status) for status in open_statuses):
        yield (WHAT_HOLD_DOES,)
    if any(status.waiting_for for status in open_statuses):
        yield (sentence(LIMIT_NOTICE),)
    elif not held and any(status.not_before is not None for status in open_statuses):
        yield ("Azure proceeds at NotBefore regardless.",)


MAX_LISTED_EVENTS = 10
"""Events that get a line of their own; the rest are counted."""
_TONES_BY_URGENCY: tuple[Tone, ...] = ("waiting", "held", "running", "approved", "over")


def grouped_card(statuses: Sequence[ApprovalStatus], buttons: Buttons) -> Card:
    """Return the card about several events, at least one."""
    live = [status for status in statuses if status.occurrence.live]
    # Those that wait for votes come first, then by NotBefore.
    ordered = sorted(
        live or statuses,
        key=lambda status: (not _waits_for_votes(status), *not_before_order(status)),
    )
    lines = tuple(
        EventLine(event_line(status), buttons.about(status))
        for status in ordered[:MAX_LISTED_EVENTS]
    )
    notes: list[Text] = []
    omitted = len(ordered) - len(lines)
    if omitted:
        command = "“imds-relay events” on a machine of this scope"
        notes.append((f"And {omitted} more: {command} lists them, and decides about them.",))
    notes += _hold_and_regardless_notices(live)
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


def not_before_order(status: ApprovalStatus) -> tuple[bool, datetime, int]:
    """Return what sorts statuses by NotBefore; those without one come last."""
    return status.not_before is None, status.not_before or status.now, status.occurrence.id


def event_line(status: ApprovalStatus) -> Text:
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
    elif status.is_startable and status.waiting_for:
        limits = join_names([wait["limit"] for wait in status.waiting_for])
        text += (f", waits for limit {limits}",)
    elif status.is_granted_or_claimed:
        text += (", approved",)
    elif status.votes_required:
        text += (f", {status.vote_count} of {status.votes_required} votes",)
    return text


def _waits_for_votes(status: ApprovalStatus) -> bool:
    return status.is_startable and status.votes_missing > 0 and not status.is_past_voting_close_time


def _summary_text(statuses: Sequence[ApprovalStatus]) -> Text:
    types = Counter(status.occurrence.event.event_type or "Maintenance" for status in statuses)
    parts = [", ".join(f"{count} × {event_type}" for event_type, count in types.most_common())]
    open_statuses = [status for status in statuses if status.is_startable]
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
