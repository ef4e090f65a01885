"""What is said about one event, in the same words everywhere. Pure: how it stands comes in, a card comes out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from relay.approvals.authorize import HOLD_NOTICE
from relay.approvals.request import DecisionKind
from relay.approvals.rules import Quorum, eligible_voters
from relay.approvals.status import ApprovalStatus, approval_state
from relay.chat.cards.card import Button, Card, Link, PrincipalRef, Text, Tone

MAX_NAMES = 10
"""Machines, and people, that are named; of more, the number is said."""

_HAPPENS = {
    "freeze": "is paused{for_}: memory and open files stay, connections can drop",
    "reboot": "is rebooted: what is in memory is lost",
    "redeploy": "is moved to another host: memory and temporary disks are lost",
    "preempt": "is taken away, being a Spot machine: its temporary disks are lost",
    "terminate": "is deleted",
}
ENDED = {
    "completed": "It is over: Azure has completed it.",
    "canceled": "Azure has taken it back: it does not happen.",
    "unknown": "It is not in Azure's document any more; whether it happened is not known.",
}
"""How an event ended, by its outcome."""
LABELS: dict[DecisionKind, str] = {
    "approve": "Approve",
    "hold": "Hold",
    "release": "Release the hold",
}
"""What buttons say."""


def available_decisions(standing: ApprovalStatus) -> tuple[DecisionKind, ...]:
    """The decisions that the gate would not refuse for the event as it stands, whoever takes them."""
    if not standing.is_open or standing.mode == "off":
        return ()
    choices: list[DecisionKind] = []
    if _can_be_approved(standing):
        choices.append("approve")
    if standing.active_holds:
        choices.append("release")
    elif not standing.is_claimed:
        choices.append("hold")
    return tuple(choices)


def refresh_time(standings: Iterable[ApprovalStatus]) -> datetime | None:
    """When time alone will change what a message should show; None: never."""
    moments = [
        moment
        for one in standings
        if one.is_open
        for moment in (one.voting_closes_at, one.not_before)
        if moment is not None and moment > one.now
    ]
    return min(moments, default=None)


def _can_be_approved(standing: ApprovalStatus) -> bool:
    closed = standing.voting_closes_at is not None and standing.now >= standing.voting_closes_at
    settled = standing.active_grant is not None or standing.is_claimed or standing.refused_by_imds
    return standing.quorum is not None and not closed and not settled


def event_card(
    standing: ApprovalStatus, scope: str, *, link: Link | None, code: str | None
) -> Card:
    """The message about one event. ``link`` None: nothing can be decided from this message."""
    event = standing.occurrence.event
    buttons = decision_buttons(standing, link)
    facts: list[tuple[str, Text]] = [
        ("Machines", (join_names(event.resources) or "none is named",)),
        ("What happens", (impact_text(event.event_type, event.duration, len(event.resources)),)),
        ("Who started it", (_started_by(event.event_source),)),
    ]
    if event.description:
        facts.append(("Azure says", (event.description,)))
    if standing.occurrence.live:
        facts += _approval(standing)
    return Card(
        title=event_title(standing),
        tone=event_tone(standing),
        summary=_summary(standing),
        facts=tuple(facts),
        notes=(*_notes(standing), *(() if link is not None else _elsewhere(standing))),
        buttons=buttons,
        code=code if any(one.url for one in buttons) else None,
        footer=f"{event.event_id} · {scope}",
    )


def event_title(standing: ApprovalStatus) -> str:
    """What it is, and of which machines."""
    event = standing.occurrence.event
    return f"{event.event_type or 'Maintenance'} of {join_names(event.resources, most=3) or 'no machine that is named'}"


def join_names(names: Sequence[str], *, most: int = MAX_NAMES) -> str:
    """Names in one line; of many, the first and how many more."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def impact_text(event_type: str | None, seconds: int | None, machines: int = 1) -> str:
    """What the machines go through (Azure, "Scheduled Events", the types of events)."""
    known = _HAPPENS.get(
        (event_type or "").lower(),
        f"goes through “{event_type}”" if event_type else "goes through maintenance",
    )
    for_ = f" for about {_span(seconds)}" if seconds is not None else " for a while"
    text = known.replace("{for_}", for_)
    if seconds is not None and "{for_}" not in known:
        text += f"; it takes about {_span(seconds)}"
    return f"{'The machine' if machines == 1 else 'Each machine'} {text}."


def _span(seconds: int) -> str:
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


def _started_by(source: str | None) -> str:
    match (source or "").lower():
        case "platform":
            return "Azure itself"
        case "user":
            return "a user of the subscription"
        case _:
            return source or "not said"


def _summary(standing: ApprovalStatus) -> Text:
    occurrence, event, due = standing.occurrence, standing.occurrence.event, standing.not_before
    if not occurrence.live:
        return (ENDED.get(occurrence.outcome or "unknown", ENDED["unknown"]),)
    if event.started:
        return ("Azure has begun.",)
    if due is None:
        return ("Azure has not said when it begins.",)
    if standing.now >= due:
        return ("NotBefore was ", due, ": Azure can begin at any moment.")
    return (
        "Azure begins at ",
        due,
        " or soon after, whether or not anybody answers; earlier only when it is approved.",
    )


