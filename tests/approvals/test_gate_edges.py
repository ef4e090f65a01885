"""The gate at its edges: what comes while it looks at something else, and what makes it look."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relay.approvals import ApprovalsSettings
from relay.approvals.refusal_aggregation import MAX_RECORDED_ABOUT_EVENT
from relay.approvals.request import Caller
from relay.approvals.standing_hold_admission import CreateRequest, StandingHoldBody
from relay.events.build import relay_event
from relay.events.tracing import Span
from relay.outbox import RecordedEvent
from relay.outbox.rows import PageLimit
from relay.outbox.sqlite import Store
from relay.outbox.transaction import Transaction
from tests.approvals.builders import (
    ORIGIN,
    REBOOT,
    SETTINGS,
    USER_REBOOT,
    build_caller,
    build_event,
)
from tests.approvals.manual_clock import NOON, ManualClock
from tests.approvals.running_gate import running_gate, trace
from tests.eventually import eventually
from tests.outbox.conftest import LimitedDisk

OTHER_REBOOT = build_event("E-2", event_source="User")
BY_TWO_VOTES = ApprovalsSettings.model_validate(
    {"rules": [{"name": "all", "approve": {"votes": 2, "from": ["client:alice", "client:bob"]}}]}
)
BY_VOTES = ApprovalsSettings.model_validate(
    {"rules": [{"name": "all", "approve": {"votes": 1, "from": ["client:alice"]}}]}
)


def until(time: str) -> StandingHoldBody:
    """A standing hold on every event until a time of the day."""
    return StandingHoldBody.model_validate(
        {"match": {}, "ends": f"2026-04-11T{time}Z", "reason": "freeze"}
    )


class BusyStore:
    """Keeps a store busy. What is submitted meanwhile is done in one transaction afterwards."""

    def __init__(self, store: Store) -> None:
        self._began, self._may_end = threading.Event(), threading.Event()
        store.submit(self._wait)
        assert self._began.wait(60)

    def _wait(self, _: Transaction) -> None:
        self._began.set()
        self._may_end.wait(60)

    async def end(self) -> None:
        """Let the store do what was submitted until now."""
        await asyncio.sleep(0)  # the last work is queued
        self._may_end.set()


async def look_is_queued() -> None:
    """Let the gate that is awake ask the store for its look."""
    for _ in range(3):
        await asyncio.sleep(0)


def looks(statements: list[str]) -> list[str]:
    """Return the statements that look for events for which a transition is due."""
    return [text for text in statements if "ORDER BY live DESC" in text]


# --- what comes while the gate looks at something else


async def test_an_event_that_comes_during_the_first_look_is_granted(tmp_path: Path) -> None:
    async with running_gate(tmp_path) as harness:
        busy = BusyStore(harness.store)
        await look_is_queued()
        recording = asyncio.create_task(harness.record_document(USER_REBOOT))
        await busy.end()
        await recording
        await harness.wait_for_events("startrequest.accepted")


async def test_an_event_that_comes_while_the_gate_looks_at_new_rules_is_granted(
    tmp_path: Path,
) -> None:
    """By the old rules, nothing followed for an event about which nobody had decided."""
    async with running_gate(tmp_path, REBOOT, settings=BY_VOTES) as harness:
        await harness.settle()
        busy = BusyStore(harness.store)
        used = harness.store.submit(lambda _: harness.gate.engine.use_settings(SETTINGS))
        harness.gate.wake()
        await look_is_queued()
        recording = asyncio.create_task(harness.record_document(REBOOT, OTHER_REBOOT))
        await busy.end()
        await used
        await recording
        await harness.wait_for_events("startrequest.accepted")
        assert harness.azure.sent == [("E-2",)]


async def test_a_change_that_comes_while_the_gate_looks_at_the_first_vote_voids_that(
    tmp_path: Path,
) -> None:
    """The vote came during a look that found nothing decided."""
    async with running_gate(tmp_path, REBOOT, settings=BY_TWO_VOTES) as harness:
        await harness.settle()
        busy_again: list[BusyStore] = []

        def keep_busy(events: Sequence[RecordedEvent]) -> None:
            if events[0].name == "approval.recorded":
                busy_again.append(BusyStore(harness.store))

        harness.store.listeners.recorded.append(keep_busy)
        busy = BusyStore(harness.store)
        harness.gate.wake()
        await look_is_queued()
        voting = asyncio.create_task(harness.submit(of=REBOOT))
        await busy.end()
        await voting
        await look_is_queued()
        recording = asyncio.create_task(harness.record_document(build_event(due=950)))
        await busy_again[0].end()
        await recording
        await harness.wait_for_events("approval.voided")


async def test_an_event_that_came_while_nothing_could_be_written_is_granted_afterwards(
    tmp_path: Path,
) -> None:
    async with running_gate(tmp_path) as harness:
        await harness.settle()
        disk = LimitedDisk(tmp_path)
        disk.fill()
        try:
            await harness.record_document(USER_REBOOT)
            await harness.settle()
        finally:
            disk.free()
        await eventually(lambda: harness.store.write_error is None)
        await harness.clock.advance_until(lambda: bool(harness.azure.sent))
        assert harness.azure.sent == [("E-1",)]


async def test_what_came_while_approvals_were_off_is_granted_when_they_are_on(
    tmp_path: Path,
) -> None:
    async with running_gate(tmp_path) as harness:
        await harness.gate.set_approval_mode("off", "local:root")
        await harness.record_document(USER_REBOOT)
        await harness.settle()
        assert harness.events("approval.granted") == []
        await harness.gate.set_approval_mode("on", "local:root")
        await harness.wait_for_events("startrequest.accepted")


def report_failing_sink(tx: Transaction) -> None:
    """Record an event that is about no event of Azure."""
    head = str(tx.head())
    event = relay_event(
        "relay.sink-failing", ORIGIN, NOON, sink="bus", reason="503", count=1, head=head
    )
    tx.record(event, NOON)


async def test_each_hold_expires_in_its_own_time_and_then_the_gate_waits(tmp_path: Path) -> None:
    settings = ApprovalsSettings.model_validate(
        {**BY_TWO_VOTES.model_dump(by_alias=True), "hold_expires": "30s"}
    )
    other = build_event("E-2")
    async with running_gate(tmp_path, REBOOT, other, settings=settings) as harness:
        await harness.submit("hold", of=REBOOT)
        await harness.settle()
        harness.clock.advance(20)
        await harness.submit("hold", of=other)
        await harness.settle()
        harness.clock.advance(10)
        (*_, released) = await harness.wait_for_events("approval.recorded", 3)
        assert (released.subject, released.data["principal"]) == ("E-1", "relay")
        harness.clock.advance(20)
        (*_, released) = await harness.wait_for_events("approval.recorded", 4)
        assert (released.subject, released.data["principal"]) == ("E-2", "relay")
        statements = trace(harness.store)
        await harness.settle()
        assert looks(statements) == []


async def test_while_a_hold_lasts_only_the_events_that_changed_are_checked(
    tmp_path: Path,
) -> None:
    async with running_gate(tmp_path, REBOOT, OTHER_REBOOT) as harness:
        await harness.wait_for_events("startrequest.accepted")
        await harness.submit("hold", of=REBOOT)
        await harness.settle()
        statements = trace(harness.store)
        await harness.record_document(REBOOT, build_event("E-2", event_source="User", due=950))
        await harness.settle()
        assert len(looks(statements)) >= 1
        assert not [text for text in statements if text.endswith("FROM occurrence WHERE id = 1")]


async def test_a_report_about_a_sink_costs_no_look_at_the_approvals(tmp_path: Path) -> None:
    async with running_gate(tmp_path, REBOOT, settings=SETTINGS) as harness:
        await harness.settle()
        statements = trace(harness.store)
        await harness.store.transact(report_failing_sink)
        await harness.settle()
        assert len(harness.events("relay.sink-failing")) == 1
        assert looks(statements) == []
        await harness.record_document(build_event(due=950))
        await harness.settle()
        assert len(looks(statements)) == 1


async def test_where_nobody_has_decided_anything_a_report_about_a_sink_is_no_decision(
    tmp_path: Path,
) -> None:
    async with running_gate(tmp_path, REBOOT, settings=BY_VOTES) as harness:
        await harness.settle()
        statements = trace(harness.store)
        await harness.store.transact(report_failing_sink)
        await harness.record_document(build_event(due=950))
        await harness.settle()
        assert len(harness.events("relay.sink-failing", "event.updated")) == 2
        assert looks(statements) == []


# --- tasks, notices, traces and refusals


async def test_the_tasks_of_the_gate_are_named_by_what_they_do(tmp_path: Path) -> None:
    """Where the log shows a task that failed or hangs, its name says which."""
    async with running_gate(tmp_path) as harness:
        await harness.settle()
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert {name for name in names if name.startswith("approvals: ")} == {
            "approvals: transitions",
            "approvals: StartRequests",
            "approvals: refusals",
        }


async def test_new_sinks_have_tell_first_again_for_an_open_grant(tmp_path: Path) -> None:
    async with running_gate(tmp_path, USER_REBOOT, sinks=("bus",)) as harness:
        await harness.wait_for_events("approval.granted")
        harness.clock.advance(4)
        await harness.settle()
        harness.gate.restart_tell_first_waits()
        harness.clock.advance(4.9)
        await harness.settle()
        assert harness.azure.sent == []
        harness.clock.advance(0.1)
        await harness.wait_for_events("startrequest.accepted")


async def test_a_start_request_has_a_span_where_tracing_is_on(tmp_path: Path) -> None:
    spans: list[Span] = []
    async with running_gate(tmp_path, USER_REBOOT, record_span=spans.append) as harness:
        await harness.wait_for_events("startrequest.accepted")
        (span,) = spans
        assert (span.name, span.attributes["imds_relay.event_id"]) == ("StartRequest", "E-1")


async def test_a_refusal_that_could_not_be_recorded_takes_no_place_of_the_minute(
    tmp_path: Path,
) -> None:
    async with running_gate(tmp_path, REBOOT) as harness:
        await harness.settle()
        disk = LimitedDisk(tmp_path)
        disk.fill()
        try:
            answer = await harness.submit("approve", "eve", revision="x")
        finally:
            disk.free()
        assert answer.status == 503
        await eventually(lambda: harness.store.write_error is None)
        for _ in range(MAX_RECORDED_ABOUT_EVENT):
            assert (await harness.submit("approve", "eve", revision="x")).status == 409
        assert len(harness.events("approval.refused")) == MAX_RECORDED_ABOUT_EVENT


async def test_counted_refusals_are_tried_once_a_second_until_they_can_be_written(
    tmp_path: Path,
) -> None:
    async with running_gate(tmp_path, REBOOT) as harness:
        for _ in range(MAX_RECORDED_ABOUT_EVENT + 2):
            await harness.submit("approve", "eve", revision="x")
        await harness.settle()
        statements = trace(harness.store)

        def tries() -> int:
            return sum("SELECT DISTINCT principal FROM answer" in text for text in statements)

        disk = LimitedDisk(tmp_path)
        disk.fill()
        try:
            harness.clock.advance(60)
            for number in (1, 2):
                await eventually(lambda number=number: tries() >= number)
                await harness.settle()
                assert tries() == number
                harness.clock.advance(1)
        finally:
            disk.free()
        await eventually(lambda: harness.store.write_error is None)
        await harness.clock.advance_until(lambda: len(harness.events("approval.refused")) > 10)
        assert harness.events("approval.refused")[-1].data["count"] == 2


async def test_where_nothing_was_counted_no_refusals_are_written(tmp_path: Path) -> None:
    async with running_gate(tmp_path, REBOOT) as harness:
        await harness.settle()
        statements = trace(harness.store)
        assert await harness.gate.record_aggregated_refusals()
        assert statements == []


# --- standing holds


async def test_a_standing_hold_that_cannot_be_written_is_503_and_not_made(tmp_path: Path) -> None:
    async with running_gate(tmp_path, REBOOT) as harness:
        await harness.settle()
        disk = LimitedDisk(tmp_path)
        disk.fill()
        try:
            answer = await harness.hold_ahead(until("12:05:00"))
        finally:
            disk.free()
        assert (answer.status, answer.body["detail"]) == (
            503,
            "the decision cannot be recorded now; nothing was decided, try again",
        )
        await eventually(lambda: harness.store.write_error is None)
        assert await harness.gate.standing_holds_page(None, PageLimit(10), only_open=False) == (
            [],
            False,
        )


async def test_standing_holds_are_listed_the_newest_first_and_found_by_their_ids(
    tmp_path: Path,
) -> None:
    async with running_gate(tmp_path) as harness:
        gate = harness.gate
        ids = [
            (await harness.hold_ahead(until(f"12:0{minute}:00"))).body["holdId"]
            for minute in (5, 6, 7)
        ]
        assert (await harness.end_ahead(ids[1])).status == 200

        async def listed(**changes: Any) -> tuple[list[str], bool]:
            given = {"before": None, "limit": PageLimit(10), "only_open": False} | changes
            holds, has_more = await gate.standing_holds_page(**given)
            return [hold.hold_id for hold in holds], has_more

        assert await listed() == ([ids[2], ids[1], ids[0]], False)
        assert await listed(only_open=True) == ([ids[2], ids[0]], False)
        assert await listed(limit=PageLimit(1)) == ([ids[2]], True)
        newest = await gate.find_standing_hold(ids[2])
        assert newest is not None
        assert await listed(before=newest.number) == ([ids[1], ids[0]], False)
        ended = await gate.find_standing_hold(ids[1])
        assert ended is not None
        assert ended.ended_by == "client:eve"
        assert await gate.find_standing_hold("unknown") is None


async def test_a_standing_hold_expires_in_time_though_nothing_else_happens(tmp_path: Path) -> None:
    async with running_gate(tmp_path, settings=BY_VOTES) as harness:
        await harness.settle()
        await harness.hold_ahead(until("12:00:30"))
        await harness.settle()
        harness.clock.advance(30)
        await harness.wait_for_events("standing-hold.expired")


async def test_a_held_event_is_granted_as_soon_as_the_standing_hold_is_ended(
    tmp_path: Path,
) -> None:
    async with running_gate(tmp_path) as harness:
        hold_id = (await harness.hold_ahead(until("12:05:00"))).body["holdId"]
        await harness.record_document(USER_REBOOT)
        await harness.settle()
        assert harness.events("approval.granted") == []
        assert (await harness.end_ahead(hold_id)).status == 200
        await harness.wait_for_events("startrequest.accepted")


async def test_a_standing_hold_that_is_refused_or_repeated_costs_no_look_at_the_approvals(
    tmp_path: Path,
) -> None:
    async with running_gate(tmp_path, REBOOT, clock=ManualClock()) as harness:

        async def ask(by: Caller) -> tuple[int, bool]:
            body = until("12:05:00")
            answer = await harness.gate.create_standing_hold(
                CreateRequest(caller=by, at=NOON, request_id="r", digest="d", body=body)
            )
            await harness.settle()
            return answer.status, answer.repeat

        assert await ask(build_caller("eve")) == (201, False)
        statements = trace(harness.store)
        assert await ask(build_caller("eve")) == (201, True)
        assert await ask(build_caller("bob", "read")) == (403, False)
        assert looks(statements) == []
