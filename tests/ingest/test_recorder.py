"""The recorder turns documents into journal rows on a real file.

The tests check which events it records, their ids, and the outcome of an event that ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from relay.events.model import Document, Event
from relay.events.timestamps import format_rfc3339
from relay.ingest.recorder import PollResult, Recorder
from relay.outbox import GrantState
from relay.outbox.transaction import Transaction
from tests.approvals.builders import BOOT_ID, ORIGIN, ApprovalFile, build_event
from tests.approvals.manual_clock import NOON

REBOOT = build_event()
STARTED = build_event(event_status="Started", not_before=None)


@pytest.fixture
def book(tmp_path: Path) -> Iterator[ApprovalFile]:
    """A state file."""
    made = ApprovalFile(tmp_path / "relay.db")
    yield made
    made.events()
    made.close()


def record(book: ApprovalFile, *events: Event, gap: bool = False, incarnation: int = 7) -> int:
    """One poll; how many changes it told."""
    return book.transact(
        lambda tx: book.recorder.record(
            tx, PollResult(Document(incarnation, events), book.clock.now(), gap)
        )
    )


def names(book: ApprovalFile) -> list[str]:
    """What was said, by name."""
    return [one.name for one in book.events()]


# --- what is told


def test_a_change_is_told_and_the_snapshot_moves_on_together(book: ApprovalFile) -> None:
    assert record(book, REBOOT) == 1
    (said,) = book.events()
    assert (said.name, said.data["documentIncarnation"], said.data["revision"]) == (
        "event.scheduled",
        7,
        REBOOT.revision,
    )
    stands = book.status().occurrence
    assert (stands.event, stands.last_event_id, stands.boot_id, stands.first_seen) == (
        REBOOT,
        said.id,
        BOOT_ID,
        "2026-04-11T12:00:00.000000Z",
    )


def test_the_same_document_tells_nothing(book: ApprovalFile) -> None:
    record(book, REBOOT)
    assert record(book, REBOOT) == 0
    assert len(book.events()) == 1


def test_a_life_is_told_in_its_order_over_restarts(book: ApprovalFile) -> None:
    for events in ((REBOOT,), (build_event(due=1000),), (STARTED,), ()):
        record(book, *events)
        book.crash()
    assert names(book) == ["event.scheduled", "event.updated", "event.started", "event.ended"]
    assert book.events("event.updated")[0].data["changed"] == {"notBefore": REBOOT.not_before}
    assert not book.status().occurrence.live


def test_an_ended_event_is_told_as_it_was_last_seen(book: ApprovalFile) -> None:
    record(book, REBOOT)
    record(book, STARTED)
    last = book.events()[-1].data
    record(book, incarnation=8)
    ended = book.events("event.ended")[0].data
    assert {
        key: ended[key]
        for key in ("eventStatus", "resources", "notBefore", "revision", "documentIncarnation")
    } == {
        key: last[key]
        for key in ("eventStatus", "resources", "notBefore", "revision", "documentIncarnation")
    }
    assert "changed" not in ended


def test_after_it_ended_the_same_event_id_is_a_new_occurrence_with_ids_of_its_own(
    book: ApprovalFile,
) -> None:
    for _ in range(3):
        record(book, REBOOT)
        record(book)
    assert names(book) == ["event.scheduled", "event.ended"] * 3
    assert len({one.id for one in book.events()}) == 6
    assert book.status().occurrence.number == 3


def test_a_transition_that_comes_again_has_an_id_of_its_own_and_the_same_on_another_relay(
    tmp_path: Path,
) -> None:
    said = []
    for relay in ("a", "b"):
        book = ApprovalFile(tmp_path / relay)
        for _ in range(2):
            record(book, REBOOT)
            record(book, build_event(resources=("db-2",)))
        said.append([one.id for one in book.events()])
        book.close()
    assert said[0] == said[1]
    assert len(set(said[0])) == 4


def test_a_document_that_cannot_be_recorded_whole_changes_nothing(book: ApprovalFile) -> None:
    record(book, REBOOT)

    def work(tx: Transaction) -> None:
        book.recorder.record(tx, PollResult(Document(8, ()), book.clock.now(), gap=False))
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        book.transact(work)
    assert names(book) == ["event.scheduled"]
    assert book.status().occurrence.live


# --- what our own StartRequest had to do with it


def sent(
    book: ApprovalFile,
    state: GrantState,
    *,
    attempts: int = 1,
    status: int | None = None,
    dry_run: bool = False,
) -> None:
    """A grant for the event, and how far it came."""

    def work(tx: Transaction) -> None:
        found = tx.snapshot.find("e-1")
        assert found is not None
        tx.decisions.add_grant(found.id, found.revision, "r", "a", NOON, dry_run=dry_run, cause="c")
        grant = tx.decisions.grants(found.id)[-1].id
        for _ in range(attempts):
            tx.decisions.claim_grant(grant)
        tx.decisions.record_answer(grant, state, status)

    book.transact(work)


@pytest.mark.parametrize(
    ("approved", "state", "status"),
    [
        (True, "accepted", 200),
        (False, "sent", None),
        (False, "failed", 400),
        (False, "granted", None),
    ],
)
def test_approved_by_relay_means_a_start_request_that_was_accepted(
    book: ApprovalFile, approved: bool, state: GrantState, status: int | None
) -> None:
    record(book, REBOOT)
    sent(book, state, status=status)
    record(book, STARTED)
    record(book)
    assert [one.data["approvedByRelay"] for one in book.events("event.started", "event.ended")] == [
        approved
    ] * 2


def test_what_was_approved_in_an_earlier_occurrence_was_not_approved_in_this(
    book: ApprovalFile,
) -> None:
    record(book, REBOOT)
    sent(book, "accepted", status=200)
    record(book)
    record(book, REBOOT)
    record(book)
    assert [one.data["approvedByRelay"] for one in book.events("event.ended")] == [True, False]
    assert [one.data["outcome"] for one in book.events("event.ended")] == ["unknown", "canceled"]


# --- how it ended


def ended(book: ApprovalFile, *, gap: bool = False) -> tuple[str, str]:
    """It leaves the document; outcome and evidence."""
    record(book, gap=gap)
    said = book.events("event.ended")[-1]
    assert said.attributes["outcome"] == said.data["outcome"]
    assert book.status().occurrence.outcome == said.data["outcome"]
    return said.data["outcome"], said.data["evidence"]


COMPLETED, CANCELED, UNKNOWN = (
    ("completed", "observed"),
    ("canceled", "observed"),
    ("unknown", "none"),
)
REBOOTED = ("completed", "rebooted")


@pytest.mark.parametrize(
    ("outcome", "of", "now", "gap"),
    [
        (COMPLETED, STARTED, 0, False),
        (COMPLETED, STARTED, 0, True),
        (CANCELED, REBOOT, 0, False),
        (CANCELED, REBOOT, 899.9, False),
        (UNKNOWN, REBOOT, 900, False),
        (UNKNOWN, REBOOT, 0, True),
        (UNKNOWN, build_event(due=None), 0, False),
        (UNKNOWN, build_event(not_before="soon"), 0, False),
        (UNKNOWN, build_event(event_status="Paused"), 0, False),
        (UNKNOWN, build_event(event_status=None), 0, False),
    ],
)
def test_how_an_event_ended_that_nobody_touched(
    book: ApprovalFile, outcome: tuple[str, str], of: Event, now: float, gap: bool
) -> None:
    record(book, of)
    book.clock.advance(now)
    assert ended(book, gap=gap) == outcome


@pytest.mark.parametrize(
    ("outcome", "given"),
    [
        (UNKNOWN, {"state": "sent"}),
        (UNKNOWN, {"state": "sent", "status": 503}),
        (UNKNOWN, {"state": "accepted", "status": 200}),
        (UNKNOWN, {"state": "failed"}),
        (CANCELED, {"state": "failed", "status": 400}),
        (CANCELED, {"state": "sent", "status": 400}),
        (UNKNOWN, {"state": "failed", "status": 400, "attempts": 2}),
        (CANCELED, {"state": "failed", "attempts": 0}),
        (CANCELED, {"state": "granted", "attempts": 0}),
        (CANCELED, {"state": "granted", "attempts": 0, "dry_run": True}),
    ],
)
def test_a_cancellation_is_told_only_where_no_start_request_can_have_been_taken(
    book: ApprovalFile, outcome: tuple[str, str], given: dict[str, Any]
) -> None:
    """Of several tries only the last answer is known: an earlier one may have been taken."""
    record(book, REBOOT)
    sent(book, **given)
    assert ended(book) == outcome


def boot(
    book: ApprovalFile, boot_id: str | None, known: frozenset[str] | None = frozenset({"db-1"})
) -> None:
    """The machine starts again, and the relay with it."""
    book.crash()
    book.recorder = Recorder(ORIGIN, boot_id, known)


@pytest.mark.parametrize(
    ("outcome", "of", "sent_first", "now", "after"),
    [
        (REBOOTED, REBOOT, True, 60, {}),
        (REBOOTED, REBOOT, False, 900, {}),
        (REBOOTED, build_event(event_type="redeploy"), False, 900, {}),
        (UNKNOWN, REBOOT, False, 899, {}),
        (UNKNOWN, build_event(event_type="Freeze"), True, 900, {}),
        (UNKNOWN, build_event(event_type=None), True, 900, {}),
        (UNKNOWN, build_event(resources=("db-2",)), True, 900, {}),
        (REBOOTED, build_event(resources=("db-2", "DB-1")), True, 900, {}),
        (UNKNOWN, REBOOT, True, 900, {"known": None}),
        (UNKNOWN, REBOOT, True, 900, {"boot_id": None}),
        (UNKNOWN, REBOOT, True, 900, {"boot_id": BOOT_ID}),
    ],
)
def test_an_event_that_is_gone_after_the_boot_it_announced_is_completed(
    book: ApprovalFile,
    outcome: tuple[str, str],
    of: Event,
    sent_first: bool,
    now: float,
    after: dict[str, Any],
) -> None:
    record(book, of)
    if sent_first:
        sent(book, "sent")
    book.clock.advance(now)
    boot(book, **{"boot_id": "boot-2"} | after)
    assert ended(book, gap=True) == outcome


def test_a_boot_that_was_not_the_event_s_doing_proves_nothing_later(book: ApprovalFile) -> None:
    record(book, REBOOT)
    book.clock.advance(60)
    boot(book, "boot-2")
    record(book, REBOOT, gap=True)
    book.clock.advance(900)
    assert ended(book) == UNKNOWN


@pytest.mark.parametrize("approved", [True, False])
def test_a_boot_during_the_event_proves_it_also_when_it_stays_in_the_document_for_a_while(
    book: ApprovalFile, approved: bool
) -> None:
    record(book, REBOOT)
    if approved:
        sent(book, "sent")
    book.clock.advance(60 if approved else 901)
    boot(book, "boot-2")
    record(book, REBOOT, gap=True)
    assert ended(book) == REBOOTED


def test_another_event_s_boot_is_remembered_for_each_event_by_itself(book: ApprovalFile) -> None:
    later = build_event("E-2", not_before=format_rfc3339(NOON + timedelta(hours=2)))
    record(book, REBOOT, later)
    book.clock.advance(901)
    boot(book, "boot-2")
    record(book, later, gap=True)
    assert book.status("E-2").occurrence.boot_id == "boot-2"
    book.clock.advance(7200)
    record(book)
    assert [one.data["evidence"] for one in book.events("event.ended")] == ["rebooted", "none"]
