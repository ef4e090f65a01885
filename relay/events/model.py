"""The scheduled event and the document of events, as the relay knows them from any source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from relay.events.cloudevent import digest_id
from relay.events.timestamps import format_rfc3339, parse_timestamp
from relay.validation import first_error

MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
"""Bytes; an answer over this size is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One scheduled event as Azure last described it. A field that Azure left out or blank is None.

    ``duration`` is in seconds, None if it is unknown. ``not_before`` is RFC 3339, or the original
    text if that could not be read.
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
        """The EventId in lower case: events are compared by it."""
        return self.event_id.lower()

    @property
    def is_started(self) -> bool:
        """Whether Azure reports the event as Started."""
        return (self.event_status or "").lower() == "started"

    @property
    def not_before_time(self) -> datetime | None:
        """NotBefore in UTC; None if there is none or it could not be read."""
        return parse_timestamp(self.not_before)

    @property
    def revision(self) -> str:
        """A digest of the state that an approver saw.

        It covers type, source, resources, NotBefore, duration and status.
        """
        state = (
            self.event_type,
            self.event_source,
            sorted(self.resources),
            self.not_before,
            self.duration,
            self.event_status,
        )
        return digest_id("revision", self.key, *state)[:16]

    def to_fields(self) -> dict[str, Any]:
        """Return the fields under their names in the ``data`` of a CloudEvent."""
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
    def from_fields(cls, fields: Mapping[str, Any]) -> Event:
        """Make the event from what ``to_fields`` returned; other keys are ignored."""
        return cls(
            event_id=fields["eventId"],
            event_type=fields["eventType"],
            event_status=fields["eventStatus"],
            resource_type=fields["resourceType"],
            resources=tuple(fields["resources"]),
            not_before=fields["notBefore"],
            description=fields["description"],
            event_source=fields["eventSource"],
            duration=fields["durationSeconds"],
        )


@dataclass(frozen=True, slots=True)
class Document:
    """The events that one successful poll returned.

    ``incarnation`` is a hint. It neither suppresses nor causes a change
    (docs/protocol.md#the-document-incarnation).
    """

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
        path, message = first_error(error)
        raise DocumentError(
            f"expected a Scheduled Events document, {path or 'document'}: {message}", status=200
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
    entries = sorted(entries, key=lambda event: (not event.started, str(event.fields())))
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
