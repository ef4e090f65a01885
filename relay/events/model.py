"""The scheduled event and the document of events, from any source, and what changed between two.

A source makes a `Document` of `ScheduledEvent` objects. `diff_events_with_document` compares it
with the events that the store knows, and returns each `Change`. It compares the content, not the
incarnation.

A machine of a scale set stands in ``Resources`` under one of several names. A relay finds itself by
them, and approvals and the hub find the machine that a relay runs on
(docs/protocol.md#names-of-resources). A hub knows an agent only by the word that its name is in a
routing key of RabbitMQ, so the rights of machines are compared by it too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from relay.events import fast_dataclass
from relay.events.cloudevent import digest_id
from relay.events.timestamps import parse_timestamp

EventId = Annotated[
    str,
    Field(
        min_length=1,
        max_length=256,
        pattern=r"^[^\x00-\x1f\x7f-\x9f]*[^\s\x00-\x1f\x7f-\x9f][^\x00-\x1f\x7f-\x9f]*$",
    ),
]
"""An EventId as Azure and agents write it: printable, and not blank (docs/protocol.md#eventids)."""
ChangeKind = Literal["scheduled", "updated", "started", "ended"]


@fast_dataclass(frozen=True, slots=True, kw_only=True)
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
    def lowercase_event_id(self) -> str:
        """The EventId in lower case: events are compared by it."""
        return self.event_id.lower()

    @property
    def is_scheduled(self) -> bool:
        """Whether the status is Scheduled. An event with an unknown status is never started."""
        return (self.event_status or "").lower() == "scheduled"

    @property
    def is_started(self) -> bool:
        return (self.event_status or "").lower() == "started"

    @property
    def not_before_time(self) -> datetime | None:
        """NotBefore in UTC; None if there is none or it could not be read.

        .NET writes "none" as the year 1, from which nothing can be subtracted.
        """
        moment = parse_timestamp(self.not_before)
        return max(moment, datetime(1970, 1, 1, tzinfo=UTC)) if moment is not None else None

    @property
    def revision(self) -> str:
        """A digest of the EventId and of what an approver saw, all but the description."""
        state = (
            self.event_type,
            self.event_source,
            sorted(self.resources),
            self.not_before,
            self.duration,
            self.event_status,
        )
        return digest_id("revision", self.lowercase_event_id, *state)[:16]

    def to_cloudevent_data(self) -> dict[str, Any]:
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
    def from_cloudevent_data(cls, fields: Mapping[str, Any]) -> ScheduledEvent:
        """Make the event from what ``to_cloudevent_data`` returned; other keys are ignored."""
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


@fast_dataclass(frozen=True, slots=True)
class Change:
    """The change of one event. ``event`` is its new state, or its last state if it ended.

    ``changed`` maps each field that differs, by its name in ``data``, to its value before. It is
    empty if the event is new or has ended.
    """

    kind: ChangeKind
    event: ScheduledEvent
    changed: Mapping[str, Any]


def diff_events_with_document(
    previous: Iterable[ScheduledEvent], current: Document
) -> tuple[Change, ...]:
    """Return at most one change per EventId: in the document's order, then those that left it."""
    known = {event.lowercase_event_id: event for event in previous}
    seen = {event.lowercase_event_id: event for event in current.events}
    changes = [compare_event(known.get(key), event) for key, event in seen.items()]
    ended = [Change("ended", event, {}) for key, event in known.items() if key not in seen]
    return (*(change for change in changes if change is not None), *ended)


def compare_event(before: ScheduledEvent | None, event: ScheduledEvent) -> Change | None:
    """Return the change of one event (``before`` is None: it is new); None if nothing changed."""
    if before is None:
        return Change("started" if event.is_started else "scheduled", event, {})
    if before is event or before == event:  # faster than to compare field by field
        return None
    old, new = before.to_cloudevent_data(), event.to_cloudevent_data()
    # The case of the EventId and the order of the resources carry no information.
    new["eventId"] = old["eventId"]
    if sorted(old["resources"]) == sorted(new["resources"]):
        new["resources"] = old["resources"]
    changed = {name: value for name, value in old.items() if value != new[name]}
    if not changed:
        return None
    has_started = event.is_started and not before.is_started
    return Change("started" if has_started else "updated", event, changed)


# --- names of machines and relays


def other_instance_names(name: str, scale_set: str | None = None) -> Iterator[str]:
    """Yield the name of an instance in the other notation: ``set_18`` and ``set00000i``.

    A uniform scale set numbers its instances in decimal in VM names, and with six digits of base 36
    in computer names, whose prefix can differ from the name of the scale set. ``scale_set`` is
    None if it is not known. A name in neither notation yields nothing. A name of another machine
    that ends like a computer name yields a name that no machine has.
    """
    if number := re.fullmatch(r"(.+)_(\d{1,9})", name, re.ASCII):
        yield f"{scale_set or number[1]}{_encode_base36(int(number[2])):0>6}"
    elif digits := re.fullmatch(r"(.+?)([0-9a-z]{6})", name, re.ASCII | re.IGNORECASE):
        if scale_set:
            yield f"{scale_set}_{int(digits[2], 36)}"
        yield f"{digits[1]}_{int(digits[2], 36)}"


def add_underscore_prefixed_names(names: frozenset[str]) -> frozenset[str]:
    """Return the names, each also with the prefix ``_`` of old versions of the API."""
    return names | {f"_{name}" for name in names}


def _encode_base36(number: int) -> str:
    digits = ""
    while number or not digits:
        number, digit = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return digits


def routing_word(text: str, max_bytes: int) -> str:
    """Return a text as a word of a routing key: lower case, of ``[a-z0-9_-]``, never empty."""
    return re.sub(r"[^a-z0-9_-]", "_", text.lower())[:max_bytes] or "none"


def relay_word(name: str) -> str:
    return routing_word(name, 80)
