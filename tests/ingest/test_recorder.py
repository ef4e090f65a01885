"""The recorder turns documents into journal rows on a real file.

The tests check which events it records, their ids, and the outcome of an event that ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relay.events.model import Document, ScheduledEvent
from relay.ingest import CHANGES_PER_STEP, Recorder, SuccessfulPoll
from relay.store import GrantState
from relay.store.transaction import Transaction
from tests.approvals.builders import BOOT_ID, ORIGIN, REBOOT, STARTED, ApprovalFile, build_event
from tests.builders import cloudevent
from tests.clocks import NOON


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[ApprovalFile]:
    file = ApprovalFile(tmp_path / "relay.db")
    yield file
    file.events()
    file.close()


def record(
    relay: ApprovalFile, *events: ScheduledEvent, gap: bool = False, incarnation: int = 7
) -> int:
    poll = SuccessfulPoll(Document(incarnation, events), relay.clock.now(), gap)
    return relay.transact(lambda tx: relay.recorder.record(tx, poll))


def names(relay: ApprovalFile) -> list[str]:
    return [event.name for event in relay.events()]


# --- the recorded events


def test_a_change_is_told_and_the_snapshot_moves_on_together(relay: ApprovalFile) -> None:
    assert record(relay, REBOOT) == 1
    (event,) = relay.events()
    assert (event.name, event.data["documentIncarnation"]) == ("event.scheduled", 7)
    assert event.data["revision"] == REBOOT.revision
    occurrence = relay.status().occurrence
    assert (occurrence.event, occurrence.last_event_id) == (REBOOT, event.id)
    assert occurrence.boot_id == BOOT_ID
    assert occurrence.first_seen == "2026-04-11T12:00:00.000000Z"


def test_a_life_is_told_in_its_order_over_restarts(relay: ApprovalFile) -> None:
    for events in ((REBOOT,), (build_event(due=1000),), (STARTED,), ()):
        record(relay, *events)
        relay.crash()
    life = ["event.scheduled", "event.updated", "event.started", "event.ended"]
    assert names(relay) == life
    (updated,) = relay.events("event.updated")
    assert updated.data["changed"] == {"notBefore": REBOOT.not_before}
    assert not relay.status().occurrence.live


def test_an_ended_event_is_told_as_it_was_last_seen(relay: ApprovalFile) -> None:
    record(relay, REBOOT)
    record(relay, STARTED)
    last = relay.events()[-1].data
    record(relay, incarnation=8)
    (ended,) = relay.events("event.ended")
    told = {name: value for name, value in ended.data.items() if name in last}
    assert told == {name: value for name, value in last.items() if name != "changed"}


def test_an_event_id_that_comes_again_is_an_occurrence_with_own_ids(relay: ApprovalFile) -> None:
    for _ in range(3):
        record(relay, REBOOT)
        record(relay)
    assert names(relay) == ["event.scheduled", "event.ended"] * 3
    assert len({event.id for event in relay.events()}) == 6
    assert relay.status().occurrence.number == 3


def test_a_transition_again_has_its_own_id_the_same_on_every_relay(tmp_path: Path) -> None:
    ids_by_relay = []
    for name in ("a", "b"):
        relay = ApprovalFile(tmp_path / name)
        for _ in range(2):
            record(relay, REBOOT)
            record(relay, build_event(resources=("db-2",)))
        ids_by_relay.append([event.id for event in relay.events()])
        relay.close()
    assert ids_by_relay[0] == ids_by_relay[1]
    assert len(set(ids_by_relay[0])) == 4


def test_a_document_that_cannot_be_recorded_whole_changes_nothing(relay: ApprovalFile) -> None:
    record(relay, REBOOT)

    def work(tx: Transaction) -> None:
        relay.recorder.record(tx, SuccessfulPoll(Document(8, ()), relay.clock.now(), gap=False))
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        relay.transact(work)
    assert names(relay) == ["event.scheduled"]
    assert relay.status().occurrence.live


# --- the effect of the relay's own StartRequest


def add_grant(
    relay: ApprovalFile, state: GrantState, *, attempts: int = 1, status: int | None = None
) -> None:
    """Add a grant for the event and bring it to a state."""

    def work(tx: Transaction) -> None:
        occurrence = tx.occurrences.find_newest_occurrence("e-1")
        assert occurrence is not None
        details = {"approvalId": "a", "rule": "r"}
        tx.record(cloudevent("approval.granted", "E-1", {**occurrence.data, **details}), NOON)
        granted = tx.recorded[-1].position
        for number in range(attempts):
            note = {"granted": granted, "attempt": number + 1}
            tx.journal.append_non_event_row(NOON, "claim", note, event_key="e-1")
        answer = {"granted": granted, "state": state, "status": status}
        tx.journal.append_non_event_row(NOON, "answer", answer, event_key="e-1")

    relay.transact(work)


@pytest.mark.parametrize(
    ("approved", "state", "status"),
    [
        pytest.param(True, "accepted", 200, id="accepted"),
        pytest.param(False, "sent", None, id="sent without a response"),
        pytest.param(False, "failed", 400, id="failed"),
        pytest.param(False, "granted", None, id="not sent"),
    ],
)
def test_approved_by_relay_means_a_start_request_that_was_accepted(
    relay: ApprovalFile, approved: bool, state: GrantState, status: int | None
) -> None:
    record(relay, REBOOT)
    add_grant(relay, state, status=status)
    record(relay, STARTED)
    record(relay)
    told = relay.events("event.started", "event.ended")
    assert [event.data["approvedByRelay"] for event in told] == [approved] * 2


def test_what_was_approved_in_an_earlier_occurrence_is_not_in_this(relay: ApprovalFile) -> None:
    record(relay, REBOOT)
    add_grant(relay, "accepted", status=200)
    record(relay)
    record(relay, REBOOT)
    record(relay)
    first, second = (event.data for event in relay.events("event.ended"))
    assert (first["approvedByRelay"], first["outcome"]) == (True, "unknown")
    assert (second["approvedByRelay"], second["outcome"]) == (False, "canceled")


# --- the outcome


def outcome_after_end(relay: ApprovalFile, *, gap: bool = False) -> tuple[str, str]:
    """Record an empty document. Return the outcome and the evidence of the event."""
    record(relay, gap=gap)
    ended = relay.events("event.ended")[-1]
    assert ended.attributes["outcome"] == ended.data["outcome"]
    assert relay.status().occurrence.outcome == ended.data["outcome"]
    return ended.data["outcome"], ended.data["evidence"]


CANCELED, UNKNOWN = ("canceled", "observed"), ("unknown", "none")
REBOOTED = ("completed", "rebooted")


@pytest.mark.parametrize(
    ("outcome", "grant"),
    [
        pytest.param(UNKNOWN, {"state": "sent"}, id="sent without a response"),
        pytest.param(UNKNOWN, {"state": "sent", "status": 503}, id="sent, 503"),
        pytest.param(UNKNOWN, {"state": "accepted", "status": 200}, id="accepted"),
        pytest.param(UNKNOWN, {"state": "failed"}, id="failed without a response"),
        pytest.param(CANCELED, {"state": "failed", "status": 400}, id="failed, 400"),
        pytest.param(CANCELED, {"state": "sent", "status": 400}, id="sent, 400"),
        pytest.param(UNKNOWN, {"state": "failed", "status": 400, "attempts": 2}, id="second, 400"),
        pytest.param(CANCELED, {"state": "failed", "attempts": 0}, id="failed before any try"),
        pytest.param(CANCELED, {"state": "granted", "attempts": 0}, id="not sent"),
    ],
)
def test_a_cancellation_is_told_only_where_no_start_request_can_have_been_taken(
    relay: ApprovalFile, outcome: tuple[str, str], grant: dict[str, Any]
) -> None:
    """Only the last response is known. Azure may have taken an earlier try."""
    record(relay, REBOOT)
    add_grant(relay, **grant)
    assert outcome_after_end(relay) == outcome


def boot(
    relay: ApprovalFile, boot_id: str | None, known: frozenset[str] | None = frozenset({"db-1"})
) -> None:
    relay.crash()
    relay.recorder = Recorder(ORIGIN, boot_id, known)


@pytest.mark.parametrize(
    ("outcome", "event", "sent_first", "elapsed", "boot_changes"),
    [
        pytest.param(REBOOTED, REBOOT, True, 60, {}, id="reboot, sent"),
        pytest.param(REBOOTED, REBOOT, False, 900, {}, id="reboot, at NotBefore"),
        pytest.param(REBOOTED, build_event(event_type="redeploy"), False, 900, {}, id="redeploy"),
        pytest.param(UNKNOWN, REBOOT, False, 899, {}, id="reboot, just before NotBefore"),
        pytest.param(UNKNOWN, build_event(event_type="Freeze"), True, 900, {}, id="freeze"),
        pytest.param(UNKNOWN, build_event(event_type=None), True, 900, {}, id="no event type"),
        pytest.param(UNKNOWN, build_event(resources=("db-2",)), True, 900, {}, id="another VM"),
        pytest.param(REBOOTED, build_event(resources=("x", "DB-1")), True, 900, {}, id="two VMs"),
        pytest.param(UNKNOWN, REBOOT, True, 900, {"known": None}, id="unknown machine name"),
        pytest.param(UNKNOWN, REBOOT, True, 900, {"boot_id": None}, id="unknown boot ID"),
        pytest.param(UNKNOWN, REBOOT, True, 900, {"boot_id": BOOT_ID}, id="same boot ID"),
    ],
)
def test_an_event_that_is_gone_after_the_boot_it_announced_is_completed(
    relay: ApprovalFile,
    outcome: tuple[str, str],
    event: ScheduledEvent,
    sent_first: bool,
    elapsed: float,
    boot_changes: dict[str, Any],
) -> None:
    record(relay, event)
    if sent_first:
        add_grant(relay, "sent")
    relay.clock.advance(elapsed)
    boot(relay, **{"boot_id": "boot-2"} | boot_changes)
    assert outcome_after_end(relay, gap=True) == outcome


@pytest.mark.parametrize("approved", [True, False])
def test_a_boot_during_the_event_proves_its_end(relay: ApprovalFile, approved: bool) -> None:
    record(relay, REBOOT)
    if approved:
        add_grant(relay, "sent")
    relay.clock.advance(60 if approved else 901)
    boot(relay, "boot-2")
    record(relay, REBOOT, gap=True)
    assert outcome_after_end(relay) == REBOOTED


# --- what a recorder remembers of the snapshot


def test_a_large_document_is_recorded_in_its_order(relay: ApprovalFile) -> None:
    events = [build_event(f"E-{number}") for number in range(2 * CHANGES_PER_STEP + 1)]
    record(relay, *events)

    def live() -> list[ScheduledEvent]:
        occurrences = relay.transact(lambda tx: tx.occurrences.live_occurrences())
        return [occurrence.event for occurrence in occurrences]

    assert [event.subject for event in relay.events()] == [each.event_id for each in events]
    assert live() == events
    started = [replace(event, event_status="Started") for event in events[::2]]
    assert record(relay, *started) == len(events)
    assert [(event.name, event.subject) for event in relay.events()[len(events) :]] == [
        *(("event.started", event.event_id) for event in started),
        *(("event.ended", event.event_id) for event in events[1::2]),
    ]
    assert live() == started


def test_a_boot_that_was_not_the_event_s_doing_proves_nothing_later(relay: ApprovalFile) -> None:
    record(relay, REBOOT)
    relay.clock.advance(60)
    boot(relay, "boot-2")
    record(relay, REBOOT, gap=True)
    relay.clock.advance(900)
    assert outcome_after_end(relay) == UNKNOWN
