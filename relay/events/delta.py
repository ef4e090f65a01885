"""What changed between two documents. Compared by content; the incarnation plays no part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from relay.events.model import Document, Event

ChangeKind = Literal["scheduled", "updated", "started", "ended"]


@dataclass(frozen=True, slots=True)
class Change:
    """One event's change. ``event`` is its new state, or the last one seen when it ended; ``before`` its state before.

    ``changed`` maps each field that moved, by its name in ``data``, to the value before; empty at first sight and at the end.
    """

    kind: ChangeKind
    event: Event
    before: Event | None
    changed: Mapping[str, Any]


def diff(previous: Iterable[Event], current: Document) -> tuple[Change, ...]:
    """At most one change per EventId: first what the document holds, in its order, then what has gone from it."""
    known = {event.key: event for event in previous}
    seen = {event.key: event for event in current.events}
    arrived = (
        change for event in seen.values() if (change := _compare(known.get(event.key), event))
    )
    gone = (Change("ended", event, event, {}) for key, event in known.items() if key not in seen)
    return (*arrived, *gone)


def apply(previous: Iterable[Event], changes: Iterable[Change]) -> dict[str, Event]:
    """The events that live after the changes, by key: `diff` then `apply` gives the new document."""
    live = {event.key: event for event in previous}
    for change in changes:
        if change.kind == "ended":
            live.pop(change.event.key, None)
        else:
            live[change.event.key] = change.event
    return live


def _compare(before: Event | None, event: Event) -> Change | None:
    if before is None:
        return Change("started" if event.is_started else "scheduled", event, None, {})
    changed = _changed(before, event)
    if not changed:
        return None
    moved_to_started = event.is_started and not before.is_started
    return Change("started" if moved_to_started else "updated", event, before, changed)


def _changed(before: Event, event: Event) -> dict[str, Any]:
    old, new = before.to_fields(), event.to_fields()
    # The EventId is compared without case and the resources without order: neither says anything new.
    return {
        name: old[name]
        for name in old
        if name != "eventId" and _settled(old[name]) != _settled(new[name])
    }


def _settled(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value
