"""Every type of event has its line in the log, in words and in fields, and is counted."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from docs.generate import examples
from relay.events.build import (
    CATALOG,
    Origin,
    approval_or_startrequest_event,
    common_event_data,
    relay_event,
)
from relay.events.cloudevent import CloudEvent
from relay.sentences import said
from relay.simulator import Plan
from relay.store import RecordedEvent
from relay.store.transaction import MAX_EVENTS_IN_RESULTS, Transaction
from relay.telemetry.lines import (
    EVERY_LINE,
    LINES,
    MAX_RESOURCES,
    EventCounts,
    log_cloud_event,
    log_recorded_events,
)
from tests.approvals.builders import build_event
from tests.cli.running_relay import LOCAL_PRINCIPAL, running_relay
from tests.clocks import NOON
from tests.documented import ROOT, block
from tests.eventually import eventually
from tests.store.open_store import open_store_in

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


# --- the log of a running relay tells each thing once


@dataclass(frozen=True, slots=True)
class Told:
    caplog: pytest.LogCaptureFixture

    def fields(self) -> list[dict[str, Any]]:
        """Return the fields of each line that has some, in their order."""
        return [record.fields for record in self.caplog.records if hasattr(record, "fields")]

    def types(self) -> list[str]:
        return [fields["type"] for fields in self.fields() if "type" in fields]

    async def wait(self, name: str, count: int = 1) -> dict[str, Any]:
        """Wait until a type was told so often; return the fields of the newest line."""
        await eventually(lambda: self.types().count(name) >= count, what=name)
        return [fields for fields in self.fields() if fields.get("type") == name][-1]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    caplog.set_level(logging.INFO, "relay")
    return Told(caplog)


async def test_the_log_tells_an_event_from_first_to_last_once(tmp_path: Path, told: Told) -> None:
    rule = {"name": "one", "approve": {"votes": 1, "from": [LOCAL_PRINCIPAL]}}
    async with running_relay(tmp_path, rules=[rule], tell_first="0s") as relay:
        event = await relay.announce()
        scheduled = await told.wait("event.scheduled")
        assert (scheduled["eventId"], scheduled["scope"]) == (event.event_id, "west")
        assert (scheduled["eventType"], scheduled["eventSource"]) == ("Reboot", "Platform")
        assert scheduled["resources"] == ["db-0", "db-1"]

        await relay.run("hold", event.event_id, "--reason", "wait")
        held = await told.wait("approval.recorded")
        assert (held["decision"], held["principal"]) == ("hold", LOCAL_PRINCIPAL)
        assert (held["reason"], held["channel"]) == ("wait", "local")
        await relay.run("release", event.event_id)
        assert (await told.wait("approval.recorded", 2))["decision"] == "release"

        await relay.run("approve", event.event_id, "--yes")
        vote = await told.wait("approval.recorded", 3)
        assert (vote["decision"], vote["votes"], vote["required"]) == ("approve", 1, 1)
        granted = await told.wait("approval.granted")
        assert (granted["rule"], granted["revision"]) == ("one", scheduled["revision"])
        accepted = await told.wait("startrequest.accepted")
        assert (accepted["status"], accepted["attempts"]) == (200, 1)
        assert (await told.wait("event.started"))["approvedByRelay"] is True
        relay.azure.end(event.event_id)
        assert (await told.wait("event.ended"))["outcome"] == "completed"

        sent = [fields for fields in told.fields() if "agent" in fields]
        assert [(fields["eventId"], fields["attempts"]) for fields in sent] == [(event.event_id, 1)]
    names = told.types()
    assert names == [
        "event.scheduled",
        *["approval.recorded"] * 3,
        *("approval.granted", "startrequest.accepted", "event.started", "event.ended"),
    ]
    positions = [fields["position"] for fields in told.fields() if "type" in fields]
    assert positions == sorted(set(positions))
    # A restart records nothing, so it tells nothing.
    async with running_relay(tmp_path) as relay:
        other = await relay.announce(Plan(type="Freeze", resources=("db-0",)))
        assert (await told.wait("event.scheduled", 2))["eventId"] == other.event_id
    assert told.types() == [*names, "event.scheduled"]


async def test_a_sink_that_fails_and_recovers_is_told_with_why(tmp_path: Path, told: Told) -> None:
    async with running_relay(tmp_path) as relay:
        relay.receiver.status = 500
        relay.azure.schedule(Plan(type="Freeze", resources=("db-0",)))
        failing = await told.wait("relay.sink-failing")
        assert (failing["sink"], failing["count"]) == ("drain", 1)
        assert "got 500" in failing["reason"]
        relay.receiver.status = 204
        assert (await told.wait("relay.sink-recovered"))["sink"] == "drain"
        await relay.run("sink", "pause", "drain")
        await relay.run("sink", "resume", "drain")
    states = [(f["state"], f["principal"]) for f in told.fields() if "state" in f]
    assert states == [("paused", LOCAL_PRINCIPAL), ("on", LOCAL_PRINCIPAL)]


async def test_events_are_told_in_order_and_once_however_many(tmp_path: Path, told: Told) -> None:
    """Those that do not fit in memory have short lines. A new sink that gets all tells nothing."""
    count = MAX_EVENTS_IN_RESULTS + 3
    async with open_store_in(tmp_path, lambda _: ()) as store:
        store.listeners.recorded.append(log_recorded_events)
        await store.transact(lambda tx: record_pings(tx, count))
        await store.transact(lambda tx: tx.deliver_again(1, "new", NOON))
    assert [fields["position"] for fields in told.fields()] == list(range(1, count + 1))
    assert {fields["type"] for fields in told.fields()} == {"relay.ping"}
    assert sum("reason" in fields for fields in told.fields()) == MAX_EVENTS_IN_RESULTS


def record_pings(tx: Transaction, count: int) -> None:
    event = relay_event(
        "relay.ping",
        Origin("west", "vm-0"),
        NOON,
        sink="drain",
        reason="asked for by a test",
        count=1,
        head=str(tx.head()),
    )
    tx.record_all([(event, None)] * count, NOON)
