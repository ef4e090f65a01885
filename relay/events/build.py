"""The types of CloudEvents that the store records, their JSON Schemas, and how each is built. Pure.

`CATALOG` says when each type is sent, and what its ``data`` holds (`relay.events.data_types`).
docs/events.md and ``imds-relay schema`` are generated from it.

There is one function for each family: `change_event` for the recorder of documents,
`approval_or_startrequest_event` and `standing_hold_event` for approvals, and `relay_event` for the
relay's own state. Each id is a digest of what the event says, so a relay that restarts gives a
change the same id again. ``head`` is the position and hash of the journal before the event, as
``<position>:<hash>``: it is a part of the id, because a relay can say the same twice.
`determine_outcome` says how an event of Azure ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import TypeAdapter

from relay.events.cloudevent import (
    TYPE_PREFIX,
    TYPE_VERSION,
    CloudEvent,
    dataschema,
    digest_id,
    is_about_event,
)
from relay.events.data_types import (
    ApprovalData,
    EndedData,
    EndedStandingHoldData,
    EventData,
    RecordedData,
    RefusedData,
    RelayData,
    ReminderData,
    StandingHoldData,
    StartedData,
    StartRequestData,
    UpdatedData,
    VoidedData,
)
from relay.events.model import Change, ScheduledEvent
from relay.events.timestamps import format_rfc3339, parse_timestamp


class RecordRelayEvent(Protocol):
    """A function that records a ``relay.*`` event: parts get it to report their own state."""

    def __call__(
        self,
        name: str,
        reason: str,
        *,
        sink: str | None = None,
        count: int = 1,
        scope: str | None = None,
    ) -> None:
        """``count`` is how many things the event stands for; ``sink`` is what it is about.

        ``scope`` is that of the event, if a hub reports it about another than its own.
        """


@dataclass(frozen=True, slots=True)
class Origin:
    """Where events come from: the scope of the document, and the name of this relay."""

    scope: str
    relay: str

    @property
    def relay_source(self) -> str:
        return f"imds://{self.scope}/relays/{self.relay}"

    def copy_for_scope(self, scope: str) -> Origin:
        """Return the origin of what this relay says about an event of a scope."""
        return self if scope == self.scope else replace(self, scope=scope)


class EndOutcome(NamedTuple):
    outcome: Literal["completed", "canceled", "unknown"]
    evidence: Literal["observed", "rebooted", "none"]


def determine_outcome(
    event: ScheduledEvent, now: datetime, *, start_sent: bool, gap: bool, rebooted: bool
) -> EndOutcome:
    """Return how an event ended: docs/guarantees.md#an-outcome-is-what-this-relay-saw.

    ``start_sent``: the relay sent a StartRequest for it and IMDS did not answer 400. ``gap``:
    polling had paused for more than max(3 x interval, 5 s) before the event was missed.
    ``rebooted``: it is a Reboot or Redeploy of this VM, it was approved or due, and the boot id of
    the VM has changed since.
    """
    if event.is_started:
        return EndOutcome("completed", "observed")
    if rebooted:
        return EndOutcome("completed", "rebooted")
    not_before = event.not_before_time
    is_early = not_before is not None and now < not_before
    if event.is_scheduled and is_early and not start_sent and not gap:
        return EndOutcome("canceled", "observed")
    return EndOutcome("unknown", "none")


def common_event_data(event: ScheduledEvent, incarnation: int | None) -> dict[str, Any]:
    """Return the part of ``data`` that all ``event.*`` share."""
    return {
        **event.to_cloudevent_data(),
        "documentIncarnation": incarnation,
        "revision": event.revision,
    }


def transition_digest(change: Change, origin: Origin) -> str:
    """Return a digest of source, EventId, kind and new state; `change_event` adds a count."""
    state = _canonical_state(change.event)
    return digest_id(f"imds://{origin.scope}", change.event.lowercase_event_id, change.kind, state)


def state_digest(event: ScheduledEvent) -> str:
    """Return a digest of the state; the order of resources and the EventId's case do not count."""
    return digest_id("state", _canonical_state(event))


def _canonical_state(event: ScheduledEvent) -> dict[str, Any]:
    return {
        **event.to_cloudevent_data(),
        "eventId": event.lowercase_event_id,
        "resources": sorted(event.resources),
    }


