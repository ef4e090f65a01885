"""The gate beside what shares a commit with it: pruning, and rows that were damaged meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from relay.approvals import ClaimedGrant
from relay.errors import StoreUnavailable
from relay.store import StoreSettings
from relay.store.file import open_for_reading
from relay.store.retention import prune_all_tables
from relay.store.sqlite import Work
from relay.store.transaction import Transaction
from tests.approvals.builders import (
    REDEPLOY,
    USER_REBOOT,
    ApprovalFile,
    build_event,
    build_request,
    one_rule,
    open_grants,
)
from tests.approvals.running_gate import running_gate
from tests.clocks import NOON
from tests.eventually import eventually


def spoil(tx: Transaction, rows: str) -> None:
    """Change rows of the journal as another program does, and read everything again."""
    tx._connection.execute("DROP TRIGGER journal_is_append_only")  # noqa: SLF001
    tx._connection.execute(f"UPDATE journal SET body = CAST('x' AS BLOB) WHERE {rows}")  # noqa: S608, SLF001
    tx.standing_holds.verify()
    tx.memory.folded.clear()


def prune(tx: Transaction) -> int:
    """Forget all that is over, and return how many rows of the journal went."""
    settings = StoreSettings(retain=0.0, audit_retain=0.0)
    return prune_all_tables(tx, settings, NOON + timedelta(seconds=60))[0]


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
