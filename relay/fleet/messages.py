"""The messages between the agents and the hub of a fleet: each is one model. Pure.

Agents send `Pulse`, `VoteMessage` and `StartResult`, and their ``event.*`` and ``relay.*`` events
as they recorded them. The hub sends `StartOrder`, `VoteAnswer` and `PulseRequest`.

`read_message` reads one from bytes that anybody may have sent. So it is strict about every field
that is used, and ignores fields that a later version adds. It does not prove who sent the message:
`relay.fleet.routing` does, and `ReceivedMessage.require_sent_by` compares both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
)
from pydantic.alias_generators import to_camel
from typing_extensions import override  # in typing from Python 3.12

from relay.amqp.connection import UnusableMessage
from relay.events.build import CATALOG, Origin, relay_event
from relay.events.cloudevent import TYPE_PREFIX, TYPE_VERSION, CloudEvent, digest_id, event_name
from relay.events.model import EventId, ScheduledEvent, relay_word
from relay.events.timestamps import format_rfc3339, parse_timestamp
from relay.fleet.routing import AuthorizedSender
from relay.settings import first_error_path_and_message

MAX_BODY_BYTES = 1024 * 1024
"""Bytes of a message. A connection of the fleet must let bodies of this size pass."""
MAX_LIVE_EVENTS = 1000
"""Events that a pulse lists."""
MAX_NAMES = 1000
"""Names of a VM in a pulse."""
MAX_ASKED = 1000
"""Events that a request for pulses names."""
MAX_REASON = 1000
"""Characters of the reason in a result."""
MAX_SECONDS = 200 * 366 * 86_400.0
"""The longest time that a message may state. Arithmetic with it cannot leave the calendar."""
ORDER_LIFETIME = 5.0
"""Seconds from an order to its deadline. An agent refuses a longer time."""
ANSWER_MARGIN = 3.0
"""Seconds after the deadline in which the hub still waits for the result."""
_MAX_BODY_FIELDS = 64 * 1024
"""Bytes of the JSON of a vote, and of the answer to it."""
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z", re.ASCII)
_EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)
_LATEST = datetime(2200, 1, 1, tzinfo=UTC)
"""Times outside these bounds are errors: arithmetic near the ends of the calendar can fail."""

StartOutcome: TypeAlias = Literal["accepted", "refused", "changed", "stale", "failed"]
"""How a start order ended.

- ``accepted``: IMDS answered 200. ``refused``: it answered 400. ``failed``: neither.
- ``changed``: the event is gone, or has another revision or status. Nothing was sent.
- ``stale``: the order came too late. Nothing was sent.
"""


# --- the fields


def _parse_time(value: object) -> object:
    if not isinstance(value, str):
        return value
    moment = parse_timestamp(value) if _RFC3339.fullmatch(value) else None
    if moment is None or not _EARLIEST <= moment <= _LATEST:
        raise ValueError(f"it is no time: {value!r:.50}")
    return moment


def _require_small_json(value: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(orjson.dumps(value))
    except orjson.JSONEncodeError as error:
        raise ValueError(f"it cannot be written as JSON: {error}") from None
    if size > _MAX_BODY_FIELDS:
        raise ValueError(f"it has more than {_MAX_BODY_FIELDS} bytes")
    return value


def _require_each_once(live: tuple[ChangeData, ...] | None) -> object:
    if live is not None and len({event.eventId.lower() for event in live}) < len(live):
        raise ValueError("it lists an event twice")
    return live


_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]+$"
_Name = Annotated[str, Field(max_length=256, pattern=_PRINTABLE)]
_Number = Annotated[int, Field(ge=0, lt=2**63)]
_Time = Annotated[datetime, BeforeValidator(_parse_time), PlainSerializer(format_rfc3339)]
_Status = Annotated[int, Field(ge=100, lt=600)]
_Seconds = Annotated[float, Field(allow_inf_nan=False, ge=-MAX_SECONDS, le=MAX_SECONDS)]
_SmallJson = Annotated[dict[str, Any], AfterValidator(_require_small_json)]


class _Strict(BaseModel):
    """What may come from anybody."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, hide_input_in_errors=True)