def change_event(
    change: Change,
    origin: Origin,
    at: datetime,
    *,
    data: Mapping[str, Any],
    previous_count: int,
    approved_by_relay: bool,
    outcome: EndOutcome | None = None,
    transition: str | None = None,
) -> CloudEvent:
    """Build the ``event.*`` CloudEvent of a change.

    ``data`` is the `common_event_data` of the event. ``previous_count`` is how often this relay
    recorded the same transition before. So a transition that repeats gets a new id, and a relay
    that restarts makes the same id again. ``transition`` is the `transition_digest`, if it is known
    already.
    """
    added: dict[str, Any] = {}
    more: dict[str, str | None] = {}
    if change.kind in ("scheduled", "updated"):
        not_before = parse_timestamp(data["notBefore"])
        more["notbefore"] = format_rfc3339(not_before) if not_before else None
    if change.kind in ("updated", "started"):
        added["changed"] = dict(change.changed)
    if change.kind == "ended" and outcome is not None:
        more["outcome"] = outcome.outcome
        added |= outcome._asdict()
    if change.kind in ("started", "ended"):
        added["approvedByRelay"] = approved_by_relay
    return _build(
        f"event.{change.kind}",
        origin,
        at,
        {**data, **added},
        id=digest_id(transition or transition_digest(change, origin), previous_count),
        source=f"imds://{origin.scope}",
        subject=change.event.event_id,
        event=data,
        **more,
    )


def approval_or_startrequest_event(
    name: str,
    origin: Origin,
    at: datetime,
    *,
    event: Mapping[str, Any],
    added: Mapping[str, Any],
    cause: str | None,
    head: str,
) -> CloudEvent:
    """Build an ``approval.*`` or ``startrequest.*`` CloudEvent; ``cause`` is its ``causationid``.

    Its data is that of the ``event`` at that time, and what ``added`` holds.
    """
    return _build(
        name,
        origin,
        at,
        {**event, **added},
        id=digest_id(origin.relay_source, event["eventId"].lower(), name, added, head),
        subject=event["eventId"],
        event=event,
        causationid=cause,
        journalhead=head,
    )


def standing_hold_event(
    name: str, origin: Origin, at: datetime, *, data: Mapping[str, Any], head: str
) -> CloudEvent:
    id_ = digest_id(origin.relay_source, name, data, head)
    return _build(name, origin, at, data, id=id_, subject=data["holdId"], journalhead=head)


def relay_event(
    name: str, origin: Origin, at: datetime, *, sink: str | None, reason: str, count: int, head: str
) -> CloudEvent:
    """Build a ``relay.*`` CloudEvent. ``reason`` is a sentence, ``count`` how many it is about."""
    data = {"sink": sink, "reason": reason, "count": count}
    id_ = digest_id(origin.relay_source, sink, name, reason, format_rfc3339(at), head)
    return _build(name, origin, at, data, id=id_, subject=sink, journalhead=head)


def _build(
    name: str,
    origin: Origin,
    at: datetime,
    data: Mapping[str, Any],
    *,
    id: str,  # noqa: A002  # the name of the attribute
    subject: str | None,
    source: str | None = None,
    event: Mapping[str, Any] | None = None,
    **more: str | None,
) -> CloudEvent:
    """Build any CloudEvent. ``event`` is the data of the event of Azure that it is about."""
    attributes = {
        "specversion": "1.0",
        "id": id,
        "type": f"{TYPE_PREFIX}{name}{TYPE_VERSION}",
        "source": source or origin.relay_source,
        "subject": subject,
        "time": format_rfc3339(at),
        "datacontenttype": "application/json",
        "dataschema": dataschema(name),
        "scope": origin.scope,
        "relay": origin.relay,
    }
    if event is not None:
        attributes |= {
            "eventtype": event["eventType"],
            "eventsource": event["eventSource"],
            "correlationid": event["eventId"],
            "partitionkey": event["eventId"],
        }
    return CloudEvent.build({**attributes, **more}, data)


# --- the catalog


class EventDefinition(NamedTuple):
    """One row of the catalog. ``name`` is ``<family>.<change>``."""

    name: str
    data: Any
    when: str

    @property
    def type(self) -> str:
        return f"{TYPE_PREFIX}{self.name}{TYPE_VERSION}"


