"""Every type of event has its line in the log, in words and in fields, and is counted."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from docs.generate import examples
from relay.events.build import Origin, approval_or_startrequest_event, common_event_data
from relay.events.catalog import CATALOG
from relay.events.cloudevent import CloudEvent
from relay.sentences import said
from relay.store import RecordedEvent
from relay.telemetry.lines import EVERY_LINE, LINES, MAX_RESOURCES, EventCounts, log_cloud_event
from tests.approvals.builders import build_event
from tests.clocks import NOON
from tests.documented import ROOT, block

ERRORS = {
    *("startrequest.failed", "relay.source-lost", "relay.silent", "relay.sink-disabled"),
    "relay.store-failing",
}
WARNINGS = {
    "approval.reminder",
    *("approval.refused", "relay.sink-failing", "relay.dead-lettered", "relay.clock-skewed"),
}


LineOf = Callable[[CloudEvent], Any]


@pytest.fixture
def line_of(caplog: pytest.LogCaptureFixture) -> LineOf:
    """Return what gives the record of the log for an event."""
    caplog.set_level(logging.INFO, "relay.story")

    def line_of(event: CloudEvent) -> Any:
        log_cloud_event(event, 7)
        return caplog.records[-1]

    return line_of


def test_every_type_of_the_catalog_has_a_line() -> None:
    assert list(LINES) == [definition.name for definition in CATALOG]


@pytest.mark.parametrize("event", examples(), ids=lambda event: event.name)
def test_the_line_says_what_happened_in_words_and_in_fields(
    event: CloudEvent, line_of: LineOf
) -> None:
    line = line_of(event)
    assert line.message.endswith(said(event.name, event.data))
    fields = line.fields
    assert fields.keys() <= documented_fields()
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
    assert line.levelno == expected


def test_a_line_says_what_was_before_and_which_events_were_held(line_of: LineOf) -> None:
    lines = {event.name: line_of(event).message for event in examples()}
    assert lines["event.updated"] == (
        "Reboot of WestNO_0, WestNO_1: Azure changed notBefore; votes on the former state do not "
        "count. Before: notBefore 2022-04-11T22:26:58Z."
    )
    assert lines["standing-hold.expired"] == (
        "The standing hold of client:alice on event_type Reboot Redeploy; resources db-* has "
        "expired."
    )


def test_the_documented_line_is_one_of_ours() -> None:
    line = orjson.loads(block("docs/log.md", "json"))
    fields = line.keys() - {"time", "level", "logger", "message"}
    assert fields <= {*LINES[line["type"]][1], *EVERY_LINE}
    assert line["logger"] == "relay.story"


def documented_fields() -> set[str]:
    page = (ROOT / "docs/log.md").read_text(encoding="utf-8")
    return set(re.findall(r"`(\w+)`", page.partition("## Fields")[2].partition("<!--")[0]))


def test_every_field_that_the_code_logs_is_documented() -> None:
    logged = {
        keyword.arg
        for file in (ROOT / "relay").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "log_extra"
        for keyword in node.keywords
    }
    assert len(logged) > 10
    assert logged <= documented_fields()


def about(name: str, resources: tuple[str, ...] = ("db-0",), **added: Any) -> CloudEvent:
    return approval_or_startrequest_event(
        name,
        Origin("west", "vm-0"),
        NOON,
        event=common_event_data(build_event(resources=resources), 1),
        added=added,
        cause=None,
        head="1:00",
    )


def test_a_start_request_that_the_relay_gave_up_is_a_warning_and_no_error(line_of: LineOf) -> None:
    failed = about("startrequest.failed", status=None, attempts=0, reason="it has changed")
    assert line_of(failed).levelno == logging.WARNING


def test_a_line_names_a_bounded_number_of_machines(line_of: LineOf) -> None:
    names = tuple(f"db-{number}" for number in range(200))
    line = line_of(about("approval.voided", names, why="expired"))
    assert line.message == (
        "Reboot of db-0, db-1, db-2 and 197 more: The votes count no more: they have expired."
    )
    assert line.fields["resources"] == list(names[:MAX_RESOURCES])
    assert line.fields["resourcesLeftOut"] == 200 - MAX_RESOURCES


def test_a_refusal_about_an_unknown_event_has_its_line_too(line_of: LineOf) -> None:
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
    line = line_of(event)
    assert line.message == (
        "Event nobody-knows-it: client:x tried to approve, refused: unknown event."
    )


def recorded(name: str, **added: Any) -> RecordedEvent:
    """Return an event as the store reports it."""
    event = about(name, **added)
    return RecordedEvent(1, event.id, name, "e-1", "west", event, ())


def test_a_start_request_that_azure_refused_is_no_other_failure() -> None:
    counts = EventCounts()
    failed = [recorded("startrequest.failed", status=status) for status in (400, None, 503)]
    counts.count_recorded_events([recorded("startrequest.accepted", status=200), *failed])
    assert counts.start_requests == {"accepted": 1, "refused": 1, "failed": 2}


def test_a_change_that_is_not_in_memory_has_an_unknown_type() -> None:
    counts = EventCounts()
    counts.count_recorded_events([RecordedEvent(1, "id", "event.ended", "e-1", "west", None, ())])
    assert counts.changes == {("ended", "other"): 1}
