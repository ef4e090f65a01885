"""Occurrences and first answers: read back as they were written."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from relay.store import FirstAnswer
from relay.store.audit import verify_journal
from relay.store.rows import MAX_ROWS_PER_STATEMENT, PageLimit
from relay.store.transaction import MAX_EVENTS_IN_RESULTS, Transaction
from tests.store.open_store import NOW, add_occurrence, end_occurrence, numbered_event, open_file_in

LATER = NOW + timedelta(minutes=1)


@pytest.fixture
def tx(tmp_path: Path) -> Iterator[Transaction]:
    with open_file_in(tmp_path / "relay.db") as file:
        yield Transaction(file.connection, lambda _: ())


def test_the_same_event_id_is_a_new_occurrence_after_it_ended(tx: Transaction) -> None:
    add_occurrence(tx, "e")
    with pytest.raises(sqlite3.IntegrityError):
        add_occurrence(tx, "e")
    end_occurrence(tx, "e")
    add_occurrence(tx, "e", LATER)
    newest = tx.occurrences.find_newest_occurrence("e")
    assert newest is not None
    assert (newest.number, newest.live) == (2, True)
    pages = [
        tx.occurrences.occurrence_page(before, PageLimit(rows))
        for before, rows in ((None, 10), (None, 1), (newest.id, 1))
    ]
    numbers = [([row.number for row in page], more) for page, more in pages]
    assert numbers == [([2, 1], False), ([2], True), ([1], False)]
    assert tx.occurrences.find_newest_occurrence("f") is None
    with pytest.raises(KeyError):
        tx.occurrences.require_occurrence(99)


def test_first_answers_are_kept_for_each_principal_and_id(tx: Transaction) -> None:
    answer = FirstAnswer("client:ada", "1", "digest", 409, {"detail": "too late"}, NOW)
    tx.answers.add(answer)
    assert tx.answers.find("client:ada", "1") == answer
    assert tx.answers.find("client:bob", "1") is None
    with pytest.raises(sqlite3.IntegrityError):
        tx.answers.add(replace(answer, status=202, body={}))


def test_ended_events_are_forgotten_with_all_that_hangs_on_them(tx: Transaction) -> None:
    for key in ("ended", "live", "late"):
        add_occurrence(tx, key)
    end_occurrence(tx, "ended")
    end_occurrence(tx, "late", LATER)
    tx.occurrences.prune_ended_occurrences(LATER)
    occurrences, _ = tx.occurrences.occurrence_page(None, PageLimit(10))
    assert [occurrence.key for occurrence in occurrences] == ["late", "live"]
    assert tx.connection.execute("PRAGMA foreign_key_check").fetchall() == []


def test_an_occurrence_is_followed_by_the_next_that_is_left(tx: Transaction) -> None:
    """The clock was ahead during the first, and so the second is pruned alone."""
    for at in (LATER, NOW):
        add_occurrence(tx, "e", NOW)
        end_occurrence(tx, "e", at)
    add_occurrence(tx, "e", LATER)
    tx.occurrences.prune_ended_occurrences(LATER)
    first, third = tx.occurrences.all_of_key("e")
    assert (first.number, third.number) == (1, 3)
    assert tx.occurrences.find_following_occurrence(first) == third


def test_an_event_is_about_the_occurrence_of_its_time_or_the_first(tx: Transaction) -> None:
    """The clock was set back since the first was seen."""
    for at in (NOW, LATER):
        add_occurrence(tx, "e", at)
        end_occurrence(tx, "e", at)
    moments = [LATER, LATER - timedelta(seconds=1), NOW - timedelta(seconds=1)]
    found = [tx.occurrences.find_occurrence_at_time("e", moment) for moment in moments]
    assert [each and each.number for each in found] == [2, 1, 1]
    assert tx.occurrences.find_occurrence_at_time("f", NOW) is None


def test_old_events_behind_a_young_one_are_forgotten_with_it(tx: Transaction) -> None:
    """The clock was set back after the second was seen."""
    for key, at in (("first", NOW), ("young", LATER), ("late", NOW)):
        add_occurrence(tx, key, at)
        end_occurrence(tx, key, at)
    tx.occurrences.prune_ended_occurrences(LATER)
    assert [tx.occurrences.require_occurrence(number).key for number in (2, 3)] == ["young", "late"]
    tx.occurrences.prune_ended_occurrences(LATER + timedelta(seconds=1))
    assert tx.occurrences.occurrence_page(None, PageLimit(10)) == ([], False)


def test_the_events_of_one_document_were_seen_together(tx: Transaction) -> None:
    """Also if one of them was pruned."""
    documents = {LATER: "ab", NOW: "cde", NOW + timedelta(hours=1): "f"}
    for at, keys in documents.items():
        for key in keys:
            add_occurrence(tx, key, at)
    tx.connection.execute("DELETE FROM occurrence WHERE key = 'd'")
    for occurrence in tx.occurrences.live_occurrences():
        together = next(each for each in ("ab", "ce", "f") if occurrence.key in each)
        found = [other.key for other in tx.occurrences.first_seen_with(occurrence)]
        assert found == list(together)


def test_more_than_go_into_one_statement_are_journalled_and_wait_in_order(tmp_path: Path) -> None:
    """The returned entries have the ids of the waiting entries, for every sink."""
    events = [numbered_event(number) for number in range(3 * MAX_ROWS_PER_STATEMENT + 1)]
    with open_file_in(tmp_path / "relay.db") as file:
        for batch in range(2):
            tx = Transaction(file.connection, lambda _: ("bus", "chat"))
            tx.record_all([(event, f"t{event.id}") for event in events], NOW)
            recorded, _ = tx.finish()
            assert [each.event for each in recorded] == events
            positions = [each.position for each in recorded]
            first = batch * len(events) + 1
            assert positions == list(range(first, first + len(events)))
            entries = [replace(entry, event=None) for each in recorded for entry in each.entries]
            assert [entry.sink for entry in entries] == ["bus", "chat"] * len(events)
            assert tx.deliveries.waiting_entries()[-len(entries) :] == entries
            rows = [tx.journal.require_event_at_position(position) for position in positions]
            assert [row.id for row in rows] == [event.id for event in events]
            last = events[-1]
            counts = tx.journal.transition_counts([str(last.subject).lower(), "never"])
            assert counts == {f"t{last.id}": batch + 1}
        assert verify_journal(file.connection)[1] == 2 * len(events)


def test_the_results_of_a_burst_hold_the_first_events_and_entries_for_all(tmp_path: Path) -> None:
    events = [numbered_event(number) for number in range(MAX_EVENTS_IN_RESULTS + 20)]
    with open_file_in(tmp_path / "relay.db") as file:
        tx = Transaction(file.connection, lambda _: ("bus",))
        for first in range(0, len(events), 100):
            tx.record_all([(event, None) for event in events[first : first + 100]], NOW)
        recorded, _ = tx.finish()
        kept = [*events[:MAX_EVENTS_IN_RESULTS], *[None] * 20]
        assert [recorded_event.event for recorded_event in recorded] == kept
        assert [entry.event for event in recorded for entry in event.entries] == kept
        assert [recorded_event.id for recorded_event in recorded] == [event.id for event in events]
        tx.record(events[0], NOW)
        assert tx.recorded[0].event == events[0]
