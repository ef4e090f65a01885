"""The gate of a hub: each scope sends its StartRequests by itself."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from relay.errors import SourceUnavailable
from tests.approvals.builders import USER_REBOOT, build_event
from tests.approvals.running_gate import (
    TIMEOUT,
    ScopeOfFleet,
    running_hub,
    start_request_tasks,
)
from tests.clocks import ManualClock
from tests.eventually import eventually

OTHER_REBOOT = build_event("E-2", event_source="User")


async def test_a_scope_that_hangs_delays_no_other(tmp_path: Path) -> None:
    """One hangs while it is read, one while the StartRequest is in flight."""
    clock = ManualClock()
    hangs_in_read, hangs_in_flight, works = scopes = [
        ScopeOfFleet(clock, name, USER_REBOOT) for name in ("a", "b", "c")
    ]
    hangs_in_read.may_read.clear()
    hangs_in_flight.may_answer.clear()
    async with running_hub(tmp_path, clock, *scopes) as harness:
        (accepted,) = await harness.wait_for_events("startrequest.accepted")
        assert accepted.attributes["scope"] == "c"
        works.document = (USER_REBOOT, OTHER_REBOOT)
        await works.poll()
        await harness.wait_for_events("startrequest.accepted", 2)
        assert (hangs_in_read.sent, hangs_in_flight.sent) == ([], [("E-1",)])
        hangs_in_read.may_read.set()
        hangs_in_flight.may_answer.set()
        await harness.wait_for_events("startrequest.accepted", 4)
        assert (hangs_in_read.sent, hangs_in_flight.sent) == ([("E-1",)], [("E-1",)])
        assert works.sent == [("E-1",), ("E-2",)]


# --- failures


async def test_each_scope_has_pauses_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    often = ScopeOfFleet(clock, "a", USER_REBOOT, answers=[TIMEOUT] * 4)
    slow = SourceUnavailable("expected 200, got 429", status=429, retry_after=20)
    once = ScopeOfFleet(clock, "b", USER_REBOOT, answers=[slow])
    fails_later = ScopeOfFleet(clock, "c", answers=[TIMEOUT])
    with caplog.at_level(logging.WARNING):
        async with running_hub(tmp_path, clock, often, once, fails_later) as harness:
            for sent, pause in enumerate((1, 2, 4), 1):
                await eventually(lambda sent=sent: len(often.sent) == sent)
                await harness.settle()
                clock.advance(pause - 0.1)
                await harness.settle()
                assert len(often.sent) == sent
                clock.advance(0.1)
            await eventually(lambda: len(often.sent) == 4)
            fails_later.document = (USER_REBOOT,)
            await fails_later.poll()
            await eventually(lambda: len(fails_later.sent) == 1)
            await harness.settle()
            clock.advance(1)  # the first pause of this scope, in the pause of 8 s of another
            (accepted,) = await harness.wait_for_events("startrequest.accepted")
            assert accepted.attributes["scope"] == "c"
            clock.advance(7)
            await harness.wait_for_events("startrequest.accepted", 2)
            assert (len(often.sent), len(once.sent)) == (5, 1)
            clock.advance(4.9)
            await harness.settle()
            assert len(once.sent) == 1
            clock.advance(0.1)
            await harness.wait_for_events("startrequest.accepted", 3)
    warnings = [text for text in caplog.messages if text.startswith("cannot send")]
    assert [text.partition("in scope ")[2][0] for text in warnings] == ["a", "b", "c"]


# --- the end


async def test_a_kill_in_the_middle_leaves_nothing_behind_and_loses_no_grant(
    tmp_path: Path,
) -> None:
    """One scope is read, one is in flight, and one pauses after a failure."""
    clock = ManualClock()
    reads, sends, pauses = scopes = [
        ScopeOfFleet(clock, name, USER_REBOOT) for name in ("a", "b", "c")
    ]
    reads.may_read.clear()
    sends.may_answer.clear()
    pauses.answers.append(TIMEOUT)
    async with running_hub(tmp_path, clock, *scopes) as harness:
        await eventually(lambda: bool(reads.reads and sends.sent and pauses.sent))
        await harness.settle()
        assert len(start_request_tasks()) == 3
    assert start_request_tasks() == []
    assert harness.gate.engine.in_flight == set()
    again = [ScopeOfFleet(clock, name, USER_REBOOT) for name in ("a", "b", "c")]
    async with running_hub(tmp_path, clock, *again) as harness:
        accepted = await harness.wait_for_events("startrequest.accepted", 3)
        attempts = {event.attributes["scope"]: event.data["attempts"] for event in accepted}
        assert attempts == {"a": 1, "b": 2, "c": 2}
        assert [scope.sent for scope in again] == [[("E-1",)]] * 3
