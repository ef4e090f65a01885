"""The messages between the agents and the hub of a fleet: each is one model. Pure.

Agents send `Pulse`, `VoteMessage` and `StartResult`, and their ``event.*`` and ``relay.*`` events
as they recorded them. The hub sends `StartOrder`, `VoteAnswer` and `PulseRequest`.
The fields are strict, because anybody may have sent what is read (`relay.fleet.message_reader`).
Fields that a later version adds are ignored.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic.alias_generators import to_camel
from typing_extensions import override  # in typing from Python 3.12

from relay.events.build import Origin
from relay.events.cloudevent import TYPE_PREFIX, TYPE_VERSION, CloudEvent, digest_id
from relay.events.model import EventId, ScheduledEvent
from relay.events.timestamps import format_rfc3339, parse_timestamp

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


PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]+$"
Name = Annotated[str, Field(max_length=256, pattern=PRINTABLE)]
Number = Annotated[int, Field(ge=0, lt=2**63)]
MessageId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Time = Annotated[datetime, BeforeValidator(_parse_time), PlainSerializer(format_rfc3339)]
_Status = Annotated[int, Field(ge=100, lt=600)]
_Seconds = Annotated[float, Field(allow_inf_nan=False, ge=-MAX_SECONDS, le=MAX_SECONDS)]
_SmallJson = Annotated[dict[str, Any], AfterValidator(_require_small_json)]


class Strict(BaseModel):
    """What may come from anybody."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, hide_input_in_errors=True)


class ChangeData(Strict):
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


class _Message(Strict):
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
    vm_id: Name | None = None
    version: Name
    """The version of the agent."""
    zone: Name | None = None
    names: Annotated[tuple[Name, ...], Field(strict=False, max_length=MAX_NAMES)]
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
    nonce: Name
    """The answer to this message has the same."""
    request_id: Name
    """A repeat of the request has the same."""
    user: Name
    """Who gave it to the agent, such as ``local:root``. Only for the audit."""
    body: _SmallJson
    """The body of ``POST /v1/approvals``."""


class StartOrder(_Message):
    """The hub's order to send one StartRequest."""

    kind = "start-order"
    grant: Number
    attempt: Number
    event_id: EventId
    """The EventId in the case that Azure wrote."""
    revision: Annotated[str, Field(min_length=1, max_length=128)]
    deadline: Time
    """No StartRequest may be sent after it. The agent refuses one that is too far away."""
    vm_id: Name | None = None
    """The VM that is meant. Two names of relays can give the same relay word. None: any."""
    journalhead: str | None = None
    """The position and hash of the hub's journal before the claim: an attribute, not data."""


class StartResult(_Message):
    kind, routed_as = "start-result", "start"
    grant: Number
    attempt: Number
    result: StartOutcome
    status: _Status | None = None
    """The HTTP status of IMDS; None if there was no answer."""
    reason: Annotated[str | None, Field(max_length=MAX_REASON)] = None
    """A sentence for people."""


class VoteAnswer(_Message):
    kind = "vote-answer"
    nonce: Name
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
