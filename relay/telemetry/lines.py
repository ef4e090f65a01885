"""The log line of each recorded event: its level, its sentence and its fields.

`log_recorded_events` listens to the store, so each event is told once, after its commit. A replay
after a restart records nothing, so it tells nothing again. docs/log.md lists the lines that `LINES`
describes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relay.approvals.standing_holds import describe_conditions
from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import duration_text
from relay.log_fields import LogFields, log_extra
from relay.store import RecordedEvent

MAX_RESOURCES = 20
"""Machines that the fields of a line name."""
_MAX_NAMES = 5
"""Machines that the sentence of a line names."""
_REFUSED = 400  # HTTP
_ABOUT_EVENT = ("eventId", "scope", "eventType", "resources", "revision")
"""Fields of every line about an event of Azure."""
_EVENT_FIELDS = (*_ABOUT_EVENT, "eventStatus", "eventSource", "notBefore", "durationSeconds")
_DECISION_FIELDS = (
    *_ABOUT_EVENT,
    *("decision", "principal", "channel", "approvalId", "votes", "required", "rule", "reason"),
    "dryRun",
)
_ABOUT_RELAY = ("scope", "relay")
"""Fields of every line about a relay."""
_HOLD_FIELDS = (
    *_ABOUT_RELAY,
    *("holdId", "principal", "channel", "starts", "ends", "reason"),
)
EVERY_LINE = ("type", "id", "position")
"""Fields of the line of every event, besides those of its definition."""
_SINK_FIELDS = ("sink", *_ABOUT_RELAY, "reason", "count")
_FROM_ATTRIBUTES = frozenset(_ABOUT_RELAY)
_log = logging.getLogger("relay.story")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the log. ``level`` is one of `logging`."""

    level: int
    message: str
    fields: LogFields


@dataclass(frozen=True, slots=True, kw_only=True)
class LineDefinition:
    """The line of a type of events.

    ``sentence`` makes the sentence from the data of the event, and ``level`` its level. ``fields``
    are names in the data or the attributes of the event. Each line also has `EVERY_LINE`.
    """

    level: int | Callable[[Mapping[str, Any]], int]
    sentence: Callable[[Mapping[str, Any]], str]
    fields: Sequence[str]


def _subject(data: Mapping[str, Any]) -> str:
    """Return the event in words: ``Reboot of db-1 and db-2``."""
    names = data["resources"] or ()
    kind = data["eventType"] or "event"
    if not names:
        return f"{kind} {data['eventId']}" if data["eventType"] else f"event {data['eventId']}"
    return f"{kind} of {_join_names(names)}"


def _join_names(names: Sequence[str]) -> str:
    listed = ", ".join(names[:_MAX_NAMES])
    others = len(names) - _MAX_NAMES
    return f"{listed} and {others} more" if others > 0 else listed


def _event_scheduled(data: Mapping[str, Any]) -> str:
    parts = [f"{_subject(data)} is scheduled"]
    if (data["eventStatus"] or "").lower() != "scheduled":
        parts = [f"{_subject(data)} has appeared with the status {data['eventStatus'] or 'none'}"]
    if data["eventSource"]:
        parts.append(f"by {data['eventSource']}")
    if data["notBefore"]:
        parts.append(f"not before {data['notBefore']}")
    if data["durationSeconds"] is not None:
        parts.append(f"for {duration_text(data['durationSeconds'])}")
    return ", ".join(parts)


def _event_updated(data: Mapping[str, Any]) -> str:
    changes = [
        f"{name} was {_format_field_value(old)}, is {_format_field_value(data.get(name))}"
        for name, old in data["changed"].items()
    ]
    return f"{_subject(data)} has changed: {'; '.join(changes)}"


def _event_started(data: Mapping[str, Any]) -> str:
    others = [name for name in data["changed"] if name not in ("eventStatus", "notBefore")]
    also = f"; also changed: {', '.join(others)}" if others else ""
    return f"{_subject(data)} has started{_approved_by_this_relay_clause(data)}{also}"


def _event_ended(data: Mapping[str, Any]) -> str:
    return f"{_subject(data)} has ended: {data['outcome']}{_approved_by_this_relay_clause(data)}"


def _approved_by_this_relay_clause(data: Mapping[str, Any]) -> str:
    return ", approved by this relay" if data["approvedByRelay"] else ""


def _format_field_value(value: Any) -> str:
    if isinstance(value, list):
        return _join_names(value)
    return "none" if value is None else str(value)


_VERBS = {"approve": "approves", "hold": "holds", "release": "releases"}


def _vote_count_and_rule_clause(data: Mapping[str, Any]) -> str:
    return f"{data['votes']} of {_pluralize_votes(data['required'])} by rule {data['rule']}"


