"""Who executes a StartRequest, how grants take turns, the scopes of a hub, and the end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.limits import Limit
from relay.errors import SourceUnavailable
from tests.approvals.builders import BY_ALICE, REDEPLOY, USER_REBOOT, build_event, one_rule, started
from tests.approvals.running_gate import RETURNED, TIMEOUT, ScopeOfFleet, running_gate, running_hub
from tests.clocks import ManualClock
from tests.eventually import eventually

OTHER_REBOOT = build_event("E-2", event_source="User")


# --- who executes it


async def test_a_claim_names_who_executes_the_start_request(tmp_path: Path) -> None:
    async with running_gate(tmp_path, USER_REBOOT, agents=["vm-1", "vm-2"]) as harness:
        await harness.wait_for_events("startrequest.accepted")
        (note,) = harness.claim_notes()
        (claim,) = harness.azure.claims
        assert (note["agent"], note["attempt"]) == ("vm-1", 1)
        assert (claim.agent, claim.attempt_number, claim.event_id) == ("vm-1", 1, "E-1")


async def test_a_grant_is_claimed_only_when_there_is_somebody_to_execute_it(tmp_path: Path) -> None:
    async with running_gate(tmp_path, REDEPLOY, agents=[]) as harness:
        await harness.submit(of=REDEPLOY)
        for tries, pause in enumerate((1, 2, 4, 8, 8), 1):
            await eventually(lambda tries=tries: harness.azure.reads == tries)
            await harness.settle()
            harness.clock.advance(pause - 0.1)
            await harness.settle()
            assert harness.azure.reads == tries
            harness.clock.advance(0.2)
        assert "claim" not in harness.kinds()
        harness.azure.agents = ["vm-1"]
        harness.clock.advance(8)
        (accepted,) = await harness.wait_for_events("startrequest.accepted")
        (claim,) = harness.azure.claims
        assert (accepted.data["attempts"], claim.agent) == (1, "vm-1")


async def test_after_a_start_request_to_nobody_the_next_goes_at_once(tmp_path: Path) -> None:
    given: dict[str, Any] = {"answers": [RETURNED] * 2, "agents": ["vm-1", "vm-2", "vm-3"]}
    async with running_gate(tmp_path, USER_REBOOT, **given) as harness:
        (accepted,) = await harness.wait_for_events("startrequest.accepted")
        assert [claim.agent for claim in harness.azure.claims] == ["vm-1", "vm-2", "vm-3"]
        assert accepted.data["attempts"] == 3
        assert [note["agent"] for note in harness.claim_notes()] == ["vm-1", "vm-2", "vm-3"]


async def test_who_cannot_be_reached_is_not_asked_again_without_a_pause(tmp_path: Path) -> None:
    given: dict[str, Any] = {"answers": [RETURNED] * 3, "agents": ["vm-1"]}
    async with running_gate(tmp_path, USER_REBOOT, **given) as harness:
        await harness.wait_for_start_requests(2)
        harness.clock.advance(0.9)
        await harness.settle()
        assert len(harness.azure.sent) == 2
        harness.clock.advance(0.1)
        await harness.wait_for_events("startrequest.accepted")
        assert len(harness.azure.sent) == 4


# --- turns


async def test_a_grant_that_fails_again_and_again_delays_others_by_one_turn(tmp_path: Path) -> None:
    answers = [TIMEOUT, None, TIMEOUT, TIMEOUT]
    async with running_gate(tmp_path, USER_REBOOT, OTHER_REBOOT, answers=answers) as harness:
        await harness.clock.advance_until(lambda: bool(harness.events("startrequest.accepted")))
        await harness.settle()
        assert harness.azure.sent[-3:] == ["E-1", "E-2", "E-1"]


async def test_after_an_answer_the_pauses_begin_anew(tmp_path: Path) -> None:
    answers = [TIMEOUT, TIMEOUT, None, TIMEOUT]
    async with running_gate(tmp_path, USER_REBOOT, OTHER_REBOOT, answers=answers) as harness:
        for sent, pause in ((1, 1.0), (2, 2.0), (4, 1.0)):
            await harness.wait_for_start_requests(sent)
            harness.clock.advance(pause - 0.1)
            await harness.settle()
            assert len(harness.azure.sent) == sent
            harness.clock.advance(0.1)
        await harness.wait_for_events("startrequest.accepted", 2)


# --- the end


async def test_a_grant_just_read_is_not_claimed_while_the_relay_stops(tmp_path: Path) -> None:
    async with running_gate(tmp_path, USER_REBOOT) as harness:
        harness.azure.may_read.clear()
        await eventually(lambda: harness.azure.reads == 1)
        await harness.gate.stop_start_requests(1000)
        harness.azure.may_read.set()
        await harness.settle()
        assert "claim" not in harness.kinds()


async def test_scopes_pause_by_themselves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    often = ScopeOfFleet(clock, "a", USER_REBOOT, answers=[TIMEOUT] * 4)
    slow = SourceUnavailable("expected 200, got 429", status=429, retry_after=20)
    once = ScopeOfFleet(clock, "b", USER_REBOOT, answers=[slow])
    fails_later = ScopeOfFleet(clock, "c", answers=[TIMEOUT])
    with caplog.at_level(logging.WARNING):
        async with running_hub(tmp_path, often, once, fails_later) as harness:
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


# --- limits

A, B, C = (
    build_event(name, resources=(machine,), due=due)
    for name, machine, due in (("A", "db-1", 900), ("B", "db-2", 800), ("C", "db-3", 700))
)


def limited(approve: Any, **changes: Any) -> ApprovalsSettings:
    """One machine at a time, and two minutes between them."""
    limit = {"name": "databases", "max": 1, "rest": "2m"} | changes
    return one_rule(approve, limits=[limit])


async def test_a_waiting_grant_reads_nothing_and_goes_when_a_slot_is_free(tmp_path: Path) -> None:
    """Azure starts another event between the grant and the claim."""
    async with running_gate(tmp_path, A, B, settings=limited(BY_ALICE)) as harness:
        harness.azure.document = (A, started(B))
        await harness.submit(of=A)
        await harness.settle()
        reads = harness.azure.reads
        for _ in range(20):
            harness.clock.advance(1.0)
            await harness.settle()
        assert (harness.azure.sent, harness.azure.reads) == ([], reads)
        await harness.record_document(A)
        await harness.settle()
        assert harness.azure.sent == []
        await harness.clock.advance_until(lambda: len(harness.azure.sent) == 1, step=1.0)
        assert harness.azure.sent == ["A"]


async def test_more_known_machines_make_more_slots_after_a_wake(tmp_path: Path) -> None:
    known = 10

    def count(_: Limit) -> int:
        return known

    settings = limited("automatic", max="10%")
    async with running_gate(tmp_path, settings=settings, count_machines=count) as harness:
        await harness.record_document(A, B)
        await harness.wait_for_start_requests(1)
        (wait,) = (await harness.submit(of=A)).body["waitingFor"]
        assert (wait["max"], wait["machines"]) == (1, ["db-2"])
        known = 20
        harness.gate.wake()
        await eventually(lambda: len(harness.azure.sent) == 2)
        assert harness.azure.sent == ["B", "A"]


async def test_a_limit_of_a_hub_counts_all_scopes_and_its_slots_move_on(tmp_path: Path) -> None:
    clock = ManualClock()
    west, east = ScopeOfFleet(clock, "west", A), ScopeOfFleet(clock, "east", B)
    settings = limited(BY_ALICE, rest="0s")
    async with running_hub(tmp_path, west, east, settings=settings) as harness:
        # B is granted in its scope, and Azure starts A in the other one before the claim.
        east.may_read.clear()
        assert (await harness.submit(of=B)).body["state"] == "granted"
        west.document = (started(A),)
        await west.poll()
        east.may_read.set()
        await harness.settle()
        assert (east.sent, west.sent) == ([], [])
        assert harness.events("approval.granted")[-1].attributes["scope"] == "east"
        west.document = ()
        await west.poll()
        await clock.advance_until(lambda: east.sent == ["B"])
