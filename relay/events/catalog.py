"""The catalog of events: each type of CloudEvent, when it is sent, and what its ``data`` holds.

The JSON Schemas in the package, docs/events.md and ``imds-relay schema`` are generated from it.
`relay.events.data_types` has the fields of ``data``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import TypeAdapter

from relay.events.cloudevent import TYPE_PREFIX, TYPE_VERSION, dataschema, is_about_event
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
