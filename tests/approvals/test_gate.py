"""The gate with a real store, a manual clock, and a stub in place of IMDS."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from relay.approvals.admission import SENT_BEFORE_NOTICE
from relay.approvals.request import DecisionAnswer
from relay.errors import SourceUnavailable, StoreUnavailable
from relay.store.approvals import NOTHING
from relay.store.sqlite import Store
from relay.store.transaction import Transaction
from tests.approvals.builders import (
    BY_ALICE,
    REDEPLOY,
    SETTINGS,
    USER_REBOOT,
    build_event,
    build_request,
    one_rule,
)
from tests.approvals.running_gate import TIMEOUT, running_gate, start_request_tasks
from tests.clocks import NOON, ManualClock
from tests.eventually import eventually
from tests.store.conftest import LimitedDisk

OTHER_REBOOT = build_event("E-2", event_source="User")
STARTED = build_event(event_source="User", event_status="Started", not_before=None)


# --- what is checked when events are recorded


async def test_what_follows_is_in_the_transaction_of_its_cause(tmp_path: Path) -> None:
    """Nothing else has to run: here the gate does not."""
    async with running_gate(tmp_path) as harness:
        harness.azure.may_read.clear()
        await harness.record_document(USER_REBOOT)
        assert harness.kinds()[-2:] == ["event.scheduled", "approval.granted"]
        await harness.record_document()
        assert harness.kinds()[-2:] == ["event.ended", "startrequest.failed"]


async def test_a_fault_in_what_follows_costs_no_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def grant_and_fail(tx: Transaction) -> None:
        harness.gate.engine.follow_up(tx, NOON)
        raise LookupError("a mistake of our own")

    async with running_gate(tmp_path, sinks=["box"]) as harness:
        await harness.settle()
        harness.store.follow_up = grant_and_fail
        both = (USER_REBOOT,), (USER_REBOOT, OTHER_REBOOT)
        await asyncio.gather(*(harness.record_document(*events) for events in both))
        assert harness.kinds() == ["event.scheduled", "event.scheduled"]
        # The grant that was rolled back is not remembered.
        assert await harness.store.read(lambda tx: tx.approvals.of_key("e-1")) == NOTHING
        assert await harness.store.read(lambda tx: len(tx.deliveries.waiting_entries("box"))) == 2
        assert "cannot record what follows from a change" in caplog.text


async def test_a_stream_of_changes_does_not_keep_a_hold_from_its_end(tmp_path: Path) -> None:
    """Only the events that change are checked, so the gate must also look at the time."""
    settings = one_rule(BY_ALICE, hold_expires="60s")
    async with running_gate(tmp_path, build_event(), settings=settings) as harness:
        await harness.submit("hold")
        await harness.settle()
        harness.clock.set_wall_clock(NOON + timedelta(seconds=60))
        for number in range(200):
            # Each change is on disk before the gate has looked at the one before.
            await harness.record_document(build_event(), build_event("E-2", due=600 + number))
        assert len(harness.events("approval.recorded")) == 2


async def test_an_event_is_granted_once_the_clock_is_back_before_not_before(tmp_path: Path) -> None:
    clock = ManualClock(NOON + timedelta(hours=1))
    async with running_gate(tmp_path, USER_REBOOT, clock=clock) as harness:
        await harness.settle()
        clock.set_wall_clock(NOON)
        await harness.record_document(USER_REBOOT, build_event("E-2"))
        await harness.wait_for_events("startrequest.accepted")
        assert harness.azure.sent == ["E-1"]


# --- from a grant to its StartRequest


async def test_a_grant_is_read_afresh_claimed_sent_and_reported(tmp_path: Path) -> None:
    """The claim is on disk before the StartRequest goes out. Then no task is left."""
    async with running_gate(tmp_path, USER_REBOOT) as harness:
        harness.azure.may_answer.clear()
        await eventually(lambda: bool(harness.azure.sent))
        assert harness.kinds() == ["event.scheduled", "approval.granted", "claim"]
        assert (harness.azure.reads, len(start_request_tasks())) == (1, 1)
        harness.azure.may_answer.set()
        (accepted,) = await harness.wait_for_events("startrequest.accepted")
        assert (harness.azure.sent, accepted.data["status"]) == (["E-1"], 200)
        assert start_request_tasks() == []


async def test_events_that_are_granted_together_are_sent_one_after_another(tmp_path: Path) -> None:
    ids = [f"E-{number}" for number in range(12)]
    events = [build_event(each, event_source="User") for each in ids]
    async with running_gate(tmp_path, *events) as harness:
        await harness.wait_for_events("startrequest.accepted", len(ids))
        assert harness.azure.sent == ids
        assert harness.azure.reads == len(ids)


@pytest.mark.parametrize("ids", ["one id", "no id", "ids of their own"])
async def test_200_copies_of_one_approval_are_one_start_request(tmp_path: Path, ids: str) -> None:
    async with running_gate(tmp_path, REDEPLOY) as harness:
        copies = [
            {"one id": "r", "no id": None, "ids of their own": f"r{number}"}[ids]
            for number in range(200)
        ]
        answers = await asyncio.gather(
            *(harness.submit(of=REDEPLOY, request_id=copy) for copy in copies)
        )
        assert {(answer.status, answer.body["state"]) for answer in answers} == {(202, "granted")}
        await harness.wait_for_events("startrequest.accepted")
        await harness.settle()
        assert harness.azure.sent == ["E-1"]
        assert len(harness.events("approval.granted")) == 1
        assert len(harness.events("approval.recorded")) == 1


# --- tell_first


@pytest.mark.parametrize("seconds", [0, 60, -3600], ids=["right", "ahead", "back"])
async def test_tell_first_is_of_the_monotonic_clock(tmp_path: Path, seconds: float) -> None:
    async with running_gate(tmp_path, USER_REBOOT, sinks=("bus", "hook")) as harness:
        await harness.wait_for_events("approval.granted")
        await harness.settle()
        harness.clock.set_wall_clock(NOON + timedelta(seconds=seconds))
        harness.clock.advance(4.9)
        await harness.settle()
        assert (harness.azure.reads, harness.azure.sent) == (0, [])
        harness.clock.advance(0.1)
        await harness.wait_for_events("startrequest.accepted")


async def test_an_event_of_other_machines_does_not_wait_for_notices(tmp_path: Path) -> None:
    async with running_gate(tmp_path, USER_REBOOT, sinks=("bus",), names_us=False) as harness:
        await harness.wait_for_events("startrequest.accepted")


async def test_a_grant_that_waits_delays_no_other(tmp_path: Path) -> None:
    """Only the notices about an event delay that event."""
    async with running_gate(tmp_path, sinks=("bus",)) as harness:
        await harness.record_document(USER_REBOOT)
        await harness.wait_for_events("approval.granted")
        harness.clock.advance(4.9)
        await harness.record_document(USER_REBOOT, OTHER_REBOOT)
        await harness.wait_for_events("approval.granted", 2)
        harness.clock.advance(0.1)
        await harness.wait_for_events("startrequest.accepted")
        assert harness.azure.sent == ["E-1"]


async def test_notices_from_the_fresh_read_come_first_too(tmp_path: Path) -> None:
    async with running_gate(tmp_path, USER_REBOOT, sinks=("bus",)) as harness:
        await harness.wait_for_events("approval.granted")
        harness.azure.document = (build_event(event_source="User", description="other words"),)
        await harness.deliver_everything()
        harness.clock.advance(0.05)
        await harness.wait_for_events("event.updated")
        await harness.settle()
        assert harness.azure.sent == []
        await harness.deliver_everything()
        harness.clock.advance(0.05)
        await harness.wait_for_events("startrequest.accepted")


# --- between the fresh read and the claim


async def test_a_grant_fails_if_not_before_passes_while_its_claim_waits(tmp_path: Path) -> None:
    """The time of the claim counts, not the time at which the gate asked for it."""
    async with running_gate(tmp_path, REDEPLOY) as harness:
        disk = threading.Event()
        harness.azure.after_read = lambda: harness.store.submit(lambda _: disk.wait(10))
        await harness.submit(of=REDEPLOY)
        await eventually(lambda: harness.gate.engine.in_flight != set())
        harness.clock.advance(900)
        disk.set()
        await harness.wait_for_events("startrequest.failed")
        assert harness.azure.sent == []


# --- in flight


async def test_a_stop_waits_until_the_answer_is_on_disk(tmp_path: Path) -> None:
    """Otherwise the relay could end before anybody is told of it."""
    before, recorded, after = threading.Event(), threading.Event(), threading.Event()

    def hold_up_commit(_: object) -> None:
        recorded.set()
        after.wait(30)

    async with running_gate(tmp_path, USER_REBOOT) as harness:
        harness.azure.may_answer.clear()
        await eventually(lambda: bool(harness.azure.sent))
        stop = asyncio.create_task(harness.gate.stop_start_requests(1000))
        answered = await harness.block_store(before)
        harness.azure.may_answer.set()
        await answered.wait()
        harness.store.submit(hold_up_commit)  # in the same transaction
        before.set()
        await eventually(recorded.is_set)
        for _ in range(10):  # turns of the loop for who would stop now
            harness.clock.advance(1)
            await asyncio.sleep(0)
        is_stopped = stop.done()
        after.set()
        assert not is_stopped
        await harness.clock.advance_until(stop.done)
        assert harness.kinds()[-1] == "startrequest.accepted"


async def test_wait_until_idle_waits_for_the_answer_or_its_timeout(tmp_path: Path) -> None:
    async with running_gate(tmp_path, USER_REBOOT) as harness:
        harness.azure.may_answer.clear()
        await eventually(lambda: bool(harness.azure.sent))
        short_wait = asyncio.create_task(harness.gate.stop_start_requests(2))
        long_wait = asyncio.create_task(harness.gate.stop_start_requests(1000))
        await eventually(lambda: sum(each <= 0.05 for each in harness.clock.remaining_sleeps) == 2)
        harness.clock.advance(2)
        await short_wait
        assert not long_wait.done()
        harness.azure.may_answer.set()
        await harness.wait_for_events("startrequest.accepted")
        await harness.settle()
        harness.clock.advance(0.05)
        await long_wait


# --- answers other than 200


async def test_a_change_of_the_event_during_a_pause_is_reported_at_once(tmp_path: Path) -> None:
    slow = SourceUnavailable("expected 200, got 429", status=429, retry_after=60)
    async with running_gate(tmp_path, USER_REBOOT, answers=[slow]) as harness:
        await harness.wait_for_start_requests(1)
        await harness.record_document(STARTED)
        (failed,) = await harness.wait_for_events("startrequest.failed")
        assert (failed.data["status"], failed.data["attempts"]) == (429, 1)
        assert "not known" in failed.data["reason"]
        harness.clock.advance(60)
        await harness.settle()
        assert harness.azure.sent == ["E-1"]


# --- a hold between two attempts


async def test_a_hold_between_two_attempts_stops_the_next_until_its_release(tmp_path: Path) -> None:
    async with running_gate(tmp_path, USER_REBOOT, answers=[TIMEOUT]) as harness:
        await harness.wait_for_start_requests(1)
        held = await harness.submit("hold", "eve", USER_REBOOT)
        assert (held.status, held.body["state"]) == (202, "held")
        assert held.body["notice"] == SENT_BEFORE_NOTICE
        (recorded,) = harness.events("approval.recorded")
        assert recorded.data["notice"] == SENT_BEFORE_NOTICE
        for _ in range(3):
            harness.clock.advance(20)
            await harness.settle()
        assert (harness.azure.reads, harness.azure.sent) == (1, ["E-1"])
        released = await harness.submit("release", "eve", USER_REBOOT)
        assert released.body["state"] == "granted"
        assert "notice" not in released.body
        (accepted,) = await harness.wait_for_events("startrequest.accepted")
        assert accepted.data["attempts"] == 2
        assert len(harness.events("approval.granted")) == 1


@pytest.mark.parametrize("hold_first", [True, False], ids=["hold first", "claim first"])
async def test_the_first_of_a_hold_and_a_retry_wins(tmp_path: Path, hold_first: bool) -> None:
    """Both wait for the disk at once; the order of the transactions decides, not of the calls."""
    async with running_gate(tmp_path, USER_REBOOT, answers=[TIMEOUT]) as harness:
        await harness.wait_for_start_requests(1)
        disk = threading.Event()
        holds: list[asyncio.Future[DecisionAnswer]] = []

        def hold() -> None:
            request = build_request("hold", "eve", USER_REBOOT, at=harness.clock.now())
            holds.append(harness.store.submit(lambda tx: harness.gate.engine.decide(tx, request)))

        def after_read() -> None:
            harness.store.submit(lambda _: disk.wait(10))
            if hold_first:
                hold()

        harness.azure.after_read = after_read
        harness.azure.may_answer.clear()
        harness.clock.advance(1)
        await eventually(lambda: harness.gate.engine.in_flight != set())
        if not hold_first:
            hold()
        disk.set()
        assert (await holds[0]).status == (202 if hold_first else 409)
        harness.azure.may_answer.set()
        await harness.settle()
        assert len(harness.azure.sent) == (1 if hold_first else 2)


# --- time and the wall clock


async def test_a_grant_goes_when_its_last_hold_expires(tmp_path: Path) -> None:
    """The vote for another event expires later."""
    settings = SETTINGS.model_copy(update={"hold_expires": 50.0})
    other = build_event("E-2")
    async with running_gate(tmp_path, REDEPLOY, other, settings=settings) as harness:
        await harness.submit(of=other)
        await harness.submit("hold", "eve", REDEPLOY)
        await harness.submit(of=REDEPLOY)
        await harness.settle()
        harness.clock.advance(49.9)
        await harness.settle()
        assert harness.azure.sent == []
        harness.clock.advance(0.1)
        await harness.wait_for_events("startrequest.accepted")
        recorded = [event.data["decision"] for event in harness.events("approval.recorded")]
        assert recorded == ["approve", "hold", "approve", "release"]


async def test_a_change_of_the_wall_clock_is_noticed_within_a_minute(tmp_path: Path) -> None:
    async with running_gate(tmp_path, build_event()) as harness:
        await harness.submit()
        await harness.settle()
        harness.clock.set_wall_clock(NOON + timedelta(minutes=6))
        harness.clock.advance(60)
        (voided,) = await harness.wait_for_events("approval.voided")
        assert voided.data["why"] == "expired"


# --- kills


async def test_a_claim_is_repeated_after_a_kill_while_nothing_has_changed(tmp_path: Path) -> None:
    async with running_gate(tmp_path, REDEPLOY) as harness:
        harness.azure.may_answer.clear()
        await harness.submit(of=REDEPLOY)
        await eventually(lambda: bool(harness.azure.sent))
    async with running_gate(tmp_path, REDEPLOY) as harness:
        (accepted,) = await harness.wait_for_events("startrequest.accepted")
        assert (harness.azure.sent, accepted.data["attempts"]) == (["E-1"], 2)
        assert len(harness.events("approval.granted")) == 1


async def test_a_grant_is_given_up_with_an_answer_that_comes_after_the_end(tmp_path: Path) -> None:
    """It is in flight until then, and nothing else looks at it again."""
    async with running_gate(tmp_path, USER_REBOOT, answers=[TIMEOUT]) as harness:
        harness.azure.may_answer.clear()
        await eventually(lambda: bool(harness.azure.sent))
        await harness.record_document()
        await harness.settle()
        assert harness.kinds()[-2:] == ["claim", "event.ended"]
        harness.azure.may_answer.set()
        await harness.settle()
        assert harness.kinds()[-2:] == ["answer", "startrequest.failed"]


# --- a disk that cannot be written


def _set_writable(store: Store, is_writable: bool) -> None:
    connection = store._state_file.connection  # noqa: SLF001  # as a disk that is mounted read-only after an error
    connection.execute(f"PRAGMA query_only = {'OFF' if is_writable else 'ON'}")


async def test_a_decision_that_cannot_be_written_is_503_and_not_taken(tmp_path: Path) -> None:
    async with running_gate(tmp_path, REDEPLOY) as harness:
        _set_writable(harness.store, False)
        assert await harness.submit(of=REDEPLOY, request_id="r") == DecisionAnswer(
            503,
            {"detail": "the decision cannot be recorded now; nothing was decided, try again"},
            is_transient=True,
        )
        with pytest.raises(StoreUnavailable):
            await harness.gate.set_approval_mode("off", "local:root")
        _set_writable(harness.store, True)
        await eventually(lambda: harness.store.write_error is None)
        assert await harness.store.read(harness.gate.engine.effective_approval_mode) == "on"
        assert not harness.events("approval.recorded")
        assert (await harness.submit(of=REDEPLOY, request_id="r")).status == 202


async def test_nothing_is_sent_while_the_claim_cannot_be_written(tmp_path: Path) -> None:
    async with running_gate(tmp_path, REDEPLOY) as harness:
        harness.azure.may_read.clear()
        await harness.submit(of=REDEPLOY)
        await eventually(lambda: harness.azure.reads == 1)
        _set_writable(harness.store, False)
        harness.azure.may_read.set()
        for reads in (2, 3):
            await harness.clock.advance_until(lambda reads=reads: harness.azure.reads >= reads)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        assert harness.azure.sent == []
        _set_writable(harness.store, True)
        await harness.clock.advance_until(lambda: bool(harness.azure.sent))
        await harness.wait_for_events("startrequest.accepted")


async def test_an_answer_that_is_not_written_is_told_from_memory_and_final(tmp_path: Path) -> None:
    async with running_gate(tmp_path, USER_REBOOT) as harness:
        event_names: list[str] = []
        harness.store.listeners.recorded.append(
            lambda recorded: event_names.extend(item.name for item in recorded)
        )
        harness.azure.may_answer.clear()
        await eventually(lambda: bool(harness.azure.sent))
        _set_writable(harness.store, False)
        harness.azure.may_answer.set()
        await eventually(lambda: "startrequest.accepted" in event_names)
        _set_writable(harness.store, True)
        await eventually(lambda: harness.store.write_error is None)
        harness.clock.advance(10)
        await harness.settle()
        assert len(harness.events("startrequest.accepted")) == 1
        assert harness.azure.sent == ["E-1"]
        assert event_names.count("startrequest.accepted") == 1


async def test_an_event_that_came_while_the_disk_was_full_is_granted_later(tmp_path: Path) -> None:
    async with running_gate(tmp_path) as harness:
        await harness.settle()
        disk = LimitedDisk(tmp_path)
        disk.fill()
        try:
            await harness.record_document(USER_REBOOT)
            await harness.settle()
            recorded = await harness.store.read(lambda tx: tx.journal.events_after(0, 9))
            assert [event.name for _, event in recorded] == ["event.scheduled"]
        finally:
            disk.free()
        await eventually(lambda: harness.store.write_error is None)
        await harness.clock.advance_until(lambda: bool(harness.azure.sent))
        assert harness.azure.sent == ["E-1"]


async def test_a_grant_that_ended_while_the_disk_was_full_is_told_later(tmp_path: Path) -> None:
    """The file fails before anybody has read the grant, which was made for a free slot."""
    settings = one_rule("automatic", limits=[{"name": "databases", "max": 1}])
    async with running_gate(tmp_path, settings=settings) as harness:
        await harness.settle()
        polls: list[asyncio.Task[None]] = []

        def end(_: object) -> None:
            if not polls:
                _set_writable(harness.store, False)
                harness.azure.document = ()
                polls.append(asyncio.create_task(harness.azure.poll()))

        harness.store.listeners.recorded.insert(0, end)
        await harness.record_document(USER_REBOOT)
        await polls[0]
        assert harness.store.write_error is not None
        _set_writable(harness.store, True)
        (failed,) = await harness.wait_for_events("startrequest.failed")
        assert failed.data["reason"].startswith("the event ended")
