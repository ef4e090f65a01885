"""Describes events, CloudEvents and standing holds in words, for the verbs that show them.

Everything here takes the JSON objects of the HTTP API.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from relay.approvals.admission import HOLD_NOTICE
from relay.approvals.limits import LIMIT_NOTICE
from relay.approvals.standing_holds import describe_conditions
from relay.cli._output import format_local_time, join_names, pluralize
from relay.events.cloudevent import event_name
from relay.events.remarks import describe_remarks
from relay.events.timestamps import duration_text


def event_fields(event: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return what a person needs to know to decide about an event, as names and values."""
    approval, duration = event["approval"], event["durationSeconds"]
    waits = closes = holds = runbook = None  # an event that is over waits for nothing
    if event["outcome"] is None:
        waits = describe_limit_waits(approval)
        closes = format_local_time(approval["closes"])
        holds = describe_standing_holds_in_force(approval["standingHolds"])
        runbook = approval["runbook"]
    return [
        ("event", event["eventId"]),
        ("scope", event["scope"]),
        ("what", " ".join(filter(None, (event["eventType"], event["eventStatus"])))),
        ("outcome", event["outcome"]),
        ("machines", join_names(event["resources"], limit=50) or "none named"),
        ("not before", format_local_time(event["notBefore"])),
        ("takes", "unknown" if duration is None else duration_text(duration)),
        ("started by", event["eventSource"]),
        ("because", event["description"]),
        ("approval", approval_summary(event)),
        ("waits for", waits),
        ("held by", f"{holds}; {HOLD_NOTICE}" if holds else None),
        ("closes", closes),
        ("runbook", runbook),
        ("revision", event["revision"]),
    ]


def approval_summary(event: Mapping[str, Any]) -> str | None:
    """Return the approval state of an event with votes and rule; None for an ended one without."""
    approval = event["approval"]
    state = approval["state"]
    if event["outcome"] is not None and state == "none":
        return None
    parts = [state]
    # In later states the event has another revision, for which the votes do not count.
    if approval["required"] and state in ("pending", "held", "waiting"):
        parts.append(vote_count(approval))
    if state == "waiting":
        names = join_names([wait["limit"] for wait in approval["waitingFor"]])
        parts.append(f"for limit {names}")
    parts.append(f"rule {approval['rule']}" if approval["rule"] else "no rule")
    return ", ".join(parts)


def describe_limit_waits(approval: Mapping[str, Any]) -> str | None:
    """Return for which limits an event waits; None if it waits for none."""
    waits = "; ".join(map(_describe_limit_wait, approval.get("waitingFor", ())))
    return f"{waits}; {LIMIT_NOTICE}" if waits else None


def _describe_limit_wait(wait: Mapping[str, Any]) -> str:
    text = f"limit {wait['limit']}, {pluralize(wait['max'], 'machine')} at once"
    if wait["behind"]:
        return f"{text}: event {wait['behind']} comes first"
    until = f" until {format_local_time(wait['until'])}" if wait["until"] else ""
    return f"{text}: {join_names(wait['machines'], limit=10)}{until}"


def describe_standing_holds_in_force(holds: Iterable[Mapping[str, Any]]) -> str | None:
    """Return whose standing holds keep an event from starting, and until when; None: nobody's."""
    texts = [
        f"standing hold {hold['holdId'][:8]} of {hold['principal']} until "
        f"{format_local_time(hold['until'])} ({hold['reason']})"
        for hold in holds
    ]
    return "; ".join(texts) or None


def vote_count(approval: Mapping[str, Any]) -> str:
    """Return ``1 of 2 votes``."""
    return f"{approval['votes']} of {pluralize(approval['required'], 'vote')}"


def cloudevent_row(event: Mapping[str, Any]) -> tuple[object, object, object, str]:
    """Return when a CloudEvent was made, its name, its principal and its details."""
    data = event["data"]
    name = event_name(event["type"])
    family = name.partition(".")[0]
    details = ", ".join(str(detail) for detail in _cloudevent_details(family, data) if detail)
    return format_local_time(event["time"], relative=False), name, data.get("principal"), details


def _cloudevent_details(family: str, data: Mapping[str, Any]) -> Iterator[object]:
    """Yield the details that the event's name does not tell. Some are empty."""
    match family:
        case "relay":
            yield from (data["sink"], data["reason"])
        case "approval":
            yield from _approval_event_details(data)
        case "standing-hold":
            yield describe_conditions(data)
            yield f"until {format_local_time(data['ends'], relative=False)}"
            yield from (data["reason"], data.get("endReason"))
        case "startrequest":
            yield data["reason"]
            if data["attempts"] > 1:
                yield f"sent {data['attempts']} times"
        case _:
            yield data.get("outcome")
            if data["notBefore"] and not data.get("outcome"):
                yield f"not before {format_local_time(data['notBefore'])}"
            for field, value in (data.get("changed") or {}).items():
                yield f"{field} was {value}"


def _approval_event_details(data: Mapping[str, Any]) -> Iterator[object]:
    yield from map(data.get, ("decision", "refusal", "why"))
    yield from describe_remarks(data)
    if data.get("required"):
        yield vote_count(data)
    if "missing" in data:
        yield f"{pluralize(data['missing'], 'vote')} missing"
    for field, verb in (("waitingFor", "waits"), ("waitedFor", "waited")):
        for wait in data.get(field, ()):
            yield f"{verb} for limit {wait['limit']}"
    holders = [hold["principal"] for hold in data.get("standingHolds", ())]
    if holders:
        yield f"standing hold of {join_names(holders)}"
    if data.get("dryRun"):
        yield "dry run"
