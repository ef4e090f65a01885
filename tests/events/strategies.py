"""Hypothesis strategies for events and documents, in Azure's format.

Their alphabets are small, so that equal values are frequent.
"""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import strategies as st

from relay.events.model import Document, ScheduledEvent

IDS = st.sampled_from(["A-1", "a-1", "B-2", "b-2", "C-3"])
NOT_BEFORE = st.sampled_from([None, "2022-04-11T22:26:58Z", "2022-04-11T22:40:00Z", "soon"])
RESOURCES = st.lists(
    st.sampled_from(["vm_0", "vm_1", "VM_1", "vm_2"]), unique=True, max_size=3
).map(tuple)

EVENTS = st.builds(
    ScheduledEvent,
    event_id=IDS,
    event_type=st.sampled_from([None, "Freeze", "Reboot", "Quake"]),
    event_status=st.sampled_from([None, "Scheduled", "Started", "STARTED", "Paused"]),
    resource_type=st.sampled_from([None, "VirtualMachine"]),
    resources=RESOURCES,
    not_before=NOT_BEFORE,
    description=st.sampled_from([None, "x", "y"]),
    event_source=st.sampled_from([None, "Platform", "User"]),
    duration=st.sampled_from([None, 0, 5]),
)
DOCUMENTS = st.builds(
    Document,
    incarnation=st.none() | st.integers(-(2**63), 2**63 - 1),
    events=st.lists(EVENTS, unique_by=lambda event: event.lowercase_event_id, max_size=4).map(
        tuple
    ),
)


def normalized(event: ScheduledEvent) -> dict[str, Any]:
    """What an event says: the EventId without case, the resources without order."""
    return {
        **event.to_cloudevent_data(),
        "eventId": event.lowercase_event_id,
        "resources": sorted(event.resources),
    }


def make_event(**changes: Any) -> ScheduledEvent:
    """A Freeze of two machines in fifteen minutes, with ``changes``."""
    fields: dict[str, Any] = {
        "event_id": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "event_type": "Freeze",
        "event_status": "Scheduled",
        "resource_type": "VirtualMachine",
        "resources": ("WestNO_0", "WestNO_1"),
        "not_before": "2022-04-11T22:26:58Z",
        "description": "Paused.",
        "event_source": "Platform",
        "duration": 5,
    }
    return ScheduledEvent(**fields | changes)


def azure_event(**changes: Any) -> dict[str, Any]:
    """The same as Azure writes it; a field that is ... is left out."""
    fields: dict[str, Any] = {
        "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "EventStatus": "Scheduled",
        "EventType": "Freeze",
        "ResourceType": "VirtualMachine",
        "Resources": ["WestNO_0", "WestNO_1"],
        "NotBefore": "Mon, 11 Apr 2022 22:26:58 GMT",
        "Description": "Paused.",
        "EventSource": "Platform",
        "DurationInSeconds": 5,
    }
    return {name: value for name, value in (fields | changes).items() if value is not ...}


def document_body(*events: Any, incarnation: Any = 2) -> bytes:
    return orjson.dumps({"DocumentIncarnation": incarnation, "Events": list(events)})
