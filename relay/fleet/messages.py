"""The messages between the agents and the hub of a fleet, and how each becomes a CloudEvent. Pure.

Agents send `Pulse`, `VoteMessage` and `StartResult`, and their ``event.*`` and ``relay.*`` events
as they recorded them. The hub sends `StartOrder`, `VoteAnswer`, `PulseRequest` and `HubScopeState`.
`relay.fleet.message_reader` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, ClassVar, Literal, TypeAlias

from typing_extensions import override  # in typing from Python 3.12

from relay.events.build import Origin
from relay.events.cloudevent import TYPE_PREFIX, TYPE_VERSION, CloudEvent, digest_id
from relay.events.model import ScheduledEvent
from relay.events.timestamps import format_rfc3339

MAX_BODY_BYTES = 1024 * 1024
"""Bytes of a message. A connection of the fleet must let bodies of this size pass."""
MAX_LIVE_EVENTS = 1000
"""Events that a pulse lists."""
MAX_NAMES = 1000
"""Names of a VM in a pulse."""
MAX_TOLD = 500
MAX_ENDING = 1000
MAX_AWAITED = 1000
"""Entries of the lists in a `HubScopeState`."""
MAX_REASON = 1000
"""Characters of the reason in a result."""

StartOutcome: TypeAlias = Literal["accepted", "refused", "changed", "stale", "failed"]
"""How a start order ended.

