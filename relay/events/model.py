"""The Scheduled Events document: tolerant of what is unknown, strict about what is broken.

Source of every field: Microsoft, "Azure Metadata Service: Scheduled Events", section on event properties.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from relay.errors import DocumentError
from relay.events.cloudevent import digest_id
from relay.events.timestamps import format_rfc3339, parse_timestamp

MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
"""Bytes; an answer over this size is refused."""


@dataclass(frozen=True, slots=True)
class Event:
    """One scheduled event as Azure last described it. What Azure left blank or out is None.

    ``duration`` is in seconds, None when unknown (Azure says -1). ``not_before`` is RFC 3339 where it could be read,
    else as it came.
    """

    event_id: str
    event_type: str | None
    event_status: str | None
    resource_type: str | None
    resources: tuple[str, ...]
    not_before: str | None
    description: str | None
    event_source: str | None
    duration: int | None

    @property
    def key(self) -> str:
        """The EventId without case: what events are compared by."""
        return self.event_id.lower()

    @property
    def is_started(self) -> bool:
        """Whether Azure says that the event is under way."""
        return (self.event_status or "").lower() == "started"

    @property
    def not_before_time(self) -> datetime | None:
        """NotBefore as a moment in UTC; None when Azure gave none or none that can be read."""
        return parse_timestamp(self.not_before)

    @property
    def revision(self) -> str:
        """Names the state that an approver saw: type, source, resources, NotBefore, duration and status."""
        resources = sorted(self.resources)
        parts = (
            self.event_type,
            self.event_source,
            resources,
            self.not_before,
            self.duration,
            self.event_status,
        )
        return digest_id("revision", self.key, *parts)[:16]

    def to_fields(self) -> dict[str, Any]:
        """The event under the names that ``data`` of a CloudEvent has for it."""
        return {
            "eventId": self.event_id,
            "eventType": self.event_type,
            "eventStatus": self.event_status,
            "resourceType": self.resource_type,
            "resources": list(self.resources),
            "notBefore": self.not_before,
            "description": self.description,
            "eventSource": self.event_source,
            "durationSeconds": self.duration,
        }

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Event:
        """The inverse of ``fields``; other keys are passed over."""
        return cls(
            fields["eventId"],
            fields["eventType"],
            fields["eventStatus"],
            fields["resourceType"],
            tuple(fields["resources"]),
            fields["notBefore"],
            fields["description"],
            fields["eventSource"],
            fields["durationSeconds"],
        )


@dataclass(frozen=True, slots=True)
class Document:
    """What one successful poll saw. The incarnation is a hint: it never suppresses a change and never forges one."""

    incarnation: int | None
    events: tuple[Event, ...]


def _whole_seconds(value: object) -> int | None:
    # Text is read too, as Microsoft's own sample does. Rounded up, so that no rule takes 8.9 s for 8. What is no number, or
    # negative (-1), or larger than JSON can be trusted with, is unknown.
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,15}\s*", value, re.ASCII):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        return None
    return math.ceil(value)


def _incarnation(value: object) -> int | None:
    # A hint is never worth an error; 64 bits with a sign are what the store can hold.
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -(2**63) <= value < 2**63 else None


def _or_none(value: object) -> object:
    return None if isinstance(value, str) and not value.strip() else value


_Text = Annotated[str | None, BeforeValidator(_or_none)]


class _WireEvent(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    EventId: str = Field(min_length=1, max_length=256, pattern=r"\S")
    EventType: _Text = None
    EventStatus: _Text = None
    ResourceType: _Text = None
    Resources: list[str] | None = None
    NotBefore: _Text = None
    Description: _Text = None
    EventSource: _Text = None
    DurationInSeconds: Annotated[int | None, BeforeValidator(_whole_seconds)] = None

    def event(self) -> Event:
        moment = parse_timestamp(self.NotBefore)
        return Event(
            self.EventId,
            self.EventType,
            self.EventStatus,
            self.ResourceType,
            tuple(dict.fromkeys(self.Resources or ())),
            format_rfc3339(moment) if moment else self.NotBefore,
            self.Description,
            self.EventSource,
            self.DurationInSeconds,
        )


class _WireDocument(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    DocumentIncarnation: Annotated[int | None, BeforeValidator(_incarnation)] = None
    Events: list[_WireEvent]


def parse_document(body: bytes) -> Document:
    """Read the document from the bytes of a 200 answer.

    Raises DocumentError for an empty body, what is not JSON, a document without ``Events`` or an event that is not one:
    none of these means "no events". An EventId twice in one document becomes one event: the furthest state, the gravest
    type, the longest duration and the resources of all, so that nothing is approved that no rule looked at.
    """
    if not body.strip():
        raise DocumentError("expected a Scheduled Events document, got an empty body", status=200)
    try:
        wire = _WireDocument.model_validate(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise DocumentError(
            f"expected a Scheduled Events document, got what is not JSON: {error}", status=200
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "document"
        said = "expected a JSON object" if first["type"] == "model_type" else first["msg"]
        raise DocumentError(
            f"expected a Scheduled Events document, {place}: {said}", status=200
        ) from error
    entries: dict[str, list[Event]] = {}
    for event in (entry.event() for entry in wire.Events):
        entries.setdefault(event.key, []).append(event)
    return Document(wire.DocumentIncarnation, tuple(_merge(same) for same in entries.values()))


_GRAVITY = ("terminate", "preempt", "redeploy", "reboot", "freeze", "")


def _merge(entries: list[Event]) -> Event:
    if len(entries) == 1:
        return entries[0]
    # Independent of the order in the document: Started beats anything, then the text of the fields decides.
    entries = sorted(entries, key=lambda event: (not event.is_started, str(event.to_fields())))
    durations = [event.duration for event in entries if event.duration is not None]
    return replace(
        entries[0],
        resources=tuple(sorted({name for event in entries for name in event.resources})),
        event_type=min((event.event_type for event in entries), key=_gravity),
        # What users start is what rules approve most readily.
        event_source=min(
            (event.event_source for event in entries),
            key=lambda source: (source or "").lower() == "user",
        ),
        duration=max(durations) if len(durations) == len(entries) else None,
    )


def _gravity(event_type: str | None) -> int:
    lowered = (event_type or "").lower()
    return (
        _GRAVITY.index(lowered) if lowered in _GRAVITY else -1
    )  # what nobody knows yet may be worse than all
