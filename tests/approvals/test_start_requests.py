"""Who executes StartRequests, how grants take turns, scopes of a hub, and what shares a commit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from relay.approvals import ApprovalsSettings, ClaimedGrant
from relay.approvals.limits import Limit
from relay.errors import SourceUnavailable, StoreUnavailable
from relay.store import StoreSettings
from relay.store.approvals import NOTHING
from relay.store.file import open_for_reading
from relay.store.retention import prune_all_tables
from relay.store.sqlite import Work
from relay.store.transaction import Transaction
from tests.approvals.builders import (
    BY_ALICE,
    REDEPLOY,
    USER_REBOOT,
    ApprovalFile,
    build_event,
    build_request,
    one_rule,
    open_grants,
    started,
)
from tests.approvals.running_gate import RETURNED, TIMEOUT, ScopeOfFleet, running_gate, running_hub
from tests.clocks import NOON, ManualClock
from tests.eventually import eventually
from tests.store.open_store import blocked

OTHER_REBOOT = build_event("E-2", event_source="User")


# --- who executes it


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
        tries = [("vm-1", 1), ("vm-2", 2), ("vm-3", 3)]
        assert [(claim.agent, claim.attempt_number) for claim in harness.azure.claims] == tries
        assert accepted.data["attempts"] == 3
        assert [(note["agent"], note["attempt"]) for note in harness.claim_notes()] == tries


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


async def test_a_held_grant_is_not_looked_at_for_what_happens_in_other_scopes(
    tmp_path: Path,
) -> None:
    """With thousands of events and many such scopes, notices would wait for it."""
    clock = ManualClock()
    west, east = ScopeOfFleet(clock, "west", USER_REBOOT), ScopeOfFleet(clock, "east")
    west.may_read.clear()
    async with running_hub(tmp_path, west, east) as harness:
        await eventually(lambda: west.reads == 1)
        assert (await harness.submit("hold", "alice", USER_REBOOT)).accepted
        west.may_read.set()
        await harness.settle()
        clock.advance(1)
        await harness.settle()
        engine = harness.gate.engine
        with mock.patch.object(engine, "status", wraps=engine.status) as status:
            east.document = (build_event("E-2", event_type="Freeze"),)
            await east.poll()
            await harness.settle()
            assert status.call_count == 0
        assert (await harness.submit("release", "alice", USER_REBOOT)).accepted
        await eventually(lambda: west.sent == ["E-1"])


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


# --- what shares a commit with it


def spoil(tx: Transaction, rows: str) -> None:
    """Change rows of the journal as another program does, and read everything again."""
    tx.connection.execute("DROP TRIGGER journal_is_append_only")
    tx.connection.execute(f"UPDATE journal SET body = CAST('x' AS BLOB) WHERE {rows}")  # noqa: S608
    tx.standing_holds.verify()
    tx.memory.folded.clear()


def prune(tx: Transaction) -> int:
    """Forget all that is over, and return how many rows of the journal went."""
    settings = StoreSettings(retain=0.0, audit_retain=0.0)
    return prune_all_tables(tx, settings, NOON + timedelta(seconds=60))[0]


def test_damage_lasts_even_if_the_work_that_found_it_is_undone(approvals: ApprovalFile) -> None:
    approvals.record_document(REDEPLOY)
    approvals.submit(of=REDEPLOY)

    def find_damage_and_fail(tx: Transaction) -> None:
        spoil(tx, "kind = 'approval.recorded'")
        assert tx.approvals.of_key("e-1").damage
        raise LookupError("a mistake of our own")

    with pytest.raises(LookupError):
        approvals.transact(find_damage_and_fail)
    assert approvals.submit(of=REDEPLOY).status == 503
    assert approvals.claim() == []


def test_work_in_a_commit_with_pruning_knows_what_was_accepted(approvals: ApprovalFile) -> None:
    approvals.record_document(USER_REBOOT)
    approvals.accept(approvals.claim())

    def share_commit(tx: Transaction) -> None:
        tx.approvals.open_grants()
        prune(tx)
        approvals.engine.decide(tx, build_request(of=USER_REBOOT))

    approvals.transact(share_commit)
    assert len(approvals.events("approval.granted")) == 1


def test_a_claim_in_a_commit_with_pruning_obeys_a_standing_hold(approvals: ApprovalFile) -> None:
    approvals.record_document(build_event("E-9", event_type="Freeze"))
    approvals.record_document(USER_REBOOT)
    approvals.hold_ahead()

    def share_commit(tx: Transaction) -> list[ClaimedGrant | None]:
        assert prune(tx) > 0
        return [approvals.engine.claim_grant(tx, grant, NOON) for grant in open_grants(tx)]

    assert approvals.transact(share_commit) == [None]


async def test_a_vote_that_was_rolled_back_alone_is_not_remembered(tmp_path: Path) -> None:
    """What shared its commit is on disk, and so is what that has read."""
    async with running_gate(tmp_path, REDEPLOY) as harness:

        def vote_and_fail(tx: Transaction) -> None:
            assert harness.gate.engine.decide(tx, build_request(of=REDEPLOY)).accepted
            assert tx.approvals.of_key("e-1").decisions
            raise KeyError("what is read is not there")

        with blocked(harness.store):
            failing = harness.store.submit(vote_and_fail)
            shared = harness.store.submit(lambda tx: tx.approvals.of_key("e-1"))
        with pytest.raises(KeyError):
            await failing
        assert await shared == NOTHING
        assert await harness.store.read(lambda tx: tx.approvals.of_key("e-1")) == NOTHING
        await harness.submit("approve", "alice", REDEPLOY)
        await harness.wait_for_events("startrequest.accepted")


async def test_a_start_request_stays_in_flight_while_a_commit_is_repeated(tmp_path: Path) -> None:
    """What comes before the answer in a commit runs again, too, if work behind the answer fails."""

    def fail(_: Transaction) -> None:
        raise KeyError("what is read is not there")

    settings = one_rule({"votes": 1, "from": ["client:alice"], "expires": "60s"})
    may_go_on = threading.Event()
    async with running_gate(tmp_path, REDEPLOY, settings=settings) as harness:
        engine = harness.gate.engine
        harness.azure.may_answer.clear()
        assert (await harness.submit("approve", "alice", REDEPLOY)).accepted
        await eventually(lambda: len(harness.azure.sent) == 1)
        await harness.settle()
        harness.clock.advance(61)  # its vote is over
        answered = await harness.block_store(may_go_on)
        hold = asyncio.create_task(harness.submit("hold", "bob", REDEPLOY))
        await asyncio.sleep(0)
        harness.store.submit(lambda tx: engine.check_all(tx, harness.clock.now()))
        harness.azure.may_answer.set()
        await answered.wait()
        error = harness.store.submit(fail)
        may_go_on.set()
        with pytest.raises(KeyError):
            await error
        assert (await hold).status == 409
        await harness.settle()
        assert harness.kinds()[-2:] == ["approval.refused", "startrequest.accepted"]


async def test_damage_of_standing_holds_ends_reads_before_a_start_request(tmp_path: Path) -> None:
    async with running_gate(tmp_path, REDEPLOY) as harness:
        harness.azure.may_read.clear()
        await harness.hold_ahead(match={"resources": ["nobody"]})
        assert (await harness.submit("approve", "alice", REDEPLOY)).accepted
        await eventually(lambda: harness.azure.reads == 1)
        await harness.store.transact(partial(spoil, rows="kind = 'standing-hold.created'"))
        harness.azure.may_read.set()
        for _ in range(20):
            await harness.settle()
            harness.clock.advance(0.05)
        assert harness.azure.reads <= 3
        assert harness.azure.sent == []


async def test_an_answer_about_damaged_rows_keeps_no_notice_from_its_sinks(tmp_path: Path) -> None:
    async with running_gate(tmp_path, REDEPLOY) as harness:
        harness.azure.may_answer.clear()
        await harness.submit("approve", "alice", REDEPLOY)
        await eventually(lambda: len(harness.azure.sent) == 1)
        await harness.store.transact(partial(spoil, rows="kind = 'claim'"))
        may_go_on = threading.Event()
        answered = await harness.block_store(may_go_on)
        harness.azure.may_answer.set()
        await answered.wait()
        harness.azure.document = (REDEPLOY, build_event("E-9", event_type="Freeze"))
        poll = asyncio.create_task(harness.azure.poll())
        await asyncio.sleep(0)
        may_go_on.set()
        async with asyncio.timeout(60):
            await poll
        await eventually(lambda: not harness.gate.engine.in_flight)
        with contextlib.closing(open_for_reading(harness.path)) as reader:
            kinds = [kind for (kind,) in reader.execute("SELECT kind FROM journal")]
        assert {"startrequest.accepted", "event.scheduled"} <= set(kinds)


async def test_a_start_request_is_in_flight_while_its_answer_cannot_be_recorded(
    tmp_path: Path,
) -> None:
    """Otherwise the next one would be sent for what Azure has accepted."""
    async with running_gate(tmp_path, USER_REBOOT) as harness:
        harness.azure.may_answer.clear()
        await eventually(lambda: bool(harness.azure.sent))
        failures, submit = [StoreUnavailable("neither written nor read")] * 3, harness.store.submit

        def fail(work: Work[Any], *, fail_open: bool = False) -> asyncio.Future[Any]:
            if not (fail_open and failures):
                return submit(work, fail_open=fail_open)
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            future.set_exception(failures.pop())
            return future

        # Reads do not fail.
        harness.store.read = partial(submit, fail_open=True)  # type: ignore[method-assign,assignment]
        harness.store.submit = fail  # type: ignore[method-assign]
        harness.azure.may_answer.set()
        for _ in range(10):
            await harness.settle()
            harness.clock.advance(1)
        await harness.wait_for_events("startrequest.accepted")
        assert failures == []
        assert len(harness.azure.sent) == 1
