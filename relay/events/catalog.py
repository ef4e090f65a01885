"""Everything the relay says: each type of CloudEvent, when it is told, and what its ``data`` holds.

The JSON Schemas that the package ships, the event catalogue in the documentation and ``imds-relay schema`` are made from
this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    Required,  # pydantic needs these before Python 3.12
)

from pydantic import Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from relay.events.cloudevent import PREFIX, VERSION

_Strict = with_config({"extra": "forbid"})


@_Strict
class EventData(TypedDict):
    """A scheduled event as Azure last described it."""

    eventId: Annotated[str, Field(description="Azure's identifier, in the case it came in; compare without case")]
    eventType: Annotated[str | None, Field(description="Freeze, Reboot, Redeploy, Preempt, Terminate, or what Azure adds")]
    eventStatus: Annotated[str | None, Field(description="Scheduled or Started, or what Azure adds")]
    resourceType: str | None
    resources: Annotated[list[str], Field(description="names of the machines that the event concerns, all of them")]
    notBefore: Annotated[str | None, Field(description="RFC 3339: Azure starts the event then at the earliest; null once started")]
    description: str | None
    eventSource: Annotated[str | None, Field(description="Platform or User, or what Azure adds")]
    durationSeconds: Annotated[int | None, Field(description="announced length of the interruption in seconds; null: unknown")]
    documentIncarnation: int | None
    revision: Annotated[str, Field(description="names this state; an approval is bound to it")]


@_Strict
class UpdatedData(EventData):
    """What changed in a known event."""

    changed: Annotated[dict[str, Any], Field(description="name as in data, to the value before")]


@_Strict
class StartedData(UpdatedData):
    """The event is under way."""

    approvedByRelay: Annotated[bool, Field(description="we had sent a StartRequest for it that was accepted")]


@_Strict
class EndedData(EventData):
    """The event left Azure's document; the rest is as last seen."""

    outcome: Literal["completed", "canceled", "unknown"]
    evidence: Literal["observed", "rebooted", "none"]
    approvedByRelay: bool


class _AboutEvent(TypedDict, total=False):
    eventId: Required[str]
    eventType: Required[str | None]
    eventStatus: Required[str | None]
    resourceType: Required[str | None]
    resources: Required[list[str] | None]
    notBefore: Required[str | None]
    description: Required[str | None]
    eventSource: Required[str | None]
    durationSeconds: Required[int | None]
    documentIncarnation: Required[int | None]
    revision: Required[str | None]


@_Strict
class ApprovalData(_AboutEvent, total=False):
    """A decision about an event, with the event as it then stood (all but eventId null where the EventId is unknown)."""

    approvalId: Required[str]
    decision: Required[Literal["approve", "hold", "release"]]
    principal: Required[Annotated[str, Field(description="client:<name>, local:<user>, rule:<name> or relay")]]
    channel: Required[Annotated[str, Field(description="http, callback, amqp, local, rule or relay")]]
    reason: Required[str | None]
    votes: Required[int]
    required: Required[int]
    rule: Required[str | None]
    dryRun: Annotated[bool, Field(description="present and true where no StartRequest will follow: approvals.dry_run")]


@_Strict
class RefusedData(ApprovalData, total=False):
    """An authenticated attempt that was refused."""

    refusal: Required[Annotated[str, Field(description="the reason, as the caller was told")]]


@_Strict
class VoidedData(_AboutEvent, total=False):
    """Recorded votes count no more."""

    why: Required[Literal["changed", "expired", "ended"]]
    dryRun: bool


@_Strict
class StartRequestData(_AboutEvent, total=False):
    """What became of a StartRequest."""

    status: Required[Annotated[int | None, Field(description="HTTP status of the last answer; null when there was none")]]
    attempts: Required[Annotated[int, Field(description="how often it was sent")]]
    reason: Required[str | None]


@_Strict
class RelayData(TypedDict):
    """Something about the relay itself."""

    sink: Annotated[str | None, Field(description="the sink it is about, if one is meant")]
    reason: str
    count: Annotated[int, Field(description="how many it stands for")]


