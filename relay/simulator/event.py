"""An event of the simulated Azure: its plan, its state, and its form in each api-version.

Sources: Microsoft, "Azure Metadata Service: Scheduled Events" for Linux and for Windows VMs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import format_datetime
from typing import Any, Final, Literal

from pydantic import ConfigDict, with_config

from relay.imds.document import DURATION_SINCE, PREFIX_UNTIL, SOURCE_SINCE, TYPE_SINCE
from relay.settings import Duration

EventType = Literal["Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"]
Status = Literal["Scheduled", "Started", "Completed", "Canceled"]
EventState = Literal["approved", "started", "gone"]
"""What a step or a test waits for."""

_FIELD_SINCE: Final = {
    "Description": "2019-04-01",
    "EventSource": SOURCE_SINCE,
    "DurationInSeconds": DURATION_SINCE,
}
DEFAULT_NOTICE: Final[Mapping[EventType, float]] = {
    "Freeze": 900.0,
    "Reboot": 900.0,
    "Redeploy": 600.0,
    "Preempt": 30.0,
    "Terminate": 300.0,
}
"""Seconds of notice that the pages promise by type. Terminate: the least that a user can set."""

_PLATFORM_DESCRIPTIONS: Final[Mapping[EventType, str]] = {
    "Freeze": "Virtual machine is being paused because of a memory-preserving Live Migration "
    "operation.",
    "Preempt": "Virtual machine is being evicted.",
    "Terminate": "Virtual machine is going to be deleted.",
}
_USER_ACTIONS: Final[Mapping[EventType, str]] = {
    "Reboot": "restarted",
    "Redeploy": "redeployed",
    "Terminate": "deleted",
}


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What Azure will do to some VMs: docs/simulator.md#playbooks. Durations pass scaled."""

    type: EventType = "Reboot"
    resources: tuple[str, ...] | None = None
    notice: Duration | None = None
    duration: int = -1
    source: Literal["Platform", "User"] = "Platform"
    description: str | None = None
    id: str | None = None
    name: str | None = None
    starts_after: Duration = 1.0
    lasts: Duration | None = 600.0
    approvals: Literal["any", "all", "ignored"] = "any"
    started: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    event_id: str
    plan: Plan
    status: Status
    not_before: datetime
    starts: datetime | None
    """When the event will be Started; None afterwards."""
    ends: datetime | None
    """When the event will be gone; None before it is Started, or if only `end` ends it."""
    approved_by: tuple[str, ...] = ()
    """VMs that sent a StartRequest while the event was Scheduled, in order."""
    approved: bool = False
    """Whether everybody who must approve has approved."""

    @property
    def is_live(self) -> bool:
        return self.status in ("Scheduled", "Started")

    def has_been(self, state: EventState) -> bool:
        """Whether the event is in this state, or in a later one."""
        if state == "gone":
            return not self.is_live
        return self.status != "Scheduled" or (state == "approved" and self.approved)

    @property
    def resources(self) -> tuple[str, ...]:
        return self.plan.resources or ()


def rfc1123(moment: datetime) -> str:
    """Return a time in the document's form, in seconds: ``Mon, 11 Apr 2022 22:26:58 GMT``."""
    return format_datetime(moment.replace(microsecond=0), usegmt=True)


def event_fields(event: Event, api_version: str) -> dict[str, Any] | None:
    """Return the event in the document of an api-version; None if the version lacks its type."""
    plan = event.plan
    if api_version < TYPE_SINCE.get(plan.type.lower(), ""):
        return None
    not_before, prefix = rfc1123(event.not_before), ""
    if api_version <= PREFIX_UNTIL:  # the pages of its time write NotBefore in ISO 8601
        not_before, prefix = f"{event.not_before:%Y-%m-%dT%H:%M:%SZ}", "_"
    entry: dict[str, Any] = {
        "EventId": event.event_id,
        "EventStatus": event.status,
        "EventType": plan.type,
        "ResourceType": "VirtualMachine",
        "Resources": [f"{prefix}{name}" for name in event.resources],
        "NotBefore": not_before if event.status == "Scheduled" else "",
        "Description": _description(plan),
        "EventSource": plan.source,
        "DurationInSeconds": plan.duration,
    }
    entry |= plan.fields
    return {
        key: value
        for key, value in entry.items()
        if value is not None and api_version >= _FIELD_SINCE.get(key, "")
    }


def _description(plan: Plan) -> str:
    if plan.description is not None:
        return plan.description
    if plan.source == "User" and (action := _USER_ACTIONS.get(plan.type)):
        return f"Virtual machine is going to be {action} as requested by authorized user."
    return _PLATFORM_DESCRIPTIONS.get(plan.type, "Host server is undergoing maintenance.")
