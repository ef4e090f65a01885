"""The four example documents of Microsoft's page "Azure Metadata Service: Scheduled Events"."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from relay.events.build import (
    FactsAboutEndedEvent,
    Origin,
    change_event,
    common_event_data,
    determine_outcome,
)
from relay.events.cloudevent import CloudEvent
from relay.events.model import ScheduledEvent, diff_events_with_document
from relay.imds.document import parse_document

EVENT = """{
    "EventId":  "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
    "EventStatus":  "%s",
    "EventType":  "Freeze",
    "ResourceType":  "VirtualMachine",
    "Resources":  [
                      "WestNO_0",
                      "WestNO_1"
                  ],
    "NotBefore":  "%s",
    "Description":  "%s",
    "EventSource":  "Platform",
    "DurationInSeconds":  5
}"""
DESCRIPTION = (
    "Virtual machine is being paused because of a memory-preserving Live Migration operation."
)
SCHEDULED = EVENT % ("Scheduled", "Mon, 11 Apr 2022 22:26:58 GMT", DESCRIPTION)
STARTED = EVENT % ("Started", "", DESCRIPTION)
DOCUMENTS = [
    '{"DocumentIncarnation":  1, "Events":  [ ] }',
    f'{{"DocumentIncarnation":  2, "Events":  [ {SCHEDULED} ] }}',
    f'{{"DocumentIncarnation":  3, "Events":  [ {STARTED} ] }}',
    '{"DocumentIncarnation":  4, "Events":  [ ] }',
]


def told() -> list[list[CloudEvent]]:
    """What a relay that polls once for each document says each time."""
    origin = Origin("westno-1f0c33ab", "WestNO_0")
    at = datetime(2022, 4, 11, 22, 11, 58, tzinfo=UTC)
    live: tuple[ScheduledEvent, ...] = ()
    last: dict[str, Any] = {}
    said: list[list[CloudEvent]] = []
    for body in DOCUMENTS:
        document = parse_document(body.encode())
        said.append([])
        for change in diff_events_with_document(live, document):
            ended = change.kind == "ended"
            last = last if ended else common_event_data(change.event, document.incarnation)
            facts = FactsAboutEndedEvent(start_sent=False, gap=False, rebooted=False)
            outcome = determine_outcome(change.event, facts, at) if ended else None
            said[-1].append(
                change_event(
                    change,
                    origin,
                    at,
                    data=last,
                    previous_count=0,
                    approved_by_relay=False,
                    outcome=outcome,
                )
            )
        live = document.events
        at += timedelta(minutes=5)
    return said


def test_it_is_scheduled_started_and_ended_once_each() -> None:
    assert [[one.name for one in poll] for poll in told()] == [
        [],
        ["event.scheduled"],
        ["event.started"],
        ["event.ended"],
    ]


def test_the_scheduled_event_is_that_of_the_documentation() -> None:
    ((scheduled,),) = told()[1:2]
    assert {**scheduled.data, "revision": "…", "description": "…"} == {
        "eventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "eventType": "Freeze",
        "eventStatus": "Scheduled",
        "resourceType": "VirtualMachine",
        "resources": ["WestNO_0", "WestNO_1"],
        "notBefore": "2022-04-11T22:26:58Z",
        "description": "…",
        "eventSource": "Platform",
        "durationSeconds": 5,
        "documentIncarnation": 2,
        "revision": "…",
    }
    assert scheduled.data["description"] == DESCRIPTION


@pytest.mark.parametrize(
    ("poll", "added"),
    [
        (
            2,
            {
                "eventStatus": "Started",
                "notBefore": None,
                "documentIncarnation": 3,
                "changed": {"eventStatus": "Scheduled", "notBefore": "2022-04-11T22:26:58Z"},
            },
        ),
        (
            3,
            {
                "eventStatus": "Started",
                "notBefore": None,
                "documentIncarnation": 3,
                "outcome": "completed",
                "evidence": "observed",
            },
        ),
    ],
)
def test_what_each_later_one_says_anew(poll: int, added: dict[str, Any]) -> None:
    polls = told()
    (scheduled,), (said,) = polls[1], polls[poll]
    revision = said.data["revision"]
    assert revision != scheduled.data["revision"]
    assert said.data == {**scheduled.data, **added, "revision": revision, "approvedByRelay": False}


def test_approvers_of_the_one_state_have_not_seen_the_other() -> None:
    polls = told()
    assert polls[2][0].data["revision"] == polls[3][0].data["revision"]
    assert len({one.id for poll in polls for one in poll}) == 3
