"""The scheduled event and the document of events, as the relay knows them from any source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from relay.events.cloudevent import digest_id
from relay.events.timestamps import parse_timestamp


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledEvent:
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
    def from_fields(cls, fields: Mapping[str, Any]) -> ScheduledEvent:
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
    events: tuple[ScheduledEvent, ...]
