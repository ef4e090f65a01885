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

from relay.events.cloudevent import TYPE_PREFIX, TYPE_VERSION

_Strict = with_config({"extra": "forbid"})


def _said(description: str) -> Any:
    return Field(description=description)


_Type = Annotated[
    str | None, _said("Freeze, Reboot, Redeploy, Preempt, Terminate, or what Azure adds")
]
_Status = Annotated[str | None, _said("Scheduled or Started, or what Azure adds")]
_ResourceType = Annotated[str | None, _said("VirtualMachine, or what Azure adds")]
_NotBefore = Annotated[
    str | None, _said("RFC 3339: Azure starts the event then at the earliest; null once started")
]
_Description = Annotated[str | None, _said("what Azure says of it, for people")]
_Source = Annotated[str | None, _said("Platform or User, or what Azure adds")]
_Duration = Annotated[
    int | None, _said("announced length of the interruption in seconds; null: unknown")
]
_Incarnation = Annotated[
    int | None, _said("of the document that it was last seen in; a hint, it can go back")
]
_ApprovedByRelay = Annotated[bool, _said("we had sent a StartRequest for it that was accepted")]


@_Strict
class EventData(TypedDict):
    """A scheduled event as Azure last described it."""

    eventId: Annotated[
        str, _said("Azure's identifier, in the case it came in; compare without case")
    ]
    eventType: _Type
    eventStatus: _Status
    resourceType: _ResourceType
    resources: Annotated[
        list[str], _said("names of the machines that the event concerns, all of them")
    ]
    notBefore: _NotBefore
    description: _Description
    eventSource: _Source
    durationSeconds: _Duration
    documentIncarnation: _Incarnation
    revision: Annotated[str, _said("names this state; an approval is bound to it")]


@_Strict
class UpdatedData(EventData):
    """What changed in a known event."""

    changed: Annotated[
        dict[str, Any],
        _said("name as in data, to the value before; never revision or documentIncarnation"),
    ]


@_Strict
class StartedData(EventData):
    """The event is under way."""

    changed: Annotated[
        dict[str, Any],
        _said("name as in data, to the value before; empty where it was first seen as Started"),
    ]
    approvedByRelay: _ApprovedByRelay


@_Strict
class EndedData(EventData):
    """The event left Azure's document; the rest is as last seen."""

    outcome: Annotated[
        Literal["completed", "canceled", "unknown"], _said("how it ended, as far as this relay saw")
    ]
    evidence: Annotated[Literal["observed", "rebooted", "none"], _said("what the outcome rests on")]
    approvedByRelay: _ApprovedByRelay


class _AboutEvent(TypedDict, total=False):
    eventId: Required[
        Annotated[
            str,
            _said(
                "Azure's identifier; of an unknown event as the caller wrote it, and the rest is null"
            ),
        ]
    ]
    eventType: Required[_Type]
    eventStatus: Required[_Status]
    resourceType: Required[_ResourceType]
    resources: Required[
        Annotated[
            list[str] | None, _said("names of the machines that the event concerns, all of them")
        ]
    ]
    notBefore: Required[_NotBefore]
    description: Required[_Description]
    eventSource: Required[_Source]
    durationSeconds: Required[_Duration]
    documentIncarnation: Required[_Incarnation]
    revision: Required[Annotated[str | None, _said("names the state that the decision is about")]]


_DryRun = Annotated[
    bool, _said("present and true where no StartRequest will follow: approvals.dry_run")
]


@_Strict
class ApprovalData(_AboutEvent, total=False):
    """A decision about an event, with the event as it then stood (all but eventId null where the EventId is unknown)."""

    approvalId: Required[Annotated[str, _said("names the decision, as the caller was told")]]
    decision: Required[
        Annotated[Literal["approve", "hold", "release"], _said("what was asked for")]
    ]
    principal: Required[
        Annotated[
            str,
            _said(
                "who: client:<name>, local:<user>, slack:<team>/<user> and the like, rule:<name> or relay"
            ),
        ]
    ]
    channel: Required[
        Annotated[
            str,
            _said(
                "the way it came: http, callback, amqp, local, page, slack, mattermost, rule or relay"
            ),
        ]
    ]
    reason: Required[Annotated[str | None, _said("why, in the caller's words")]]
    votes: Required[Annotated[int, _said("how many count now; 0 when automatic")]]
    required: Required[Annotated[int, _said("how many the rule asks for; 0 when automatic")]]
    rule: Required[Annotated[str | None, _said("name of the rule that matches the event")]]
    dryRun: _DryRun


