"""Finds what changed between two documents. It compares the content, not the incarnation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from relay.events.model import Document, ScheduledEvent

ChangeKind = Literal["scheduled", "updated", "started", "ended"]


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one event. ``event`` is its new state, or its last state if it ended.

    ``changed`` maps each field that differs, by its name in ``data``, to its value before. It is
    empty if the event is new or has ended.
    """

    kind: ChangeKind
    event: ScheduledEvent
    changed: Mapping[str, Any]


def diff(previous: Iterable[ScheduledEvent], current: Document) -> tuple[Change, ...]:
    """Return at most one change per EventId.

    The events of the document come first, in its order, then the events that left it.
    """
    known = {event.key: event for event in previous}
    seen = {event.key: event for event in current.events}
    changes = [compare_event(known.get(key), event) for key, event in seen.items()]
    ended = [Change("ended", event, {}) for key, event in known.items() if key not in seen]
    return (*(change for change in changes if change is not None), *ended)


def compare_event(before: ScheduledEvent | None, event: ScheduledEvent) -> Change | None:
    """Return the change of one event (``before`` is None: it is new); None if nothing changed."""
    if before is None:
        return Change("started" if event.is_started else "scheduled", event, {})
    if before is event or before == event:  # faster than to compare field by field
        return None
    changed = _changed_fields(before, event)
    if not changed:
        return None
    has_started = event.is_started and not before.is_started
    return Change("started" if has_started else "updated", event, changed)


def _changed_fields(before: ScheduledEvent, event: ScheduledEvent) -> dict[str, Any]:
    old, new = before.to_fields(), event.to_fields()
    # The case of the EventId and the order of the resources carry no information.
    return {
        name: value
        for name, value in old.items()
        if name != "eventId" and _ignoring_order(value) != _ignoring_order(new[name])
    }


def _ignoring_order(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value
