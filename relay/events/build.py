"""From a change, a decision or a state of the relay to the CloudEvent that tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from relay.events.catalog import dataschema
from relay.events.cloudevent import TYPE_PREFIX, TYPE_VERSION, CloudEvent, digest_id
from relay.events.delta import Change
from relay.events.model import Event
from relay.events.timestamps import format_rfc3339, parse_timestamp

EndOutcome = tuple[
    Literal["completed", "canceled", "unknown"], Literal["observed", "rebooted", "none"]
]


@dataclass(frozen=True, slots=True)
class Origin:
    """Who speaks: the scope (whose document it is) and this relay's own name."""

    scope: str
    relay: str


@dataclass(frozen=True, slots=True)
class EndEvidence:
    """What is known of an event when it is gone from the document.

    ``start_sent``: a StartRequest of ours was sent for it and IMDS did not answer 400. ``gap``: polling had a longer
    gap than max(3 x interval, 5 s) before it was missed. ``rebooted``: it is a Reboot or Redeploy of this VM, approved or
    due, and the VM's boot id changed since.
    """

    start_sent: bool
    gap: bool
    rebooted: bool


def determine_outcome(event: Event, facts: EndEvidence, now: datetime) -> EndOutcome:
    """How an event ended, as far as this relay saw it.

    See docs/guarantees.md#an-outcome-is-what-this-relay-saw.
    """
    if event.is_started:
        return "completed", "observed"
    if facts.rebooted:
        return "completed", "rebooted"
    due = event.not_before_time
    scheduled = (event.event_status or "").lower() == "scheduled"
    if scheduled and due is not None and now < due and not facts.start_sent and not facts.gap:
        return "canceled", "observed"
    return "unknown", "none"


def event_data(event: Event, incarnation: int | None) -> dict[str, Any]:
    """``data`` of ``event.*`` without what the single changes add."""
    return {**event.to_fields(), "documentIncarnation": incarnation, "revision": event.revision}


def transition_id(change: Change, origin: Origin) -> str:
    """Names a transition: the digest of source, EventId, change and new state; the count is added by `change_event`."""
    state = {
        **change.event.to_fields(),
        "eventId": change.event.key,
        "resources": sorted(change.event.resources),
    }
    return digest_id(f"imds://{origin.scope}", change.event.key, change.kind, state)


def change_event(
    change: Change,
    origin: Origin,
    at: datetime,
    *,
    data: Mapping[str, Any],
    told: int,
    approved: bool,
    outcome: EndOutcome | None = None,
) -> CloudEvent:
    """The ``event.*`` CloudEvent of a change.

    ``data`` is `event_data` of the event; ``told`` is how often this relay told the same transition before, so that a
    repeated one gets an id of its own and a restarted relay gives the same one again.
    """
    added: dict[str, Any] = {}
    if change.kind in ("updated", "started"):
        added["changed"] = dict(change.changed)
    if change.kind == "ended" and outcome is not None:
        added |= {"outcome": outcome[0], "evidence": outcome[1]}
    if change.kind in ("started", "ended"):
        added["approvedByRelay"] = approved
    attributes = {
        "specversion": "1.0",
        "id": digest_id(transition_id(change, origin), told),
        "type": f"{TYPE_PREFIX}event.{change.kind}{TYPE_VERSION}",
        "source": f"imds://{origin.scope}",
        "subject": change.event.event_id,
        "time": format_rfc3339(at),
        **_common(f"event.{change.kind}", origin),
        **_of_event(data),
        "outcome": outcome[0] if change.kind == "ended" and outcome else None,
        "notbefore": _not_before(data) if change.kind in ("scheduled", "updated") else None,
    }
    return CloudEvent.build(attributes, {**data, **added})


def decision_event(
    name: str,
    origin: Origin,
    at: datetime,
    *,
    event: Mapping[str, Any],
    added: Mapping[str, Any],
    cause: str | None,
    head: str,
) -> CloudEvent:
    """An ``approval.*`` or ``startrequest.*`` CloudEvent: the event as it then stood, and what ``added`` says of it.

    ``cause`` becomes ``causationid``; ``head`` is the journal's position and hash before this event.
    """
    source = f"imds://{origin.scope}/relays/{origin.relay}"
    attributes = {
        "specversion": "1.0",
        "id": digest_id(source, event["eventId"].lower(), name, added, head),
        "type": f"{TYPE_PREFIX}{name}{TYPE_VERSION}",
        "source": source,
        "subject": event["eventId"],
        "time": format_rfc3339(at),
        **_common(name, origin),
        **_of_event(event),
        "causationid": cause,
        "journalhead": head,
    }
    return CloudEvent.build(attributes, {**event, **added})


def relay_event(
    name: str, origin: Origin, at: datetime, *, sink: str | None, reason: str, count: int, head: str
) -> CloudEvent:
    """A ``relay.*`` CloudEvent: what the relay has to say of itself or of one of its sinks."""
    source = f"imds://{origin.scope}/relays/{origin.relay}"
    moment = format_rfc3339(at)
    attributes = {
        "specversion": "1.0",
        "id": digest_id(source, sink, name, reason, moment, head),
        "type": f"{TYPE_PREFIX}{name}{TYPE_VERSION}",
        "source": source,
        "subject": sink,
        "time": moment,
        **_common(name, origin),
        "journalhead": head,
    }
    return CloudEvent.build(attributes, {"sink": sink, "reason": reason, "count": count})


def _common(name: str, origin: Origin) -> dict[str, str]:
    return {
        "datacontenttype": "application/json",
        "dataschema": dataschema(name),
        "scope": origin.scope,
        "relay": origin.relay,
    }


def _of_event(data: Mapping[str, Any]) -> dict[str, str | None]:
    return {
        "eventtype": data["eventType"],
        "eventsource": data["eventSource"],
        "correlationid": data["eventId"],
        "partitionkey": data["eventId"],
    }


def _not_before(data: Mapping[str, Any]) -> str | None:
    moment = parse_timestamp(data["notBefore"])
    return format_rfc3339(moment) if moment else None