@_Strict
class RefusedData(ApprovalData, total=False):
    """An authenticated attempt that was refused."""

    refusal: Required[Annotated[str, _said("the reason, as the caller was told")]]


@_Strict
class VoidedData(_AboutEvent, total=False):
    """Recorded votes count no more."""

    why: Required[
        Annotated[Literal["changed", "expired", "ended"], _said("what became of what was voted on")]
    ]
    dryRun: _DryRun


@_Strict
class StartRequestData(_AboutEvent, total=False):
    """What became of a StartRequest."""

    status: Required[
        Annotated[int | None, _said("HTTP status of the last answer; null when there was none")]
    ]
    attempts: Required[Annotated[int, _said("how often it was sent")]]
    reason: Required[Annotated[str | None, _said("why it was given up")]]


@_Strict
class RelayData(TypedDict):
    """Something about the relay itself."""

    sink: Annotated[str | None, _said("the sink it is about, if one is meant")]
    reason: Annotated[str, _said("what happened, for people")]
    count: Annotated[int, _said("how many it stands for")]


@dataclass(frozen=True, slots=True)
class EventDefinition:
    """One row of the catalogue. ``name`` is ``<family>.<change>``."""

    name: str
    when: str
    data: Any

    @property
    def type(self) -> str:
        """The CloudEvents type."""
        return f"{TYPE_PREFIX}{self.name}{TYPE_VERSION}"

    @property
    def dataschema(self) -> str:
        """The URI that names the schema of ``data``."""
        return dataschema(self.name)


def dataschema(name: str) -> str:
    """The URI that names the schema of ``data`` for ``<family>.<change>``; it identifies and is not fetched."""
    return f"urn:imdsrelay:schema:{name}{TYPE_VERSION}"


CATALOG = (
    EventDefinition(
        "event.scheduled", "an EventId is first seen, with any status but Started", EventData
    ),
    EventDefinition(
        "event.updated",
        "any field of a known event changed and it did not move to Started",
        UpdatedData,
    ),
    EventDefinition(
        "event.started", "an event is first seen as Started, or moved to Started", StartedData
    ),
    EventDefinition("event.ended", "an event is gone from the document", EndedData),
    EventDefinition("approval.recorded", "a vote, hold or release was accepted", ApprovalData),
    EventDefinition("approval.granted", "the rule is satisfied", ApprovalData),
    EventDefinition("approval.refused", "an authenticated attempt was refused", RefusedData),
    EventDefinition("approval.voided", "recorded votes count no more", VoidedData),
    EventDefinition(
        "startrequest.accepted", "IMDS answered 200 to a StartRequest", StartRequestData
    ),
    EventDefinition("startrequest.failed", "the relay gave up on a StartRequest", StartRequestData),
    EventDefinition(
        "relay.source-lost",
        "the metadata service has given no usable answer for too long",
        RelayData,
    ),
    EventDefinition("relay.source-recovered", "the metadata service answers again", RelayData),
    EventDefinition("relay.sink-failing", "a sink fails repeatedly", RelayData),
    EventDefinition("relay.sink-recovered", "a failing sink delivers again", RelayData),
    EventDefinition(
        "relay.sink-disabled",
        "a sink's far side asked to stop; its entries are kept until an operator resumes it",
        RelayData,
    ),
    EventDefinition(
        "relay.dead-lettered", "an entry was given up and is listed as a dead letter", RelayData
    ),
    EventDefinition(
        "relay.store-failing",
        "the state file cannot be written; notices go out from memory, approvals are refused",
        RelayData,
    ),
    EventDefinition("relay.clock-skewed", "a receiver's clock and ours differ", RelayData),
    EventDefinition("relay.ping", "an operator asked for a test message", RelayData),
)
"""Every type, in the order of an event's life."""


def event_schema(event_type: EventDefinition) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a whole CloudEvent of this type, as structured JSON."""
    data = TypeAdapter(event_type.data).json_schema(ref_template="#/$defs/{model}")
    definitions = data.pop("$defs", {})
    del data[
        "additionalProperties"
    ]  # what we write is strict; who reads must live with fields that a later version adds
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
        **dict.fromkeys(
            (
                "eventtype",
                "eventsource",
                "outcome",
                "correlationid",
                "causationid",
                "partitionkey",
                "traceparent",
            ),
            text,
        ),
        "notbefore": {"type": "string", "format": "date-time"},
        "journalhead": {"type": "string", "pattern": "^[0-9]+:[0-9a-f]{64}$"},
        "data": data,
    }
    required = [
        "specversion",
        "id",
        "type",
        "source",
        "time",
        "datacontenttype",
        "dataschema",
        "scope",
        "relay",
        "data",
    ]
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
