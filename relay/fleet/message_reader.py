"""Reads the messages of `relay.fleet.messages` from bytes that anybody may have sent. Pure.

`read_message` returns a message, or raises UnusableMessage. It is strict about every field that is
used, and ignores fields that a later version adds. It does not prove who sent the message:
`relay.fleet.routing` does, and `ReceivedMessage.require_matching_key` compares both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from relay.amqp.message_verification import UnusableMessage
from relay.events.build import Origin, relay_event
from relay.events.catalog import CATALOG
from relay.events.cloudevent import TYPE_PREFIX, TYPE_VERSION, CloudEvent, event_name
from relay.events.routing_words import relay_word
from relay.events.timestamps import parse_timestamp
from relay.fleet.messages import (
    MAX_AWAITED,
    MAX_BODY_BYTES,
    MAX_ENDING,
    MAX_LIVE_EVENTS,
    MAX_NAMES,
    MAX_REASON,
    MAX_TOLD,
    Content,
    HubScopeState,
    Pulse,
    PulseRequest,
    StartOrder,
    StartOutcome,
    StartResult,
    VoteAnswer,
    VoteMessage,
    cloudevent_type,
)
from relay.fleet.routing import AgentMessageKind, AgentRoutingKey
from relay.validation import first_error_path_and_message

MAX_SECONDS = 200 * 366 * 86_400.0
"""The longest time that a message may state. Arithmetic with it cannot leave the calendar."""
_MAX_BODY_FIELDS = 64 * 1024
"""Bytes of the JSON of a vote, and of the answer to it."""
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z", re.ASCII)
_EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)
_LATEST = datetime(2200, 1, 1, tzinfo=UTC)
"""Times outside these bounds are errors: arithmetic near the ends of the calendar can fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedMessage:
    """A message that was read. Nothing in it proves who sent it."""

    id: str
    origin: Origin
    """The relay that the message names as its sender."""
    at: datetime
    """When the sender made the message, by its own clock."""
    content: Content

    def require_matching_key(self, key: AgentRoutingKey) -> None:
        """Raise UnusableMessage if the message is not what its routing key says."""
        if (self.origin.scope, relay_word(self.origin.relay)) != (key.scope, key.relay):
            raise UnusableMessage("its body names another relay than its routing key")
        if self._agent_message_kind != key.kind:
            raise UnusableMessage("its body is of another kind than its routing key")

    @property
    def _agent_message_kind(self) -> AgentMessageKind | None:
        match self.content:
            case CloudEvent():
                return "relay" if self.content.name.startswith("relay.") else "event"
            case Pulse():
                return "pulse"
            case VoteMessage():
                return "vote"
            case StartResult():
                return "start"
        return None


def read_message(body: bytes) -> ReceivedMessage:
    """Return a message with its sender and time. Raises UnusableMessage, and nothing else."""
    if len(body) > MAX_BODY_BYTES:
        raise UnusableMessage(f"its body has more than {MAX_BODY_BYTES} bytes")
    try:
        fields = orjson.loads(body)
        envelope = _Envelope.model_validate(fields)
        reader = _READERS.get(envelope.type)
        if reader is None:
            raise UnusableMessage(f"its type is unknown: {envelope.type!r:.100}")
        at = _parse_time("time", envelope.time)
        content = reader(envelope, fields)
    except orjson.JSONDecodeError as error:
        raise UnusableMessage(f"its body is not JSON: {error}") from None
    except orjson.JSONEncodeError as error:
        raise UnusableMessage(f"its body cannot be written as JSON: {error}") from None
    except ValidationError as error:
        path, problem = first_error_path_and_message(error)
        raise UnusableMessage(f"its body is no message of a fleet: {path}: {problem}") from None
    return ReceivedMessage(id=envelope.id, origin=envelope.origin, at=at, content=content)


# --- the fields of each message

_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]+$"
_Name = Annotated[str, Field(max_length=256, pattern=_PRINTABLE)]
_EventId = Annotated[str, Field(min_length=1, max_length=256)]
_Number = Annotated[int, Field(ge=0, lt=2**63)]
_Status = Annotated[int, Field(ge=100, lt=600)]
_Seconds = Annotated[float, Field(allow_inf_nan=False, ge=-MAX_SECONDS, le=MAX_SECONDS)]
_MessageId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class _Data(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, hide_input_in_errors=True)


class _Envelope(_Data):
    specversion: Literal["1.0"]
    id: _MessageId
    type: str
    source: str
    time: str
    scope: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,80}$")]
    relay: _Name
    subject: str | None = None
    journalhead: Annotated[str | None, Field(pattern=r"^[0-9]{1,18}:[0-9a-f]{64}$")] = None
    data: dict[str, Any]

    @property
    def origin(self) -> Origin:
        return Origin(self.scope, self.relay)


