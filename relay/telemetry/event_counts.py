"""Counts the events that the relay recorded since its start, for the metrics.

The counts are plain numbers by labels of a fixed set, so their number is bounded: the constants
list the labels, and a value that is not in the list counts as `OTHER`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from relay.events.match import EVENT_TYPES
from relay.store import RecordedEvent

EVENT_STATUSES = ("Scheduled", "Started")
OTHER = "other"
CHANGES = ("scheduled", "updated", "started", "ended")
DECISIONS = ("approve", "hold", "release")
_REFUSED = 400  # HTTP


@lru_cache(maxsize=256)
def azure_event_type_label(event_type: str | None) -> str:
    """Return the label of an EventType: `OTHER` for one that Azure does not document."""
    return _known_value_or_other(event_type, EVENT_TYPES)


def azure_event_status_label(event_status: str | None) -> str:
    return _known_value_or_other(event_status, EVENT_STATUSES)


def _known_value_or_other(value: str | None, known: Sequence[str]) -> str:
    lower = (value or "").lower()
    return next((name for name in known if name.lower() == lower), OTHER)


class EventCounts:
    """How many events of each kind were recorded. `count_recorded_events` listens to the store."""

    def __init__(self) -> None:
        self.grants = 0
        self.changes: Counter[tuple[str, str]] = Counter()
        """``event.*`` by change and label of the EventType."""
        self.decisions: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.start_requests = Counter({"accepted": 0, "refused": 0, "failed": 0})

    def count_recorded_events(self, events: Sequence[RecordedEvent]) -> None:
        for recorded in events:
            (family, _, change), event = recorded.name.partition("."), recorded.event
            if family == "event":
                # Of more than a thousand events at once, the rest is not in memory.
                event_type = event.attributes.get("eventtype") if event is not None else None
                self.changes[change, azure_event_type_label(event_type)] += 1
            elif recorded.name == "approval.granted":
                self.grants += 1
            elif event is None:
                continue
            elif family == "startrequest":
                is_refused = change == "failed" and event.data["status"] == _REFUSED
                self.start_requests["refused" if is_refused else change] += 1
            elif recorded.name == "approval.recorded":
                self.decisions[event.data["decision"]] += 1
            elif recorded.name == "approval.refused":
                self.refusals[event.data["decision"]] += 1