def _approval(standing: ApprovalStatus) -> Iterator[tuple[str, Text]]:
    if standing.rule is None:
        yield "Rule", ("no rule allows this relay to approve it",)
        return
    if standing.quorum is None:
        yield "Rule", (f"{standing.rule.name}: approved automatically",)
    else:
        yield "Rule", (f"{standing.rule.name}: ", *_asks(standing.quorum))
        yield "Votes", _votes(standing)
    if standing.active_holds:
        yield (
            "Held by",
            _joined([_holder(one.principal, one.expires) for one in standing.active_holds]),
        )


def _asks(asks: Quorum) -> Text:
    who = [
        (one if one.startswith(("group:", "person:")) else PrincipalRef(one),) for one in asks.from_
    ]
    votes: Text = (f"{asks.votes} vote{'s' if asks.votes != 1 else ''} from ", *_joined(who))
    return (*votes, ", for every machine") if asks.each_resource else votes


def _votes(standing: ApprovalStatus) -> Text:
    text: Text = (f"{standing.vote_count} of {standing.votes_required}",)
    if standing.counted_votes:
        text += (
            ": ",
            *_joined(
                [(PrincipalRef(one.principal),) for one in standing.counted_votes[:MAX_NAMES]]
            ),
        )
    if standing.is_open and standing.votes_missing and standing.quorum is not None:
        have = {standing.person(one.principal) for one in standing.counted_votes}
        may = [
            one
            for one in sorted(eligible_voters(standing.quorum, standing.groups, standing.people))
            if standing.person(one) not in have
        ]
        text += (
            f"; {standing.votes_missing} missing, from ",
            *_joined([(PrincipalRef(one),) for one in may[:MAX_NAMES]]),
        )
        if len(may) > MAX_NAMES:
            text += (f" and {len(may) - MAX_NAMES} more",)
        if (
            standing.voting_closes_at is not None
            and standing.voting_closes_at != standing.not_before
        ):
            text += (", until ", standing.voting_closes_at)
    if standing.uncovered_resources and standing.is_open:
        text += (f"; nobody has spoken for {join_names(standing.uncovered_resources)} yet",)
    return text


def _holder(principal: str, until: datetime | None) -> Text:
    return (
        (PrincipalRef(principal), " until ", until)
        if until is not None
        else (PrincipalRef(principal),)
    )


def _joined(texts: Sequence[Text]) -> Text:
    return tuple(
        part for number, text in enumerate(texts) for part in ((", ", *text) if number else text)
    )


def _notes(standing: ApprovalStatus) -> Iterator[Text]:
    if not standing.occurrence.live:
        return
    state = approval_state(standing)
    if standing.mode == "dry-run":
        yield ("Approvals are a dry run: no StartRequest is sent.",)
    if standing.mode == "off" and standing.is_open:
        yield ("Approvals are off: nothing can be decided now.",)
    if state == "granted":
        yield ("It is approved: the StartRequest is about to be sent.",)
    if state in ("sent", "accepted"):
        yield (
            "It is approved"
            + (
                ": Azure has accepted the StartRequest."
                if state == "accepted"
                else ", and the StartRequest was sent."
            ),
        )
    if state == "failed":
        yield ("The StartRequest failed; the thread says why.",)
    yield from proceeds_notice([standing])


def _elsewhere(standing: ApprovalStatus) -> Iterator[Text]:
    """Where to decide when the message itself leads nowhere."""
    verbs = [
        verb for verb in ("approve", "hold", "release") if verb in available_decisions(standing)
    ]
    if verbs:
        yield (
            f"To decide, on the machine: imds-relay {'|'.join(verbs)} {standing.occurrence.event.event_id}",
        )


def proceeds_notice(standings: Iterable[ApprovalStatus]) -> Iterator[Text]:
    """What nobody must forget: that Azure proceeds."""
    ahead = [one for one in standings if one.is_open]
    if any(one.active_holds for one in ahead):
        yield (f"{HOLD_NOTICE[0].upper()}{HOLD_NOTICE[1:]}.",)
    elif any(one.not_before is not None for one in ahead):
        yield ("Azure proceeds at NotBefore regardless.",)


def event_tone(standing: ApprovalStatus) -> Tone:
    """What catches the eye."""
    if not standing.occurrence.live:
        return "over"
    if standing.occurrence.event.started:
        return "running"
    if standing.active_holds:
        return "held"
    return "approved" if standing.active_grant is not None or standing.is_claimed else "waiting"


def decision_buttons(standing: ApprovalStatus, link: Link | None) -> tuple[Button, ...]:
    """The decisions that make sense now."""
    if link is None:
        return ()
    event = standing.occurrence.event
    return tuple(
        Button(
            choice,
            LABELS[choice],
            event.event_id,
            standing.occurrence.revision,
            confirmation_question(choice, standing),
            link(standing, choice),
        )
        for choice in available_decisions(standing)
    )


def confirmation_question(choice: DecisionKind, standing: ApprovalStatus) -> Text:
    """What is asked before a decision counts."""
    what = event_title(standing)
    match choice:
        case "approve":
            return (f"{what}: it may begin within seconds, and cannot be taken back.",)
        case "hold":
            return (f"{what}: {HOLD_NOTICE}.",)
        case "release":
            return (f"{what}: votes and rules are weighed again, and it may begin within seconds.",)