class _PulseData(_Data):
    vmId: _Name | None = None  # noqa: N815  # here and below: the name in JSON
    bootId: _Name | None = None  # noqa: N815
    version: _Name
    zone: _Name | None = None
    names: Annotated[list[_Name], Field(max_length=MAX_NAMES)]
    live: Annotated[list[dict[str, Any]] | None, Field(max_length=MAX_LIVE_EVENTS)]
    pollAge: Annotated[_Seconds | None, Field(ge=0)] = None  # noqa: N815
    clockOffset: _Seconds | None = None  # noqa: N815


class _VoteData(_Data):
    requestId: _Name  # noqa: N815
    user: _Name
    body: dict[str, Any]


class _OrderData(_Data):
    grant: _Number
    attempt: _Number
    eventId: _EventId  # noqa: N815
    revision: Annotated[str, Field(min_length=1, max_length=128)]
    deadline: str
    vmId: _Name | None = None  # noqa: N815


class _ResultData(_Data):
    grant: _Number
    attempt: _Number
    result: StartOutcome
    status: _Status | None = None
    reason: Annotated[str | None, Field(max_length=MAX_REASON)] = None


class _VoteAnswerData(_Data):
    requestId: _Name  # noqa: N815
    status: _Status
    body: dict[str, Any]


class _HubStateData(_Data):
    hubTime: str  # noqa: N815
    told: Annotated[list[_MessageId], Field(max_length=MAX_TOLD)]
    ending: Annotated[list[_EventId], Field(max_length=MAX_ENDING)]
    awaited: Annotated[list[_Name], Field(max_length=MAX_AWAITED)]


class _EventFields(_Data):
    """What all ``event.*`` share. It takes everything that the reader of IMDS takes."""

    eventId: _EventId  # noqa: N815
    eventType: str | None  # noqa: N815
    eventStatus: str | None  # noqa: N815
    resourceType: str | None  # noqa: N815
    resources: list[str]
    notBefore: str | None  # noqa: N815
    description: str | None
    eventSource: str | None  # noqa: N815
    durationSeconds: Annotated[int | None, Field(ge=0, le=2**53)]  # noqa: N815
    documentIncarnation: Annotated[int | None, Field(ge=-(2**63), lt=2**63)]  # noqa: N815
    revision: Annotated[str, Field(max_length=128)]


class _AllFieldsOfUpdatedEvent(_EventFields):
    changed: dict[str, Any]


class _StartedEventFields(_AllFieldsOfUpdatedEvent):
    approvedByRelay: bool  # noqa: N815


class _EndedEventFields(_EventFields):
    outcome: Literal["completed", "canceled", "unknown"]
    evidence: Literal["observed", "rebooted", "none"]
    approvedByRelay: bool  # noqa: N815


class _RelayEventData(_Data):
    sink: Annotated[str | None, Field(max_length=128, pattern=_PRINTABLE)]
    reason: Annotated[str, Field(max_length=10_000)]
    count: _Number


def _read_pulse(envelope: _Envelope, _: Any) -> Pulse:
    data = _PulseData.model_validate(envelope.data)
    live = None
    if data.live is not None:
        live = tuple(_known_fields(_EventFields, event) for event in data.live)
        if len({event["eventId"].lower() for event in live}) < len(live):
            raise UnusableMessage("its body lists an event twice")
    return Pulse(
        vm_id=data.vmId,
        boot_id=data.bootId,
        version=data.version,
        zone=data.zone,
        names=tuple(data.names),
        live=live,
        poll_age=data.pollAge,
        clock_offset=data.clockOffset,
    )


def _read_vote(envelope: _Envelope, _: Any) -> VoteMessage:
    data = _VoteData.model_validate(envelope.data)
    _require_small_json("body", data.body)
    return VoteMessage(request_id=data.requestId, user=data.user, body=data.body)


def _read_order(envelope: _Envelope, _: Any) -> StartOrder:
    data = _OrderData.model_validate(envelope.data)
    return StartOrder(
        grant=data.grant,
        attempt=data.attempt,
        event_id=data.eventId,
        revision=data.revision,
        deadline=_parse_time("deadline", data.deadline),
        journalhead=envelope.journalhead,
        vm_id=data.vmId,
    )


def _read_result(envelope: _Envelope, _: Any) -> StartResult:
    data = _ResultData.model_validate(envelope.data)
    return StartResult(
        grant=data.grant,
        attempt=data.attempt,
        result=data.result,
        status=data.status,
        reason=data.reason,
    )


def _read_vote_answer(envelope: _Envelope, _: Any) -> VoteAnswer:
    data = _VoteAnswerData.model_validate(envelope.data)
    _require_small_json("body", data.body)
    return VoteAnswer(request_id=data.requestId, status=data.status, body=data.body)