def _pluralize_votes(votes: int) -> str:
    return f"{votes} vote" if votes == 1 else f"{votes} votes"


def _decision_recorded(data: Mapping[str, Any]) -> str:
    votes = ""
    if data["rule"] is not None:
        votes = f"; {_vote_count_and_rule_clause(data)}"
    verb = _VERBS[data["decision"]]
    return f"{data['principal']} {verb} {_subject(data)}{votes}{_dry_run_suffix(data)}"


def _granted(data: Mapping[str, Any]) -> str:
    votes = f" with {_pluralize_votes(data['votes'])}" if data["required"] else ""
    return f"{_subject(data)} is granted by rule {data['rule']}{votes}{_dry_run_suffix(data)}"


def _decision_refused(data: Mapping[str, Any]) -> str:
    return f"{data['principal']} may not {data['decision']} {_subject(data)}: {data['refusal']}"


def _votes_voided(data: Mapping[str, Any]) -> str:
    causes = {"changed": "it has changed", "expired": "they have expired", "ended": "it has ended"}
    return f"votes for {_subject(data)} count no more: {causes[data['why']]}"


def _reminder(data: Mapping[str, Any]) -> str:
    missing = f"waits for votes, {_vote_count_and_rule_clause(data)}: NotBefore is near"
    return f"{_subject(data)} {missing}{_dry_run_suffix(data)}"


def _standing_hold_created(data: Mapping[str, Any]) -> str:
    events = describe_conditions(data)
    times = f"from {data['starts']} until {data['ends']}"
    return f"{data['principal']} makes a standing hold on {events} {times}: {data['reason']}"


def _standing_hold_ended(data: Mapping[str, Any]) -> str:
    events = describe_conditions(data)
    return f"{data['endedBy']} ends the standing hold of {data['principal']} on {events}"


def _standing_hold_expired(data: Mapping[str, Any]) -> str:
    return f"the standing hold of {data['principal']} on {describe_conditions(data)} has expired"


def _dry_run_suffix(data: Mapping[str, Any]) -> str:
    return " (dry run)" if data.get("dryRun") else ""


def _start_request_accepted(data: Mapping[str, Any]) -> str:
    return f"IMDS accepted the StartRequest for {_subject(data)}"


def _start_request_failed(data: Mapping[str, Any]) -> str:
    return f"the StartRequest for {_subject(data)} failed: {data['reason']}"


def _start_request_failed_level(data: Mapping[str, Any]) -> int:
    return logging.ERROR if data["status"] == _REFUSED else logging.WARNING


