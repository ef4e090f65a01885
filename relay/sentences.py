"""Says each CloudEvent in one sentence, for chat, log, page and command line. Pure.

``data`` is the data of a CloudEvent, with the fields that docs/events.md names; the name of an
event is its type without prefix and version. Times and people stay objects in a `Text`, so that a
chat can show a time in the reader's time zone, and a person by name. Everybody else takes `said`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from relay.events.data_types import LimitWait, remarks_in
from relay.events.model import ScheduledEvent
from relay.events.timestamps import duration_text, parse_timestamp
from relay.settings import MAX_NAMES, join_names

LIMIT_NOTICE = (
    "a limit delays only what this relay would start: Azure proceeds at NotBefore regardless"
)
"""Part of every text about an event that waits (docs/guarantees.md#a-limit-delays-this-relay-only).
"""
UNNAMED_MACHINES = "no machine that is named"
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
_VOID_REASONS = {
    "changed": "the event has changed",
    "expired": "they have expired",
    "ended": "the event has ended",
}
_DECISIONS = {
    "approve": "voted to approve",
    "hold": "put it on hold",
    "release": "released the hold",
}
RELAY_EVENTS = {
    "relay.source-lost": "Azure's metadata service does not answer this relay",
    "relay.source-recovered": "Azure's metadata service answers this relay again",
    "relay.silent": "No agent of a scope is heard of",
    "relay.sink-failing": "{sink} takes nothing",
    "relay.sink-recovered": "{sink} takes events again",
    "relay.sink-disabled": "{sink} is disabled until somebody resumes it",
    "relay.dead-lettered": "What {sink} did not take is given up",
    "relay.store-failing": "This relay cannot write its state file, and takes no approvals",
    "relay.clock-skewed": "The clocks of this relay and of {sink} differ",
    "relay.ping": "This is imds-relay",
}


@dataclass(frozen=True, slots=True)
class PrincipalRef:
    """A principal, which each platform shows under the name that its readers know."""

    principal: str


Text = tuple[str | datetime | PrincipalRef, ...]
"""A text in pieces: plain strings, times in UTC, and people."""


def said(name: str, data: Mapping[str, Any]) -> str:
    """Return the sentence of an event, and what Azure's document said before a change."""
    text = render(event_told(name, data), words=str, person=str)
    if name != "event.updated":
        return text
    before = [
        f"{key} {join_names(value) if isinstance(value, list) else value}"
        for key, value in data["changed"].items()
    ]
    return f"{text} Before: {'; '.join(before)}."


def event_subject(event_type: str | None, resources: Sequence[str]) -> str:
    return f"{event_type or 'Maintenance'} of {few_machines(resources)}"


def few_machines(resources: Sequence[str]) -> str:
    return join_names(resources, most=3) or UNNAMED_MACHINES


def event_told(name: str, data: Mapping[str, Any]) -> Text:
    """Return the sentence of an event, for readers who know which event of Azure it is about."""
    match name:
        case "event.scheduled":
            machines = join_names(data["resources"]) or UNNAMED_MACHINES
            return (f"Azure announced a {data['eventType'] or 'maintenance'} of {machines}.",)
        case "event.updated":
            return (_update_sentence(data),)
        case "event.started":
            approved = ", as this relay had approved" if data["approvedByRelay"] else ""
            return (f"Azure began{approved}.",)
        case "event.ended":
            return (event_outcome_text(data["outcome"]),)
        case "approval.recorded" | "approval.granted" | "approval.refused":
            return _decision_sentence(name, data)
        case "approval.voided":
            reason = _VOID_REASONS.get(data["why"], data["why"])
            return (f"The votes count no more: {reason}{_limit_waits_clause(data, 'waitedFor')}.",)
        case "approval.reminder":
            return missing_votes_reminder_text(data)
        case "standing-hold.created" | "standing-hold.ended" | "standing-hold.expired":
            return _standing_hold_change_sentence(name, data)
        case "startrequest.accepted" | "startrequest.failed":
            failure = f"The StartRequest failed: {data['reason'] or 'no reason is known'}."
            is_accepted = name == "startrequest.accepted"
            return ("Azure accepted the StartRequest." if is_accepted else failure,)
        case _:
            subject = RELAY_EVENTS.get(name, name).replace("{sink}", data.get("sink") or "a sink")
            return (f"{subject}: {data.get('reason') or 'no reason is known'}.",)


def missing_votes_reminder_text(data: Mapping[str, Any]) -> Text:
    count = f"{data['votes']} of {data['required']} votes"
    text: Text = (f"Reminder: {count}, {data['missing']} missing",)
    if data["mayVote"]:
        text += (", from ", *principals_text(data["mayVote"]))
    closes_at = parse_timestamp(data["closes"])
    if closes_at is not None:
        text += ("; voting closes at ", closes_at)
    return (*text, ". Azure proceeds at NotBefore regardless.")


def _standing_hold_change_sentence(name: str, data: Mapping[str, Any]) -> Text:
    principal, events = PrincipalRef(data["principal"]), describe_conditions(data)
    if name == "standing-hold.expired":
        return ("The standing hold of ", principal, f" on {events} has expired.")
    if name == "standing-hold.ended":
        reason = f" (“{data['endReason']}”)" if data["endReason"] else ""
        by = PrincipalRef(data["endedBy"])
        return (by, " ended the standing hold of ", principal, f" on {events}{reason}.")
    starts, ends = (parse_timestamp(data[key]) or "" for key in ("starts", "ends"))
    reason = f" (“{data['reason']}”). {sentence(data['notice'])}"
    return (principal, f" holds {events} from ", starts, " until ", ends, reason)


def _update_sentence(data: Mapping[str, Any]) -> str:
    """Name the changed fields, and say whether votes are lost: only if the revision changed."""
    fields = ", ".join(data["changed"])
    revision_before = ScheduledEvent.from_cloudevent_data({**data, **data["changed"]}).revision
    if revision_before == data["revision"]:
        return f"Azure changed {fields}."
    return f"Azure changed {fields}; votes on the former state do not count."


def _decision_sentence(name: str, data: Mapping[str, Any]) -> Text:
    principal = PrincipalRef(data["principal"])
    if name == "approval.refused":
        return (principal, f" tried to {data['decision']}, refused: {data['refusal']}.")
    votes = f"{data['votes']} of {data['required']}"
    if name == "approval.granted":
        quorum = f"{votes} votes" if data["required"] else "no votes needed"
        return (f"Approved by rule {data['rule']}: {quorum}.",)
    count = f", {votes}" if data["decision"] == "approve" and data["required"] else ""
    given = [(name, text) for name, text in remarks_in(data).items() if text]
    remarks = [f"“{text}”" if name == "reason" else f"{name} {text}" for name, text in given]
    why = f" ({', '.join(remarks)})" if remarks else ""
    notice = f" {sentence(data['notice'])}" if "notice" in data else ""
    waits = (
        f" It is approved{_limit_waits_clause(data, 'waitingFor')}." if "waitingFor" in data else ""
    )
    text = f" {_DECISIONS[data['decision']]}{count}{why}.{waits}{notice}"
    dry_run = " It is a dry run." if data.get("dryRun") else ""
    return (principal, text, *standing_holds_text(data), dry_run)


def standing_holds_text(data: Mapping[str, Any]) -> Text:
    """Return whose standing holds an event or answer names, as a sentence; nothing: nobody's."""
    text: Text = ()
    for hold in data.get("standingHolds", ()):
        until = parse_timestamp(hold["until"])
        text += (", and by " if text else " It is held by ", PrincipalRef(hold["principal"]))
        text += (" until ", until) if until is not None else ()
    return (*text, " (standing hold).") if text else ()


def _limit_waits_clause(data: Mapping[str, Any], field: str) -> str:
    limits = join_names([wait["limit"] for wait in data.get(field, ())])
    if not limits:
        return ""
    if field == "waitedFor":
        return f", while the event waited for limit {limits}"
    return f", and waits for limit {limits}; {LIMIT_NOTICE}"


def describe_waits(waits: Iterable[LimitWait]) -> str:
    """Return for what an event waits. The notice that Azure proceeds follows it."""
    return "it waits for " + " and for ".join(map(_describe_wait, waits))


def _describe_wait(wait: LimitWait) -> str:
    plural = "s" if wait["max"] != 1 else ""
    text = f"limit {wait['limit']} (at most {wait['max']} machine{plural} at once)"
    if wait["behind"] is not None:
        return f"{text}: event {wait['behind']} comes first"
    verb = "has" if len(wait["machines"]) == 1 else "have"
    return f"{text}: {join_names(wait['machines'])} {verb} the slots"


def describe_conditions(hold: Mapping[str, Any]) -> str:
    """Return which events a standing hold is about; ``hold`` is its JSON."""
    texts = [f"{key} {_condition_text(value)}" for key, value in hold["match"].items()]
    return "; ".join(texts) or "every event"


def _condition_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    return join_names(value, separator=" ")


def event_outcome_text(outcome: str | None) -> str:
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


def principals_text(principals: Sequence[str]) -> Text:
    text = join_texts([(PrincipalRef(principal),) for principal in principals[:MAX_NAMES]], ", ")
    more = len(principals) - MAX_NAMES
    return (*text, f" and {more} more") if more > 0 else text


def sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:]}."


def join_texts(texts: Iterable[Text], separator: str) -> Text:
    joined: list[str | datetime | PrincipalRef] = []
    for text in texts:
        joined += [separator, *text]
    return tuple(joined[1:])


def utc_time(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def render(
    text: Text,
    *,
    words: Callable[[str], str],
    person: Callable[[str], str],
    time: Callable[[datetime], str] = utc_time,
) -> str:
    """Return a text in the markup of a platform."""
    pieces = []
    for piece in text:
        match piece:
            case datetime():
                pieces.append(time(piece))
            case PrincipalRef():
                pieces.append(person(piece.principal))
            case str():
                pieces.append(words(piece))
    return "".join(pieces)