@dataclass(frozen=True, slots=True)
class EventType:
    """One row of the catalogue. ``name`` is ``<family>.<change>``."""

    name: str
    when: str
    data: Any

    @property
    def type(self) -> str:
        """The CloudEvents type."""
        return f"{PREFIX}{self.name}{VERSION}"

    @property
    def dataschema(self) -> str:
        """The URI that names the schema of ``data``."""
        return dataschema(self.name)


def dataschema(name: str) -> str:
    """The URI that names the schema of ``data`` for ``<family>.<change>``; it identifies and is not fetched."""
    return f"urn:imdsrelay:schema:{name}{VERSION}"


CATALOG = (
    EventType("event.scheduled", "an EventId is first seen, with any status but Started", EventData),
    EventType("event.updated", "any field of a known event changed and it did not move to Started", UpdatedData),
    EventType("event.started", "an event is first seen as Started, or moved to Started", StartedData),
    EventType("event.ended", "an event is gone from the document", EndedData),
    EventType("approval.recorded", "a vote, hold or release was accepted", ApprovalData),
    EventType("approval.granted", "the rule is satisfied", ApprovalData),
    EventType("approval.refused", "an authenticated attempt was refused", RefusedData),
    EventType("approval.voided", "recorded votes count no more", VoidedData),
    EventType("startrequest.accepted", "IMDS answered 200 to a StartRequest", StartRequestData),
    EventType("startrequest.failed", "the relay gave up on a StartRequest", StartRequestData),
    EventType("relay.source-lost", "the metadata service has given no usable answer for too long", RelayData),
    EventType("relay.source-recovered", "the metadata service answers again", RelayData),
    EventType("relay.sink-failing", "a sink fails repeatedly", RelayData),
    EventType("relay.sink-recovered", "a failing sink delivers again", RelayData),
    EventType("relay.sink-disabled", "a sink's far side asked to stop; its entries are kept until an operator resumes it", RelayData),
    EventType("relay.dead-lettered", "an entry was given up and is listed as a dead letter", RelayData),
    EventType("relay.store-failing", "the state file cannot be written; notices go out from memory, approvals are refused", RelayData),
    EventType("relay.clock-skewed", "a receiver's clock and ours differ", RelayData),
    EventType("relay.ping", "an operator asked for a test message", RelayData),
)
"""Every type, in the order of an event's life."""


def schema(event_type: EventType) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a whole CloudEvent of this type, as structured JSON."""
    data = TypeAdapter(event_type.data).json_schema(ref_template="#/$defs/{model}")
    definitions = data.pop("$defs", {})
    text = {"type": "string", "minLength": 1}
    properties: dict[str, Any] = {
        "specversion": {"const": "1.0"},
        "id": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
        "type": {"const": event_type.type},
        "source": {"type": "string", "pattern": "^imds://[a-z0-9-]{1,80}(/relays/.+)?$"},
        "subject": text,
        "time": {"type": "string", "format": "date-time"},
        "datacontenttype": {"const": "application/json"},
        "dataschema": {"const": event_type.dataschema},
        "scope": {"type": "string", "pattern": "^[a-z0-9-]{1,80}$"},
        "relay": text,
        **dict.fromkeys(("eventtype", "eventsource", "outcome", "correlationid", "causationid", "partitionkey", "traceparent"), text),
        "notbefore": {"type": "string", "format": "date-time"},
        "journalhead": {"type": "string", "pattern": "^[0-9]+:[0-9a-f]{64}$"},
        "data": data,
    }
    required = ["specversion", "id", "type", "source", "time", "datacontenttype", "dataschema", "scope", "relay", "data"]
    if not event_type.name.startswith("event."):
        required.append("journalhead")
    if not event_type.name.startswith("relay."):
        required += ["subject", "correlationid", "partitionkey"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{event_type.dataschema}:cloudevent",
        "title": event_type.type,
        "description": event_type.when,
        "type": "object",
        "properties": properties,
        "required": required,
        "$defs": definitions,
    }