def _read_pulse_request(_: _Envelope, __: Any) -> PulseRequest:
    return PulseRequest()


def _read_hub_scope_state(envelope: _Envelope, _: Any) -> HubScopeState:
    data = _HubStateData.model_validate(envelope.data)
    return HubScopeState(
        hub_time=_parse_time("hubTime", data.hubTime),
        told=tuple(data.told),
        ending=tuple(data.ending),
        awaited=tuple(data.awaited),
    )


def _read_change_event(model: type[_Data], envelope: _Envelope, fields: Any) -> CloudEvent:
    """Return an ``event.*`` as an agent recorded it, without fields of a later version."""
    data = _known_fields(model, envelope.data)
    if envelope.source != f"imds://{envelope.scope}":
        raise UnusableMessage("its source is not its scope")
    if envelope.subject != data["eventId"]:
        raise UnusableMessage("its subject is not what its data is about")
    attributes = {name: fields[name] for name in fields if name in _CHANGE_ATTRIBUTES}
    if not all(isinstance(value, str) for value in attributes.values()):
        raise UnusableMessage("its attributes are not all text")
    return CloudEvent.build(attributes, data)


def _read_relay_event(envelope: _Envelope, _: Any) -> CloudEvent:
    """Return a ``relay.*`` as an agent recorded it. The hub records it too, with the same id.

    So the id must be that of its content: an agent that chose it could choose the id that an event
    of another scope will have, and consumers would drop that event as a repeat.
    """
    data = _RelayEventData.model_validate(envelope.data)
    if envelope.journalhead is None:
        raise UnusableMessage("it has no journalhead")
    expected = relay_event(
        event_name(envelope.type),
        envelope.origin,
        _parse_time("time", envelope.time),
        sink=data.sink,
        reason=data.reason,
        count=data.count,
        head=envelope.journalhead,
    )
    given = (envelope.source, envelope.subject, envelope.id, envelope.time)
    names = ("source", "subject", "id", "time")
    for name, value in zip(names, given, strict=True):
        if value != expected.attributes.get(name):
            raise UnusableMessage(f"its {name} is not that of its content")
    return expected


def _known_fields(model: type[_Data], data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields that the model knows, in their order. Raises ValidationError."""
    model.model_validate(data)
    return {name: data[name] for name in data if name in model.model_fields}


def _require_small_json(name: str, value: Mapping[str, Any]) -> None:
    """Raise UnusableMessage if a value is large, or nested too deep to be written again."""
    try:
        size = len(orjson.dumps(value))
    except orjson.JSONEncodeError as error:
        raise UnusableMessage(f"its {name} cannot be written as JSON: {error}") from None
    if size > _MAX_BODY_FIELDS:
        raise UnusableMessage(f"its {name} has more than {_MAX_BODY_FIELDS} bytes")


def _parse_time(name: str, text: str) -> datetime:
    moment = parse_timestamp(text) if _RFC3339.fullmatch(text) else None
    if moment is None or not _EARLIEST <= moment <= _LATEST:
        raise UnusableMessage(f"its {name} is no time: {text!r:.50}")
    return moment


_CHANGE_ATTRIBUTES = frozenset(
    {
        *("specversion", "id", "type", "source", "subject", "time", "datacontenttype"),
        *("dataschema", "scope", "relay", "eventtype", "eventsource", "correlationid"),
        *("partitionkey", "notbefore", "outcome"),
    }
)
"""The attributes of an ``event.*``."""
_CHANGES: Mapping[str, type[_Data]] = {
    "event.scheduled": _EventFields,
    "event.updated": _AllFieldsOfUpdatedEvent,
    "event.started": _StartedEventFields,
    "event.ended": _EndedEventFields,
}
_READERS: Mapping[str, Callable[[_Envelope, Any], Content]] = {
    cloudevent_type(Pulse.kind): _read_pulse,
    cloudevent_type(VoteMessage.kind): _read_vote,
    cloudevent_type(StartOrder.kind): _read_order,
    cloudevent_type(StartResult.kind): _read_result,
    cloudevent_type(VoteAnswer.kind): _read_vote_answer,
    cloudevent_type(PulseRequest.kind): _read_pulse_request,
    cloudevent_type(HubScopeState.kind): _read_hub_scope_state,
    **{
        f"{TYPE_PREFIX}{name}{TYPE_VERSION}": partial(_read_change_event, model)
        for name, model in _CHANGES.items()
    },
    **{
        definition.type: _read_relay_event
        for definition in CATALOG
        if definition.name.startswith("relay.")
    },
}
"""How the data of each type is read."""