_ROWS = (
    ("event.scheduled", EventData, "an EventId is first seen, with any status but Started"),
    (
        "event.updated",
        UpdatedData,
        "any field of a known event changed and it did not move to Started",
    ),
    ("event.started", StartedData, "an event is first seen as Started, or moved to Started"),
    ("event.ended", EndedData, "an event is gone from the document"),
    ("approval.recorded", RecordedData, "a vote, hold or release was accepted"),
    ("approval.granted", ApprovalData, "the rule is satisfied"),
    ("approval.refused", RefusedData, "an authenticated attempt was refused"),
    ("approval.voided", VoidedData, "recorded votes no longer count"),
    (
        "approval.reminder",
        ReminderData,
        "votes are missing, and NotBefore is as near as the rule's remind says",
    ),
    ("startrequest.accepted", StartRequestData, "IMDS answered 200 to a StartRequest"),
    ("startrequest.failed", StartRequestData, "the relay gave up on a StartRequest"),
    (
        "standing-hold.created",
        StandingHoldData,
        "somebody made a hold by conditions and for a time",
    ),
    ("standing-hold.ended", EndedStandingHoldData, "somebody ended a standing hold early"),
    ("standing-hold.expired", StandingHoldData, "the time of a standing hold is over"),
    (
        "relay.source-lost",
        RelayData,
        "the metadata service, or on a hub the broker, has given no usable answer for too long",
    ),
    (
        "relay.source-recovered",
        RelayData,
        "the metadata service answers again, or a hub hears the agents of a scope again",
    ),
    (
        "relay.silent",
        RelayData,
        "no agent of a scope has been heard of for too long, so none of its events starts or ends",
    ),
    ("relay.sink-failing", RelayData, "a sink fails repeatedly"),
    ("relay.sink-recovered", RelayData, "a failing sink delivers again"),
    (
        "relay.sink-disabled",
        RelayData,
        "a receiver asked the relay to stop; the entries wait until an operator resumes the sink",
    ),
    (
        "relay.dead-lettered",
        RelayData,
        "an entry became a dead letter; without a sink: dead letters over the limit were deleted",
    ),
    (
        "relay.store-failing",
        RelayData,
        "the state file cannot be written; events go out from memory, approvals are refused",
    ),
    ("relay.clock-skewed", RelayData, "the clocks of a receiver and of the relay differ"),
    ("relay.ping", RelayData, "an operator asked for a test message"),
)
CATALOG = tuple(EventDefinition(*row) for row in _ROWS)
"""Every type, in the order of an event's life."""


def cloudevent_schema(definition: EventDefinition) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a whole CloudEvent of this type, as structured JSON."""
    data = TypeAdapter(definition.data).json_schema(ref_template="#/$defs/{model}")
    definitions = data.pop("$defs", {})
    # The relay writes no other fields. Readers must accept fields that a later version adds.
    for strict in (data, *definitions.values()):
        del strict["additionalProperties"]
    text = {"type": "string", "minLength": 1}
    texts = ("eventtype", "eventsource", "outcome", "correlationid", "causationid", "partitionkey")
    properties: dict[str, Any] = {
        "specversion": {"const": "1.0"},
        "id": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
        "type": {"const": definition.type},
        "source": {"type": "string", "pattern": "^imds://[a-z0-9-]{1,80}(/relays/.+)?$"},
        "subject": text,
        "time": {"type": "string", "format": "date-time"},
        "datacontenttype": {"const": "application/json"},
        "dataschema": {"const": dataschema(definition.name)},
        "scope": {"type": "string", "pattern": "^[a-z0-9-]{1,80}$"},
        "relay": text,
        **dict.fromkeys(texts, text),
        "notbefore": {"type": "string", "format": "date-time"},
        "journalhead": {"type": "string", "pattern": "^[0-9]+:[0-9a-f]{64}$"},
        "data": data,
    }
    optional = {"eventtype", "eventsource", "outcome", "causationid", "notbefore"}
    if definition.name.startswith("event."):
        optional.add("journalhead")
    if not is_about_event(definition.name):
        optional |= {"correlationid", "partitionkey"}
    if definition.name.startswith("relay."):
        optional.add("subject")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{dataschema(definition.name)}:cloudevent",
        "title": definition.type,
        "description": definition.when,
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "$defs": definitions,
    }