- ``accepted``: IMDS answered 200. ``refused``: it answered 400. ``failed``: neither.
- ``changed``: the event is gone, or has another revision or status. Nothing was sent.
- ``stale``: the order came too late. Nothing was sent.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """A message of the fleet."""

    kind: ClassVar[str]

    def to_event(self, origin: Origin, at: datetime) -> CloudEvent:
        """Return the message as a CloudEvent of this relay."""
        data, time = self._data(), format_rfc3339(at)
        attributes = {
            "specversion": "1.0",
            "id": digest_id(origin.relay_source, self.kind, time, data),
            "type": cloudevent_type(self.kind),
            "source": origin.relay_source,
            "time": time,
            "datacontenttype": "application/json",
            "scope": origin.scope,
            "relay": origin.relay,
            **self._extension_attributes(),
        }
        return CloudEvent.build(attributes, data)

    def _extension_attributes(self) -> Mapping[str, str | None]:
        return {}

    def _data(self) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse(_Message):
    """A sign of life of an agent, and what its VM sees."""

    kind: ClassVar[str] = "pulse"
    vm_id: str | None
    boot_id: str | None
    version: str
    """The version of the agent."""
    zone: str | None
    names: tuple[str, ...]
    """The names under which this VM can stand in the resources of an event."""
    live: tuple[Mapping[str, Any], ...] | None
    """The ``data`` of each live event. None: they do not fit, so the pulse says nothing of them."""
    poll_age: float | None
    """Seconds since the last good poll; None: there was none."""
    clock_offset: float | None
    """Seconds that the clock of this VM is ahead of that of IMDS; None: unknown."""

    @property
    def events(self) -> tuple[ScheduledEvent, ...] | None:
        """The live events; None if the pulse says nothing of them."""
        return (
            None
            if self.live is None
            else tuple(map(ScheduledEvent.from_cloudevent_data, self.live))
        )

    @override
    def to_event(self, origin: Origin, at: datetime) -> CloudEvent:
        """Return the message as a CloudEvent. It lists no events if they do not fit."""
        if self.live is None:
            return _Message.to_event(self, origin, at)
        if len(self.live) <= MAX_LIVE_EVENTS:
            event = _Message.to_event(self, origin, at)
            if len(event.body) <= MAX_BODY_BYTES:
                return event
        return replace(self, live=None).to_event(origin, at)

    @override
    def _data(self) -> Mapping[str, Any]:
        return {
            "vmId": self.vm_id,
            "bootId": self.boot_id,
            "version": self.version,
            "zone": self.zone,
            "names": self.names[:MAX_NAMES],
            "live": self.live,
            "pollAge": self.poll_age,
            "clockOffset": self.clock_offset,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteMessage(_Message):
    """A decision that a local program gave its agent."""

    kind: ClassVar[str] = "vote"
    request_id: str
    """A repeat of the request has the same."""
    user: str
    """Who gave it to the agent, such as ``local:root``. Only for the audit."""
    body: Mapping[str, Any]
    """The body of ``POST /v1/approvals``."""

    @override
    def _data(self) -> Mapping[str, Any]:
        return {"requestId": self.request_id, "user": self.user, "body": self.body}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOrder(_Message):
    """The hub's order to send one StartRequest."""

    kind: ClassVar[str] = "start-order"
    grant: int
    attempt: int
    event_id: str
    """The EventId in the case that Azure wrote."""
    revision: str
    deadline: datetime
    """No StartRequest may be sent after it. The agent refuses one that is too far away."""
    journalhead: str | None = None
    """The position and hash of the hub's journal before the claim."""
    vm_id: str | None = None
    """The VM that is meant. Two names of relays can give the same relay word. None: any."""

    @override
    def _extension_attributes(self) -> Mapping[str, str | None]:
        return {"journalhead": self.journalhead}

    @override
    def _data(self) -> Mapping[str, Any]:
        return {
            "grant": self.grant,
            "attempt": self.attempt,
            "eventId": self.event_id,
            "revision": self.revision,
            "deadline": format_rfc3339(self.deadline),
            "vmId": self.vm_id,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StartResult(_Message):
    """How a start order ended."""

    kind: ClassVar[str] = "start-result"
    grant: int
    attempt: int
    result: StartOutcome
    status: int | None
    """The HTTP status of IMDS; None if there was no answer."""
    reason: str | None
    """A sentence for people."""

    @override
    def _data(self) -> Mapping[str, Any]:
        return {
            "grant": self.grant,
            "attempt": self.attempt,
            "result": self.result,
            "status": self.status,
            "reason": None if self.reason is None else self.reason[:MAX_REASON],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteAnswer(_Message):
    """The hub's answer to a vote."""

    kind: ClassVar[str] = "vote-answer"
    request_id: str
    status: int
    """The HTTP status for the local program."""
    body: Mapping[str, Any]

    @override
    def _data(self) -> Mapping[str, Any]:
        return {"requestId": self.request_id, "status": self.status, "body": self.body}


@dataclass(frozen=True, slots=True, kw_only=True)
class PulseRequest(_Message):
    """The hub's request for a pulse now."""

    kind: ClassVar[str] = "pulse-request"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubScopeState(_Message):
    """What the hub knows about one scope."""

    kind: ClassVar[str] = "state"
    hub_time: datetime
    told: tuple[str, ...]
    """The ids of the events that the hub recorded in the last seconds, the newest last."""
    ending: tuple[str, ...]
    """The EventIds that an agent reported as gone and that have not ended yet."""
    awaited: tuple[str, ...]
    """The relay words of the agents that showed one of these and have not said that it is gone."""

    @override
    def _data(self) -> Mapping[str, Any]:
        return {
            "hubTime": format_rfc3339(self.hub_time),
            "told": self.told[-MAX_TOLD:],
            "ending": self.ending[:MAX_ENDING],
            "awaited": self.awaited[:MAX_AWAITED],
        }


Message: TypeAlias = (
    Pulse | VoteMessage | StartOrder | StartResult | VoteAnswer | PulseRequest | HubScopeState
)
Content: TypeAlias = Message | CloudEvent
"""What a message says. A CloudEvent is an ``event.*`` or ``relay.*`` that an agent recorded."""


def cloudevent_type(kind: str) -> str:
    """Return the ``type`` of the messages of a kind."""
    return f"{TYPE_PREFIX}fleet.{kind}{TYPE_VERSION}"