class ChangeData(_Strict):
    """What all ``event.*`` share. It takes everything that the reader of IMDS takes."""

    routed_as: ClassVar = "event"
    eventId: EventId  # noqa: N815  # here and below: the name in JSON
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

    def to_scheduled_event(self) -> ScheduledEvent:
        return ScheduledEvent.from_cloudevent_data(dict(self))


class EndedData(ChangeData):
    outcome: Literal["completed", "canceled", "unknown"]
    evidence: Literal["observed", "rebooted", "none"]


class _Message(_Strict):
    """A message of the fleet. Its fields are written in camelCase."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    kind: ClassVar[str]
    routed_as: ClassVar[Literal["pulse", "vote", "start"] | None] = None
    """The first word of the routing key under which an agent sends it."""

    def to_event(self, origin: Origin, at: datetime) -> CloudEvent:
        data, time = self.model_dump(by_alias=True, exclude={"journalhead"}), format_rfc3339(at)
        attributes: dict[str, str | None] = {
            "specversion": "1.0",
            "id": digest_id(origin.relay_source, self.kind, time, data),
            "type": cloudevent_type(self.kind),
            "source": origin.relay_source,
            "time": time,
            "datacontenttype": "application/json",
            "scope": origin.scope,
            "relay": origin.relay,
        }
        if isinstance(self, StartOrder):
            attributes["journalhead"] = self.journalhead
        return CloudEvent.build(attributes, data)


class Pulse(_Message):
    """A sign of life of an agent, and what its VM sees."""

    kind = routed_as = "pulse"
    vm_id: _Name | None = None
    version: _Name
    """The version of the agent."""
    zone: _Name | None = None
    names: Annotated[tuple[_Name, ...], Field(strict=False, max_length=MAX_NAMES)]
    """The names under which this VM can stand in the resources of an event."""
    live: Annotated[
        tuple[ChangeData, ...] | None,
        Field(strict=False, max_length=MAX_LIVE_EVENTS),
        AfterValidator(_require_each_once),
    ]
    """The live events. None: they do not fit, so the pulse says nothing of them."""
    poll_age: Annotated[_Seconds | None, Field(ge=0)] = None
    """Seconds since the last good poll; None: there was none."""
    clock_offset: _Seconds | None = None
    """Seconds that the clock of this VM is ahead of that of IMDS; None: unknown."""

    @override
    def to_event(self, origin: Origin, at: datetime) -> CloudEvent:
        """Return the message as a CloudEvent. It lists no events if they do not fit."""
        if len(self.live or ()) <= MAX_LIVE_EVENTS:
            event = super().to_event(origin, at)
            if len(event.body) <= MAX_BODY_BYTES:
                return event
        return self.model_copy(update={"live": None}).to_event(origin, at)


class VoteMessage(_Message):
    """A decision that a local program gave its agent."""

    kind = routed_as = "vote"
    nonce: _Name
    """The answer to this message has the same."""
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,256}$")]
    """A repeat of the request has the same."""
    user: _Name
    """Who gave it to the agent, such as ``local:root``. Only for the audit."""
    body: _SmallJson
    """The body of ``POST /v1/approvals``."""


class StartOrder(_Message):
    """The hub's order to send one StartRequest."""

    kind = "start-order"
    grant: _Number
    attempt: _Number
    event_id: EventId
    """The EventId in the case that Azure wrote."""
    revision: Annotated[str, Field(min_length=1, max_length=128)]
    deadline: _Time
    """No StartRequest may be sent after it. The agent refuses one that is too far away."""
    vm_id: _Name | None = None
    """The VM that is meant. Two names of relays can give the same relay word. None: any."""
    journalhead: str | None = None
    """The position and hash of the hub's journal before the claim: an attribute, not data."""


class StartResult(_Message):
    kind, routed_as = "start-result", "start"
    grant: _Number
    attempt: _Number
    result: StartOutcome
    status: _Status | None = None
    """The HTTP status of IMDS; None if there was no answer."""
    reason: Annotated[str | None, Field(max_length=MAX_REASON)] = None
    """A sentence for people."""


class VoteAnswer(_Message):
    kind = "vote-answer"
    nonce: _Name
    status: _Status
    """The HTTP status for the local program."""
    body: _SmallJson


