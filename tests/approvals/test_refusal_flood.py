"""A principal that is refused again and again: what is recorded, counted and remembered."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from relay.approvals.refusal_aggregation import (
    MAX_RECORDED,
    MAX_RECORDED_ABOUT_EVENT,
    RefusalAggregator,
)
from relay.signature import MAX_AGE, MAX_AHEAD
from relay.store.decisions import MAX_REFUSALS, REFUSAL_RETENTION
from relay.store.transaction import Transaction
from tests.approvals.builders import REBOOT, ApprovalFile, build_event, build_request
from tests.approvals.manual_clock import NOON
from tests.approvals.running_gate import GateHarness, running_gate
from tests.eventually import eventually


async def _refuse(harness: GateHarness, times: int, **changes: Any) -> None:
    """Submit requests at once that are refused because of their revision."""
    answers = await asyncio.gather(
        *(harness.submit("approve", "eve", **{"revision": "x"} | changes) for _ in range(times))
    )
    assert {answer.status for answer in answers} <= {404, 409}


def _counts(harness: GateHarness) -> list[int | None]:
    return [refused.data.get("count") for refused in harness.events("approval.refused")]


async def test_after_ten_refusals_in_a_minute_the_others_become_one_event(tmp_path: Path) -> None:
    async with running_gate(tmp_path, REBOOT) as harness:
        await _refuse(harness, 300)
        assert _counts(harness) == [None] * 10
        harness.clock.advance(59)
        await _refuse(harness, 1, reason="the last")
        assert _counts(harness) == [None] * 10
        await harness.settle()
        harness.clock.advance(1)
        (*_, aggregated) = await harness.wait_for_events("approval.refused", 11)
        assert _counts(harness) == [None] * 10 + [291]
        assert (aggregated.data["principal"], aggregated.data["reason"]) == (
            "client:eve",
            "the last",
        )
        assert (aggregated.subject, aggregated.data["revision"]) == ("E-1", REBOOT.revision)


async def test_each_principal_and_each_event_has_ten_refusals(tmp_path: Path) -> None:
    async with running_gate(tmp_path, REBOOT, build_event("E-2")) as harness:
        await _refuse(harness, 11)
        await _refuse(harness, 11, event_id="e-2")
        for _ in range(11):
            await harness.submit("approve", "bob", revision="x")
        assert _counts(harness) == [None] * 30


async def test_unknown_events_share_ten_refusals(tmp_path: Path) -> None:
    async with running_gate(tmp_path, REBOOT) as harness:
        for number in range(40):
            answer = await harness.submit("approve", "eve", event_id=f"E-{number + 2}")
            assert answer.status == 404
        assert await harness.gate.record_aggregated_refusals()
        assert _counts(harness) == [None] * 10 + [30]
        await _refuse(harness, 1)
        assert _counts(harness) == [None] * 10 + [30, None]


async def test_a_principal_with_many_events_is_bounded_too(tmp_path: Path) -> None:
    events = [build_event(f"E-{number}") for number in range(2 * MAX_RECORDED)]
    async with running_gate(tmp_path, *events) as harness:
        for event in events:
            await _refuse(harness, 1, event_id=event.event_id)
        await harness.gate.record_aggregated_refusals()
        assert _counts(harness) == [None] * MAX_RECORDED + [MAX_RECORDED]


async def test_a_stop_records_what_was_counted_and_nothing_twice(tmp_path: Path) -> None:
    async with running_gate(tmp_path, REBOOT) as harness:
        await _refuse(harness, 15)
        assert await harness.gate.record_aggregated_refusals()
        assert await harness.gate.record_aggregated_refusals()
        assert _counts(harness) == [None] * 10 + [5]


async def test_while_the_store_fails_the_count_waits(tmp_path: Path) -> None:
    async with running_gate(tmp_path, REBOOT) as harness:
        await _refuse(harness, 15)
        connection = harness.store._state_file.connection  # noqa: SLF001  # no other way to break the disk
        connection.execute("PRAGMA query_only = ON")
        assert not await harness.gate.record_aggregated_refusals()
        assert (await harness.submit("approve", "bob", revision="x")).status == 503
        connection.execute("PRAGMA query_only = OFF")
        await eventually(lambda: harness.store.write_error is None)
        for _ in range(10):
            await harness.submit("approve", "bob", revision="x")
        assert await harness.gate.record_aggregated_refusals()
        assert _counts(harness) == [None] * 20 + [5]


async def test_a_refusal_is_counted_though_its_caller_has_disconnected(tmp_path: Path) -> None:
    async with running_gate(tmp_path, REBOOT) as harness:
        await _refuse(harness, 10)
        may_go_on = threading.Event()
        blocked = harness.store.submit(lambda _: may_go_on.wait(60))
        call = asyncio.create_task(harness.submit("approve", "eve", revision="x"))
        await asyncio.sleep(0)  # the call is queued behind the work that is blocked
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        may_go_on.set()
        assert await blocked
        await harness.store.read(lambda _: None)
        await harness.gate.record_aggregated_refusals()
        assert _counts(harness) == [None] * 10 + [1]


async def test_an_aggregated_refusal_is_answered_as_any_other_and_repeats_get_the_same(
    tmp_path: Path,
) -> None:
    async with running_gate(tmp_path, REBOOT) as harness:
        answers = [
            await harness.submit("approve", "eve", revision="x", request_id=f"r{number}")
            for number in range(20)
        ]
        assert {(answer.status, answer.body["detail"]) for answer in answers} == {
            (409, answers[0].body["detail"])
        }
        repeat = await harness.submit("approve", "eve", revision="x", request_id="r19")
        assert (repeat.repeat, repeat.body) == (True, answers[19].body)
        reused = await harness.submit("hold", "eve", request_id="r19", digest="other")
        assert reused.status == 409
        await harness.gate.record_aggregated_refusals()
        assert _counts(harness)[10:] == [11]


def test_a_minute_ends_when_the_clock_is_set_back() -> None:
    aggregator, request = RefusalAggregator(), build_request()
    for _ in range(MAX_RECORDED_ABOUT_EVENT):
        assert aggregator.admit(build_request(), "e-1")
    assert not aggregator.admit(request, "e-1")
    aggregator.aggregate_refusal(request, "why", None)
    earlier = build_request(at=request.at.replace(hour=3))
    assert aggregator.admit(earlier, "e-1")
    assert [aggregated.count for aggregated in aggregator.take_due(earlier.at)] == [1]


def test_a_transaction_that_runs_twice_uses_one_place() -> None:
    aggregator, request = RefusalAggregator(), build_request()
    for _ in range(MAX_RECORDED_ABOUT_EVENT + 1):
        assert aggregator.admit(request, "e-1")
    aggregator.undo_admit(request)
    assert all(aggregator.admit(build_request(), "e-1") for _ in range(MAX_RECORDED_ABOUT_EVENT))
    assert not aggregator.admit(request, "e-1")


@pytest.mark.parametrize(("status", "is_old"), [(202, True), (403, False), (403, True)])
def test_of_older_refusals_only_the_newest_are_first_answers(
    approvals: ApprovalFile, status: int, *, is_old: bool
) -> None:
    """An accepted decision keeps its first answer however many others there are.

    So does a refused callback for as long as its signature is valid.
    """
    now = NOON + (REFUSAL_RETENTION if is_old else timedelta(seconds=MAX_AGE + MAX_AHEAD))

    def remember(tx: Any) -> None:
        for number in range(MAX_REFUSALS + 10):
            at = NOON + timedelta(milliseconds=number)
            tx.decisions.remember_answer("client:eve", f"r{number}", "d", status, {}, at)
        tx.decisions.remember_answer("client:bob", "r", "d", status, {}, NOON)
        tx.decisions.prune_answers_of_refusals(now + timedelta(seconds=MAX_REFUSALS / 1000 + 1))

    approvals.transact(remember)
    kept = {
        number
        for number in range(MAX_REFUSALS + 10)
        if approvals.transact(lambda tx: tx.decisions.first_answer("client:eve", f"r{number}"))  # noqa: B023  # called at once
    }
    assert kept == set(range(10 if status == 403 and is_old else 0, MAX_REFUSALS + 10))
    assert approvals.transact(lambda tx: tx.decisions.first_answer("client:bob", "r"))


def test_surplus_first_answers_go_when_counted_refusals_are_recorded(
    approvals: ApprovalFile,
) -> None:
    def remember(tx: Transaction) -> None:
        for number in range(MAX_REFUSALS + 1):
            at = NOON + timedelta(milliseconds=number)
            tx.decisions.remember_answer("client:eve", f"r{number}", "d", 403, {}, at)

    approvals.transact(remember)
    now = NOON + timedelta(hours=1)
    approvals.transact(lambda tx: approvals.engine.record_aggregated_refusals(tx, [], now))
    first, second = approvals.transact(
        lambda tx: [tx.decisions.first_answer("client:eve", each) for each in ("r0", "r1")]
    )
    assert (first is None, second is not None) == (True, True)
