"""Every type of event has its line in the log, in words and in fields."""

from __future__ import annotations

import logging
from typing import Any, get_type_hints

import orjson
import pytest

from docs.generate import examples
from relay.events.build import Origin, approval_or_startrequest_event, common_event_data
from relay.events.catalog import CATALOG
from relay.events.cloudevent import CloudEvent
from relay.log_fields import LogFields, field_meanings
from relay.telemetry.lines import EVERY_LINE, LINES, MAX_RESOURCES, log_line_of_event
from tests.approvals.builders import build_event
from tests.clocks import NOON
from tests.documented import block

REBOOT = "Reboot of WestNO_0, WestNO_1"
HELD = "event_type Reboot Redeploy; resources db-*"
SENTENCES = {
    "event.scheduled": f"{REBOOT} is scheduled, by Platform, not before 2022-04-11T22:26:58Z",
    "event.updated": f"{REBOOT} has changed: "
    "notBefore was 2022-04-11T22:26:58Z, is 2022-04-11T22:41:58Z",
    "event.started": f"{REBOOT} has started, approved by this relay",
    "event.ended": f"{REBOOT} has ended: completed, approved by this relay",
    "approval.recorded": f"client:db-drain approves {REBOOT}; 1 of 2 votes by rule databases",
    "approval.granted": f"{REBOOT} is granted by rule databases with 2 votes",
    "approval.refused": f"client:intern may not approve {REBOOT}: "
    "the rule databases takes no vote of client:intern",
    "approval.voided": f"votes for {REBOOT} count no more: it has changed",
    "approval.reminder": f"{REBOOT} waits for votes, 1 of 2 votes by rule databases: "
    "NotBefore is near",
    "startrequest.accepted": f"IMDS accepted the StartRequest for {REBOOT}",
    "startrequest.failed": f"the StartRequest for {REBOOT} failed: "
    "IMDS refused the StartRequest as malformed (400)",
    "standing-hold.created": f"client:alice makes a standing hold on {HELD} "
    "from 2022-04-15T16:00:00Z until 2022-04-18T06:00:00Z: year-end closing",
    "standing-hold.ended": f"client:alice ends the standing hold of client:alice on {HELD}",
    "standing-hold.expired": f"the standing hold of client:alice on {HELD} has expired",
    "relay.source-lost": "the source of events is lost: "
    "no usable answer for 90 s: expected 200, got 410 Gone",
    "relay.source-recovered": "the source of events is back: the metadata service answers again",
    "relay.silent": "no agent of scope vmss-a-1f0c33ab has been heard of for 150 s",
    "relay.sink-failing": "sink drain is failing, 5 waiting: expected 2xx, got 503",
    "relay.sink-recovered": "sink drain delivers again, 12 waiting",
    "relay.sink-disabled": "sink drain is disabled and keeps its entries: "
    "the receiver answered 410: it wants no more",
    "relay.dead-lettered": "sink drain has a dead letter: given up after 24h: "
    "expected 2xx, got 503",
    "relay.store-failing": "the state file cannot be written: disk full. "
    "Notices go out from memory, approvals are refused",
    "relay.clock-skewed": "sink drain: the receiver's clock is 94 s ahead of ours",
    "relay.ping": "sink drain gets a test message: asked for by local:root",
}
ERRORS = {
    *("startrequest.failed", "relay.source-lost", "relay.silent", "relay.sink-disabled"),
    "relay.store-failing",
}
WARNINGS = {
    "approval.reminder",
    *("approval.refused", "relay.sink-failing", "relay.dead-lettered", "relay.clock-skewed"),
}


def test_every_type_of_the_catalog_has_a_line() -> None:
    assert list(LINES) == [definition.name for definition in CATALOG] == list(SENTENCES)


@pytest.mark.parametrize("event", examples(), ids=lambda event: event.name)
def test_the_line_says_what_happened_in_words_and_in_fields(event: CloudEvent) -> None:
    line = log_line_of_event(event, 7)
    assert line.message == SENTENCES[event.name]
    fields: dict[str, Any] = dict(line.fields.items())
    assert fields.keys() <= field_meanings().keys()
    assert (fields["type"], fields["id"], fields["position"]) == (event.name, event.id, 7)
    if event.name.startswith("relay."):
        assert fields.get("sink") == event.data["sink"]
        assert fields["relay"] == "WestNO_0"
    elif event.name.startswith("standing-hold."):
        assert fields["holdId"] == event.subject
    else:
        assert fields["eventId"] == event.subject
        assert fields["revision"] == event.data["revision"]
    assert fields["scope"] == "westno-4f7a9c21"
    expected = logging.INFO
    if event.name in ERRORS:
        expected = logging.ERROR
    elif event.name in WARNINGS:
        expected = logging.WARNING
    assert line.level == expected


def test_the_documented_line_is_one_of_ours() -> None:
    line = orjson.loads(block("docs/log.md", "json"))
    fields = line.keys() - {"time", "level", "logger", "message"}
    assert fields <= {*LINES[line["type"]].fields, *EVERY_LINE}
    assert line["logger"] == "relay.story"


def test_every_field_is_documented_with_its_type() -> None:
    assert get_type_hints(LogFields).keys() == field_meanings().keys()
    assert all(field_meanings().values())


def about(name: str, resources: tuple[str, ...] = ("db-0",), **added: Any) -> CloudEvent:
    """Return an event about a decision."""
    return approval_or_startrequest_event(
        name,
        Origin("west", "vm-0"),
        NOON,
        event=common_event_data(build_event(resources=resources), 1),
        added=added,
        cause=None,
        head="1:00",
    )


def test_a_start_request_that_the_relay_gave_up_is_a_warning_and_no_error() -> None:
    line = log_line_of_event(
        about("startrequest.failed", status=None, attempts=0, reason="it has changed"), 1
    )
    assert line.level == logging.WARNING


def test_a_line_names_a_bounded_number_of_machines() -> None:
    names = tuple(f"db-{number}" for number in range(200))
    line = log_line_of_event(about("approval.voided", names, why="expired"), 1)
    assert line.message == (
        "votes for Reboot of db-0, db-1, db-2, db-3, db-4 and 195 more count no more: "
        "they have expired"
    )
    assert line.fields["resources"] == list(names[:MAX_RESOURCES])
    assert line.fields["resourcesLeftOut"] == 200 - MAX_RESOURCES


def test_a_refusal_about_an_unknown_event_has_its_line_too() -> None:
    unknown = dict.fromkeys(about("approval.refused").data)
    event = CloudEvent.build(
        about("approval.refused").attributes,
        {
            **unknown,
            "eventId": "nobody-knows-it",
            "decision": "approve",
            "principal": "client:x",
            "refusal": "unknown event",
        },
    )
    line = log_line_of_event(event, 1)
    assert line.message == "client:x may not approve event nobody-knows-it: unknown event"
