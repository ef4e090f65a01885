"""The gate beside what shares a commit with it: pruning, and rows that were damaged meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from functools import partial
from pathlib import Path

import pytest

from relay.store import StoreSettings
from relay.store.file import open_for_reading
from relay.store.retention import prune_all_tables
from relay.store.transaction import Transaction
from tests.approvals.builders import REDEPLOY, USER_REBOOT, build_event, one_rule
from tests.approvals.running_gate import GateHarness, running_gate
from tests.eventually import eventually


def prune(harness: GateHarness) -> asyncio.Future[object]:
    return harness.store.submit(
        lambda tx: prune_all_tables(tx, StoreSettings(), harness.clock.now())
    )


def spoil(tx: Transaction, rows: str) -> None:
    """Change rows of the journal as another program does, and read everything again."""
    tx._connection.execute("DROP TRIGGER journal_is_append_only")  # noqa: SLF001
    tx._connection.execute(f"UPDATE journal SET body = CAST('x' AS BLOB) WHERE {rows}")  # noqa: S608, SLF001
    tx.standing_holds.verify()
    tx.approvals._memory.folded.clear()  # noqa: SLF001
    tx.approvals.look_again()


async def test_a_hold_whose_row_is_removed_while_the_relay_runs_still_holds(
    tmp_path: Path,
) -> None:
    """The relay remembers what it committed: the rows that are left are a chain without it."""
    async with running_gate(tmp_path) as harness:
        assert (await harness.hold_ahead(match={"resources": ["nobody"]})).accepted
        await harness.record_document(USER_REBOOT)
        harness.azure.may_read.clear()
        await harness.wait_for_events("approval.granted")
        assert (await harness.submit("hold", "alice", USER_REBOOT)).accepted
        await harness.settle()
        with contextlib.closing(sqlite3.connect(harness.path)) as file:
            file.execute("DROP TRIGGER journal_is_pruned_behind_a_checkpoint")
            file.execute(
                "DELETE FROM journal WHERE position >= "
                "(SELECT max(position) FROM journal WHERE kind = 'approval.recorded')"
            )
            file.commit()
        harness.azure.may_read.set()
        for _ in range(5):
            await harness.settle()
            harness.clock.advance(1)
        assert harness.azure.sent == []


async def test_work_that_shares_a_commit_with_pruning_knows_what_was_accepted(
    tmp_path: Path,
) -> None:
    async with running_gate(tmp_path, USER_REBOOT) as harness:
        await harness.wait_for_events("startrequest.accepted")
        may_go_on = threading.Event()
        harness.store.submit(lambda _: may_go_on.wait(30))
        await eventually(lambda: harness.store._jobs.qsize() == 0)  # noqa: SLF001
        harness.store.submit(lambda tx: tx.approvals.open_grants())
        prune(harness)
        vote = asyncio.create_task(harness.submit("approve", "alice", USER_REBOOT))
        await asyncio.sleep(0)
        may_go_on.set()
        await vote
        for _ in range(5):
            await harness.settle()
            harness.clock.advance(1)
        assert len(harness.azure.sent) == 1
        assert harness.kinds().count("approval.granted") == 1


async def test_a_start_request_is_in_flight_until_its_answer_though_an_error_repeats_a_commit(
    tmp_path: Path,
) -> None:
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


async def test_a_claim_that_shares_a_commit_with_pruning_obeys_a_standing_hold(
    tmp_path: Path,
) -> None:
    async with running_gate(tmp_path, REDEPLOY) as harness:
        harness.azure.may_read.clear()
        may_go_on = threading.Event()

        def prune_with_claim() -> None:
            harness.azure.after_read = lambda: None
            harness.store.submit(lambda _: may_go_on.wait(30))
            prune(harness)
            asyncio.get_running_loop().call_later(0.05, may_go_on.set)

        harness.azure.after_read = prune_with_claim
        assert (await harness.submit("approve", "alice", REDEPLOY)).accepted
        await eventually(lambda: harness.azure.reads == 1)
        await harness.hold_ahead()
        harness.azure.may_read.set()
        await eventually(may_go_on.is_set)
        await harness.settle()
        assert harness.azure.sent == []
        assert "claim" not in harness.kinds()


async def test_damage_of_standing_holds_ends_the_reads_before_a_start_request(
    tmp_path: Path,
) -> None:
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


async def test_an_answer_about_damaged_rows_keeps_no_notice_from_its_sinks(
    tmp_path: Path,
) -> None:
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
