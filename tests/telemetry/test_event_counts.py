"""Recorded events are counted by labels of fixed sets."""

from __future__ import annotations

from typing import Any

from relay.events.build import Origin, approval_or_startrequest_event, common_event_data
from relay.events.cloudevent import CloudEvent
from relay.store import RecordedEvent
from relay.telemetry.event_counts import EventCounts
from tests.approvals.builders import build_event
from tests.clocks import NOON

ORIGIN = Origin("scope", "vm-0")


def recorded(name: str, **added: Any) -> RecordedEvent:
    """Return an event about a decision, as the store reports it."""
    event = approval_or_startrequest_event(
        name,
        ORIGIN,
        NOON,
        event=common_event_data(build_event(), 1),
        added=added,
        cause=None,
        head="1:00",
    )
    return in_journal(event)


def in_journal(event: CloudEvent) -> RecordedEvent:
    """Return an event as the store reports it."""
    return RecordedEvent(1, event.id, event.name, "e-1", "west", event, ())


def test_a_start_request_that_azure_refused_is_no_other_failure() -> None:
    counts = EventCounts()
    counts.count_recorded_events(
        [
            recorded("startrequest.accepted", status=200),
            recorded("startrequest.failed", status=400),
            recorded("startrequest.failed", status=None),
            recorded("startrequest.failed", status=503),
        ]
    )
    assert counts.start_requests == {"accepted": 1, "refused": 1, "failed": 2}


def test_a_change_that_is_not_in_memory_has_an_unknown_type() -> None:
    counts = EventCounts()
    counts.count_recorded_events([RecordedEvent(1, "id", "event.ended", "e-1", "west", None, ())])
    assert counts.changes == {("ended", "other"): 1}
