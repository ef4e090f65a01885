"""What the log and the metrics say of each recorded event: a line, and counts.

`log_recorded_events` listens to the store, so each event is told once, after its commit. A replay
after a restart records nothing, so it tells nothing again. docs/log.md lists the lines that `LINES`
describes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from relay.events.cloudevent import CloudEvent, is_about_event
from relay.events.match import EVENT_TYPES
from relay.logs import log_extra
from relay.sentences import event_subject, said
from relay.store import RecordedEvent

MAX_RESOURCES = 20
"""Machines that the fields of a line name."""
_REFUSED = 400  # HTTP
_ABOUT_EVENT = ("eventId", "scope", "eventType", "resources", "revision")
"""Fields of every line about an event of Azure."""
_EVENT_FIELDS = (*_ABOUT_EVENT, "eventStatus", "eventSource", "notBefore", "durationSeconds")
_DECISION_FIELDS = (
    *_ABOUT_EVENT,
    *("decision", "principal", "channel", "approvalId", "votes", "required", "rule"),
    *("reason", "ticket"),
)
_ABOUT_RELAY = ("scope", "relay")
"""Fields of every line about a relay: attributes of the event, as no others are."""
_HOLD_FIELDS = (*_ABOUT_RELAY, *("holdId", "principal", "channel", "starts", "ends", "reason"))
EVERY_LINE = ("type", "id", "position")
"""Fields of the line of every event, besides those of its definition."""
_SINK_FIELDS = ("sink", *_ABOUT_RELAY, "reason", "count")
_log = logging.getLogger("relay.story")


LINES: Mapping[str, tuple[int, Sequence[str]]] = {
    "event.scheduled": (logging.INFO, _EVENT_FIELDS),
    "event.updated": (logging.INFO, (*_EVENT_FIELDS, "changed")),
    "event.started": (logging.INFO, (*_EVENT_FIELDS, "changed", "approvedByRelay")),
    "event.ended": (logging.INFO, (*_EVENT_FIELDS, "outcome", "evidence", "approvedByRelay")),
    "approval.recorded": (logging.INFO, (*_DECISION_FIELDS, "dryRun")),
    "approval.granted": (logging.INFO, _DECISION_FIELDS),
    "approval.refused": (logging.WARNING, (*_DECISION_FIELDS, "refusal")),
    "approval.voided": (logging.INFO, (*_ABOUT_EVENT, "why")),
    "approval.reminder": (
        logging.WARNING,
        (
            *_ABOUT_EVENT,
            *("votes", "required", "missing", "rule", "closes", "notBefore", "runbook"),
        ),
    ),
    "startrequest.accepted": (logging.INFO, (*_ABOUT_EVENT, "status", "attempts")),
    "startrequest.failed": (logging.WARNING, (*_ABOUT_EVENT, "status", "attempts", "reason")),
    "standing-hold.created": (logging.INFO, _HOLD_FIELDS),
    "standing-hold.ended": (logging.INFO, (*_HOLD_FIELDS, "endedBy")),
    "standing-hold.expired": (logging.INFO, _HOLD_FIELDS),
    "relay.source-lost": (logging.ERROR, (*_ABOUT_RELAY, "reason")),
    "relay.source-recovered": (logging.INFO, (*_ABOUT_RELAY, "reason")),
    "relay.silent": (logging.ERROR, (*_ABOUT_RELAY, "reason", "count")),
    "relay.sink-failing": (logging.WARNING, _SINK_FIELDS),
    "relay.sink-recovered": (logging.INFO, _SINK_FIELDS),
    "relay.sink-disabled": (logging.ERROR, _SINK_FIELDS),
    "relay.dead-lettered": (logging.WARNING, _SINK_FIELDS),
    "relay.store-failing": (logging.ERROR, (*_ABOUT_RELAY, "reason")),
    "relay.clock-skewed": (logging.WARNING, _SINK_FIELDS),
    "relay.ping": (logging.INFO, _SINK_FIELDS),
}
"""Level and fields of the line of each type, in the order of the catalog.

The fields are names in the data or the attributes of the event. Each line also has `EVERY_LINE`.
"""


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
    name, data = event.name, event.data
    level, names_of_fields = LINES[name]
    fields: dict[str, Any] = {"type": name}
    for field in names_of_fields:
        fields[field] = (event.attributes if field in _ABOUT_RELAY else data).get(field)
    names = fields.get("resources")
    if names is not None and len(names) > MAX_RESOURCES:
        fields |= {
            "resources": names[:MAX_RESOURCES],
            "resourcesLeftOut": len(names) - MAX_RESOURCES,
        }
    if "changed" in fields:
        fields["changed"] = list(fields["changed"]) or None
    fields |= {"id": event.id, "position": position}
    if name == "startrequest.failed" and data["status"] == _REFUSED:
        level = logging.ERROR
    message = said(name, data)
    if is_about_event(name) and name != "event.scheduled":  # which names its machines
        subject = f"Event {data['eventId']}"
        if data["resources"] is not None:  # else a refusal about an event that nobody knows
            subject = event_subject(data["eventType"], data["resources"])
        message = f"{subject}: {message}"
    _log.log(level, "%s", message, extra={"fields": fields})


EVENT_STATUSES = ("Scheduled", "Started")
OTHER = "other"
CHANGES = ("scheduled", "updated", "started", "ended")
DECISIONS = ("approve", "hold", "release")


@lru_cache(maxsize=256)
def azure_event_type_label(event_type: str | None) -> str:
    """Return the label of an EventType: `OTHER` for one that Azure does not document."""
    return _known_value_or_other(event_type, EVENT_TYPES)


def azure_event_status_label(event_status: str | None) -> str:
    return _known_value_or_other(event_status, EVENT_STATUSES)


def _known_value_or_other(value: str | None, known: Sequence[str]) -> str:
    lower = (value or "").lower()
    return next((name for name in known if name.lower() == lower), OTHER)


class EventCounts:
    """How many events of each kind were recorded. `count_recorded_events` listens to the store."""

    def __init__(self) -> None:
        self.grants = 0
        self.changes: Counter[tuple[str, str]] = Counter()
        """``event.*`` by change and label of the EventType."""
        self.decisions: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.start_requests = Counter({"accepted": 0, "refused": 0, "failed": 0})

    def count_recorded_events(self, events: Sequence[RecordedEvent]) -> None:
        for recorded in events:
            (family, _, change), event = recorded.name.partition("."), recorded.event
            if family == "event":
                # Of more than a thousand events at once, the rest is not in memory.
                event_type = event.attributes.get("eventtype") if event is not None else None
                self.changes[change, azure_event_type_label(event_type)] += 1
            elif recorded.name == "approval.granted":
                self.grants += 1
            elif event is None:
                continue
            elif family == "startrequest":
                is_refused = change == "failed" and event.data["status"] == _REFUSED
                self.start_requests["refused" if is_refused else change] += 1
            elif recorded.name == "approval.recorded":
                self.decisions[event.data["decision"]] += 1
            elif recorded.name == "approval.refused":
                self.refusals[event.data["decision"]] += 1