class PulseRequest(_Message):
    """The hub asks the agents of a scope for events that another of them says are gone."""

    kind = "pulse-request"
    event_ids: Annotated[tuple[EventId, ...], Field(strict=False, max_length=MAX_ASKED)]


Message: TypeAlias = Pulse | VoteMessage | StartOrder | StartResult | VoteAnswer | PulseRequest
MESSAGES: tuple[type[Message], ...] = get_args(Message)
Content: TypeAlias = Message | ChangeData | CloudEvent
"""What a message says: ``event.*`` are ChangeData. A CloudEvent is a ``relay.*``."""


def cloudevent_type(kind: str) -> str:
    return f"{TYPE_PREFIX}fleet.{kind}{TYPE_VERSION}"


# --- what arrives


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedMessage:
    """A message that was read. Nothing in it proves who sent it."""

    origin: Origin
    """The relay that the message names as its sender."""
    at: datetime
    """When the sender made the message, by its own clock."""
    content: Content

    def require_sent_by(self, sender: AuthorizedSender, kind: str, hub: Origin) -> None:
        """Raise UnusableMessage if it is not what its key says, or of the ``hub`` itself."""
        if self.origin == hub:
            raise UnusableMessage("it names the hub itself as its sender")
        if (self.origin.scope, relay_word(self.origin.relay)) != (sender.scope, sender.relay):
            raise UnusableMessage("its body names another relay than its routing key")
        if kind != ("relay" if isinstance(self.content, CloudEvent) else self.content.routed_as):
            raise UnusableMessage("its body is of another kind than its routing key")


class _Envelope(_Strict):
    specversion: Literal["1.0"]
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    type: str
    source: str
    time: _Time
    scope: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,80}$")]
    relay: _Name
    subject: str | None = None
    journalhead: Annotated[str | None, Field(pattern=r"^[0-9]{1,18}:[0-9a-f]{64}$")] = None
    data: dict[str, Any]

    @property
    def origin(self) -> Origin:
        return Origin(self.scope, self.relay)


class _RelayEventData(_Strict):
    sink: Annotated[str | None, Field(max_length=128, pattern=_PRINTABLE)]
    reason: Annotated[str, Field(max_length=10_000)]
    count: _Number


_MODELS: Mapping[str, type[Message | ChangeData]] = {
    **{cloudevent_type(model.kind): model for model in MESSAGES},
    **{
        f"{TYPE_PREFIX}event.{change}{TYPE_VERSION}": EndedData if change == "ended" else ChangeData
        for change in ("scheduled", "updated", "started", "ended")
    },
}
_RELAY_EVENT_TYPES = {each.type for each in CATALOG if each.name.startswith("relay.")}


def read_message(body: bytes) -> ReceivedMessage:
    """Return a message with its sender and time. Raises UnusableMessage, and nothing else."""
    if len(body) > MAX_BODY_BYTES:
        raise UnusableMessage(f"its body has more than {MAX_BODY_BYTES} bytes")
    content: Content
    try:
        fields = orjson.loads(body)
        envelope = _Envelope.model_validate(fields)
        if envelope.type in _RELAY_EVENT_TYPES:
            content = _read_relay_event(envelope, fields)
        elif (model := _MODELS.get(envelope.type)) is not None:
            data = {**envelope.data, "journalhead": envelope.journalhead}
            content = model.model_validate(data)
        else:
            raise UnusableMessage(f"its type is unknown: {envelope.type!r:.100}")
    except orjson.JSONDecodeError as error:
        raise UnusableMessage(f"its body is not JSON: {error}") from None
    except orjson.JSONEncodeError as error:
        raise UnusableMessage(f"its body cannot be written as JSON: {error}") from None
    except ValidationError as error:
        path, problem = first_error_path_and_message(error)
        raise UnusableMessage(f"its body is no message of a fleet: {path}: {problem}") from None
    return ReceivedMessage(origin=envelope.origin, at=envelope.time, content=content)


def _read_relay_event(envelope: _Envelope, fields: Any) -> CloudEvent:
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
        envelope.time,
        sink=data.sink,
        reason=data.reason,
        count=data.count,
        head=envelope.journalhead,
    )
    for name in ("source", "subject", "id", "time"):
        if fields.get(name) != expected.attributes.get(name):
            raise UnusableMessage(f"its {name} is not that of its content")
    return expected
