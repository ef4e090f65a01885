"""The lines in the thread of a message: one for each recorded CloudEvent. Pure.

`relay.chat.message_planner` asks for them. ``data`` is the data of a CloudEvent, with the fields
that docs/events.md names; the name of an event is its type without prefix and version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from relay.approvals.limits import LIMIT_NOTICE
from relay.approvals.standing_holds import describe_conditions
from relay.approvals.status import ApprovalStatus
from relay.chat.cards.card import PrincipalRef, Text
from relay.chat.cards.wording import (
    UNNAMED_MACHINES,
    event_outcome_text,
    join_names,
    principals_text,
    sentence,
)
from relay.events.cloudevent import CloudEvent
from relay.events.model import ScheduledEvent
from relay.events.remarks import describe_remarks
from relay.events.timestamps import parse_timestamp
from relay.store import TrackedEvent

MAX_HISTORY_LINES = 20
"""Lines in one reply. The newest stay; a first line counts the others."""

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
            line = (
                f"{join_names(occurrence.event.resources, most=3) or UNNAMED_MACHINES}: ",
                *line,
            )
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
    if (
        not status.is_scheduled_and_before_not_before
        or not status.votes_missing
        or status.is_grant_sent_or_accepted
    ):
        return ()
    count = f"{status.vote_count} of {status.votes_required}"
    return ((closed_at, f": Voting closed, with {count} votes."),)


def timeline_line(event: CloudEvent) -> Text:
    """Return one line of history. A ``relay.*`` event is a message that consists of this line."""
    text = _cloudevent_sentence(event.name, event.data)
    at = parse_timestamp(event.attributes.get("time"))
    return (at, ": ", *text) if at is not None else text


def _cloudevent_sentence(name: str, data: Mapping[str, Any]) -> Text:
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
            return (_start_request_outcome_sentence(name, data),)
        case _:
            subject = RELAY_EVENTS.get(name, name).replace("{sink}", data.get("sink") or "a sink")
            return (f"{subject}: {data.get('reason') or 'no reason is known'}.",)


def _start_request_outcome_sentence(name: str, data: Mapping[str, Any]) -> str:
    if name == "startrequest.accepted":
        return "Azure accepted the StartRequest."
    return f"The StartRequest failed: {data['reason'] or 'no reason is known'}."


def missing_votes_reminder_text(data: Mapping[str, Any]) -> Text:
    """Return what an ``approval.reminder`` says."""
    count = f"{data['votes']} of {data['required']} votes"
    text: Text = (f"Reminder: {count}, {data['missing']} missing",)
    if data["mayVote"]:
        text += (", from ", *principals_text(data["mayVote"]))
    closes_at = parse_timestamp(data["closes"])
    if closes_at is not None:
        text += ("; voting closes at ", closes_at)
    dry_run = " It is a dry run." if data.get("dryRun") else ""
    return (*text, f". Azure proceeds at NotBefore regardless.{dry_run}")


def _standing_hold_change_sentence(name: str, data: Mapping[str, Any]) -> Text:
    principal, events = PrincipalRef(data["principal"]), describe_conditions(data)
    notice = sentence(data["notice"])
    if name == "standing-hold.expired":
        return ("The standing hold of ", principal, f" on {events} has expired.")
    if name == "standing-hold.ended":
        reason = f" (“{data['endReason']}”)" if data["endReason"] else ""
        by = PrincipalRef(data["endedBy"])
        return (by, " ended the standing hold of ", principal, f" on {events}{reason}.")
    times = [parse_timestamp(data[key]) for key in ("starts", "ends")]
    starts, ends = (time if time is not None else "" for time in times)
    return (
        principal,
        f" holds {events} from ",
        starts,
        " until ",
        ends,
        f" (“{data['reason']}”). {notice}",
    )


def _update_sentence(data: Mapping[str, Any]) -> str:
    """Name the changed fields, and say whether votes are lost: only if the revision changed."""
    fields = ", ".join(data["changed"])
    revision_before = ScheduledEvent.from_cloudevent_data({**data, **data["changed"]}).revision
    if revision_before == data["revision"]:
        return f"Azure changed {fields}."
    return f"Azure changed {fields}; votes on the former state do not count."


def _decision_sentence(name: str, data: Mapping[str, Any]) -> Text:
    principal = PrincipalRef(data["principal"])
    dry_run = " It is a dry run." if data.get("dryRun") else ""
    votes = f"{data['votes']} of {data['required']}"
    if name == "approval.refused":
        return (principal, f" tried to {data['decision']}, refused: {data['refusal']}.")
    if name == "approval.granted":
        quorum = f"{votes} votes" if data["required"] else "no votes needed"
        return (f"Approved by rule {data['rule']}: {quorum}.{dry_run}",)
    count = f", {votes}" if data["decision"] == "approve" and data["required"] else ""
    remarks = ", ".join(describe_remarks(data, quote="“{}”"))
    said = f" ({remarks})" if remarks else ""
    notice = f" {sentence(data['notice'])}" if "notice" in data else ""
    waits = (
        f" It is approved{_limit_waits_clause(data, 'waitingFor')}." if "waitingFor" in data else ""
    )
    text = f" {_DECISIONS[data['decision']]}{count}{said}.{waits}{notice}"
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
    """Return for which limits an event waits, or waited, as the end of a sentence."""
    limits = join_names([wait["limit"] for wait in data.get(field, ())])
    if not limits:
        return ""
    if field == "waitedFor":
        return f", while the event waited for limit {limits}"
    return f", and waits for limit {limits}; {LIMIT_NOTICE}"
