"""Counts the events that the relay recorded since its start, for the metrics.

The counts are plain numbers by labels of a fixed set, so their number is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from relay.outbox import RecordedEvent

EVENT_TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
"""The EventTypes of Azure. Others are counted as `OTHER`."""
EVENT_STATUSES = ("Scheduled", "Started")
OTHER = "other"
CHANGES = ("scheduled", "updated", "started", "ended")
DECISIONS = ("approve", "hold", "release")
START_RESULTS = ("accepted", "refused", "failed")
_REFUSED = 400  # HTTP


@lru_cache(maxsize=64)
def event_type_label(event_type: str | None) -> str:
    """Return the label of an EventType."""
    return _label(event_type, EVENT_TYPES)


def event_status_label(event_status: str | None) -> str:
    """Return the label of an EventStatus."""
    return _label(event_status, EVENT_STATUSES)


def _label(value: str | None, known: Sequence[str]) -> str:
    lower = (value or "").lower()
    return next((name for name in known if name.lower() == lower), OTHER)


class EventCounts:
    """How many events of each kind were recorded. `count` listens to the store."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        """By ``<family>.<change>``."""
        self.changes: Counter[tuple[str, str]] = Counter()
        """``event.*`` by change and label of the EventType."""
        self.decisions: Counter[str] = Counter()
        """Votes, holds and releases that were accepted."""
        self.refusals: Counter[str] = Counter()
        """Decisions that were refused, by decision."""
        self.start_requests: Counter[str] = Counter()
        """StartRequests that have a final result."""

    def count(self, events: Sequence[RecordedEvent]) -> None:
        """Count events that were recorded."""
        for recorded in events:
            name = recorded.name
            self.names[name] += 1
            family, _, change = name.partition(".")
            if family == "event":
                # Of more than a thousand events at once, the rest is not in memory.
                attributes = recorded.event.attributes if recorded.event is not None else {}
                self.changes[change, event_type_label(attributes.get("eventtype"))] += 1
            elif family != "relay" and recorded.event is not None:
                self._count_decision(family, change, recorded.event.data)

    def _count_decision(self, family: str, change: str, data: Mapping[str, Any]) -> None:
        if family == "startrequest":
            is_refused = change == "failed" and data["status"] == _REFUSED
            self.start_requests["refused" if is_refused else change] += 1
        elif change == "recorded":
            self.decisions[data["decision"]] += 1
        elif change == "refused":
            self.refusals[data["decision"]] += data.get("count", 1)