def _sink_sentence_maker(text: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda data: f"sink {data['sink']} {text.format_map(data)}"


def _reason(data: Mapping[str, Any]) -> str:
    return str(data["reason"])


def _dead_lettered(data: Mapping[str, Any]) -> str:
    if data["sink"] is None:
        return _reason(data)
    return f"sink {data['sink']} has a dead letter: {data['reason']}"


LINES: Mapping[str, LineDefinition] = {
    "event.scheduled": LineDefinition(
        level=logging.INFO, sentence=_event_scheduled, fields=_EVENT_FIELDS
    ),
    "event.updated": LineDefinition(
        level=logging.INFO, sentence=_event_updated, fields=(*_EVENT_FIELDS, "changed")
    ),
    "event.started": LineDefinition(
        level=logging.INFO,
        sentence=_event_started,
        fields=(*_EVENT_FIELDS, "changed", "approvedByRelay"),
    ),
    "event.ended": LineDefinition(
        level=logging.INFO,
        sentence=_event_ended,
        fields=(*_EVENT_FIELDS, "outcome", "evidence", "approvedByRelay"),
    ),
    "approval.recorded": LineDefinition(
        level=logging.INFO, sentence=_decision_recorded, fields=_DECISION_FIELDS
    ),
    "approval.granted": LineDefinition(
        level=logging.INFO, sentence=_granted, fields=_DECISION_FIELDS
    ),
    "approval.refused": LineDefinition(
        level=logging.WARNING,
        sentence=_decision_refused,
        fields=(*_DECISION_FIELDS, "refusal"),
    ),
    "approval.voided": LineDefinition(
        level=logging.INFO, sentence=_votes_voided, fields=(*_ABOUT_EVENT, "why", "dryRun")
    ),
    "approval.reminder": LineDefinition(
        level=logging.WARNING,
        sentence=_reminder,
        fields=(
            *_ABOUT_EVENT,
            *("votes", "required", "missing", "rule", "closes", "notBefore", "runbook", "dryRun"),
        ),
    ),
    "startrequest.accepted": LineDefinition(
        level=logging.INFO,
        sentence=_start_request_accepted,
        fields=(*_ABOUT_EVENT, "status", "attempts"),
    ),
    "startrequest.failed": LineDefinition(
        level=_start_request_failed_level,
        sentence=_start_request_failed,
        fields=(*_ABOUT_EVENT, "status", "attempts", "reason"),
    ),
    "standing-hold.created": LineDefinition(
        level=logging.INFO, sentence=_standing_hold_created, fields=_HOLD_FIELDS
    ),
    "standing-hold.ended": LineDefinition(
        level=logging.INFO, sentence=_standing_hold_ended, fields=(*_HOLD_FIELDS, "endedBy")
    ),
    "standing-hold.expired": LineDefinition(
        level=logging.INFO, sentence=_standing_hold_expired, fields=_HOLD_FIELDS
    ),
    "relay.source-lost": LineDefinition(
        level=logging.ERROR,
        sentence=lambda data: f"the source of events is lost: {data['reason']}",
        fields=(*_ABOUT_RELAY, "reason"),
    ),
    "relay.source-recovered": LineDefinition(
        level=logging.INFO,
        sentence=lambda data: f"the source of events is back: {data['reason']}",
        fields=(*_ABOUT_RELAY, "reason"),
    ),
    "relay.silent": LineDefinition(
        level=logging.ERROR, sentence=_reason, fields=(*_ABOUT_RELAY, "reason", "count")
    ),
    "relay.sink-failing": LineDefinition(
        level=logging.WARNING,
        sentence=_sink_sentence_maker("is failing, {count} waiting: {reason}"),
        fields=_SINK_FIELDS,
    ),
    "relay.sink-recovered": LineDefinition(
        level=logging.INFO,
        sentence=_sink_sentence_maker("delivers again, {count} waiting"),
        fields=_SINK_FIELDS,
    ),
    "relay.sink-disabled": LineDefinition(
        level=logging.ERROR,
        sentence=_sink_sentence_maker("is disabled and keeps its entries: {reason}"),
        fields=_SINK_FIELDS,
    ),
    "relay.dead-lettered": LineDefinition(
        level=logging.WARNING, sentence=_dead_lettered, fields=_SINK_FIELDS
    ),
    "relay.store-failing": LineDefinition(
        level=logging.ERROR,
        sentence=lambda data: (
            f"{data['reason']}. Notices go out from memory, approvals are refused"
        ),
        fields=(*_ABOUT_RELAY, "reason"),
    ),
    "relay.clock-skewed": LineDefinition(
        level=logging.WARNING,
        sentence=lambda data: (
            _reason(data) if data["sink"] is None else f"sink {data['sink']}: {data['reason']}"
        ),
        fields=_SINK_FIELDS,
    ),
    "relay.ping": LineDefinition(
        level=logging.INFO,
        sentence=_sink_sentence_maker("gets a test message: {reason}"),
        fields=_SINK_FIELDS,
    ),
}
"""The line of each type, in the order of the catalog."""


def log_line_of_event(event: CloudEvent, position: int | None) -> Line:
    """Return the line of an event that the journal has at a position, if it has it."""
    name, data = event.name, event.data
    definition = LINES[name]
    fields: dict[str, Any] = {"type": name}
    for field in definition.fields:
        fields[field] = (event.attributes if field in _FROM_ATTRIBUTES else data).get(field)
    names = fields.get("resources")
    if names is not None and len(names) > MAX_RESOURCES:
        fields |= {
            "resources": names[:MAX_RESOURCES],
            "resourcesLeftOut": len(names) - MAX_RESOURCES,
        }
    if "changed" in fields:
        fields["changed"] = list(fields["changed"]) or None
    fields |= {"id": event.id, "position": position}
    level = definition.level if isinstance(definition.level, int) else definition.level(data)
    return Line(level, definition.sentence(data), LogFields(**fields))  # type: ignore[typeddict-item]  # the definitions name its fields


def log_recorded_events(events: Sequence[RecordedEvent]) -> None:
    """Write the line of each event. One that is not in memory has a short line."""
    for recorded in events:
        try:
            if recorded.event is not None:
                log_cloud_event(recorded.event, recorded.position)
                continue
            fields = log_extra(type=recorded.name, id=recorded.id, position=recorded.position)
            _log.info("%s of %s was recorded", recorded.name, recorded.event_key, extra=fields)
        except Exception:  # noqa: BLE001  # a line that cannot be made must not end the relay
            _log.exception("internal error: the line of %s cannot be made", recorded.name)


def log_cloud_event(event: CloudEvent, position: int | None) -> None:
    """Write the line of an event. It has no position if it could not be recorded."""
    line = log_line_of_event(event, position)
    if _log.isEnabledFor(line.level):
        _log.log(line.level, "%s", line.message, extra={"fields": line.fields})
