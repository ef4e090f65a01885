"""What Azure means to do to some VMs, how far it has come, and how the document of an api-version shows it.

Sources: Microsoft, "Azure Metadata Service: Scheduled Events" for Linux and for Windows VMs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import format_datetime
from typing import Any, ClassVar, Final, Literal

from relay.settings import Duration

EventType = Literal["Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"]
Status = Literal["Scheduled", "Started", "Completed", "Canceled"]

API_VERSIONS: Final = (
    "2017-03-01",
    "2017-08-01",
    "2017-11-01",
    "2019-01-01",
    "2019-04-01",
    "2019-08-01",
    "2020-07-01",
)
"""Every api-version of Scheduled Events, oldest first."""
NEWEST: Final = API_VERSIONS[-1]
NO_HEADER_NEEDED: Final = API_VERSIONS[0]
"""The one version that answers without ``Metadata: true``, and puts ``_`` before the names of VMs."""

_FIELD_SINCE: Final = {
    "Description": "2019-04-01",
    "EventSource": "2019-08-01",
    "DurationInSeconds": "2020-07-01",
}
_TYPE_SINCE: Final = {"Preempt": "2017-11-01", "Terminate": "2019-01-01"}

NOTICE: Final[Mapping[EventType, float]] = {
    "Freeze": 900.0,
    "Reboot": 900.0,
    "Redeploy": 600.0,
    "Preempt": 30.0,
    "Terminate": 300.0,
}
"""Seconds of notice that the pages promise for each type (Terminate: the least that a user can set)."""

_MIGRATION: Final = (
    "Virtual machine is being paused because of a memory-preserving Live Migration operation."
)
_PLATFORM: Final[Mapping[EventType, str]] = {
    "Freeze": _MIGRATION,
    "Preempt": "Virtual machine is being evicted.",
    "Terminate": "Virtual machine is going to be deleted.",
}
_BY_USER: Final[Mapping[EventType, str]] = {
    "Reboot": "restarted",
    "Redeploy": "redeployed",
    "Terminate": "deleted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What Azure means to do. Spans are seconds here, ``5s`` or ``15m`` in YAML and JSON, and run ``scale`` times faster."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    type: EventType = "Reboot"
    resources: tuple[str, ...] | None = None
    """The VMs concerned; None: the first VM of the scope."""
    notice: Duration | None = None
    """From now to NotBefore; None: what the pages promise for the type."""
    duration: int = -1
    """DurationInSeconds, whole and never scaled; -1 is "not known"."""
    source: Literal["Platform", "User"] = "Platform"
    description: str | None = None
    """None: what Azure says for this type and source."""
    id: str | None = None
    """The EventId, used as it is given; None: a new one, in upper case."""
    name: str | None = None
    """What playbooks and the control API may call the event besides its EventId."""
    starts_after: Duration = 1.0
    """From approval, or from NotBefore, to Started."""
    lasts: Duration | None = 600.0
    """From Started until the event is gone; None: until it is ended by hand."""
    approvals: Literal["any", "all", "ignored"] = "any"
    """Who brings the start forward: any VM, all VMs of ``resources`` together, or nobody."""
    started: bool = False
    """First seen as Started, as after a hardware failure."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the document in place of the right ones, to imitate what is odd; None takes a field away."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event and how far it has come. Completed and Canceled are never shown: such an event has left the document."""

    event_id: str
    plan: Plan
    status: Status
    not_before: datetime
    starts: datetime | None
    """When it will be Started; None once it is."""
    ends: datetime | None
    """When it will be gone; None before it is Started, and where only a hand ends it."""
    approved_by: tuple[str, ...] = ()
    """VMs whose StartRequest came while the event was Scheduled, in order."""
    approved: bool = False
    """Everybody who must approve has approved."""

    @property
    def live(self) -> bool:
        """Still in the document."""
        return self.status in ("Scheduled", "Started")

    @property
    def resources(self) -> tuple[str, ...]:
        """The VMs concerned."""
        return self.plan.resources or ()


def rfc1123(moment: datetime) -> str:
    """A moment as the document writes it, cut to the second: ``Mon, 11 Apr 2022 22:26:58 GMT``."""
    return format_datetime(moment.replace(microsecond=0), usegmt=True)


def event_fields(event: Event, api_version: str) -> dict[str, Any] | None:
    """The event as the document of ``api_version`` holds it; None where that version does not know its type."""
    plan = event.plan
    if api_version < _TYPE_SINCE.get(plan.type, ""):
        return None
    prefix = "_" if api_version == NO_HEADER_NEEDED else ""
    entry: dict[str, Any] = {
        "EventId": event.event_id,
        "EventStatus": event.status,
        "EventType": plan.type,
        "ResourceType": "VirtualMachine",
        "Resources": [prefix + name for name in event.resources],
        "NotBefore": rfc1123(event.not_before) if event.status == "Scheduled" else "",
        "Description": plan.description
        if plan.description is not None
        else _usual_description(plan),
        "EventSource": plan.source,
        "DurationInSeconds": plan.duration,
    }
    entry |= plan.fields
    return {
        key: value
        for key, value in entry.items()
        if value is not None and api_version >= _FIELD_SINCE.get(key, "")
    }


def _usual_description(plan: Plan) -> str:
    if plan.source == "User" and plan.type in _BY_USER:
        return (
            f"Virtual machine is going to be {_BY_USER[plan.type]} as requested by authorized user."
        )
    return _PLATFORM.get(plan.type, "Host server is undergoing maintenance.")
