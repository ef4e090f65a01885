"""Recording many events at once takes fewer statements and has the same result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from relay.store.journal import verify_journal
from relay.store.rows import MAX_ROWS_PER_STATEMENT
from relay.store.transaction import MAX_EVENTS_IN_RESULTS, Transaction
from tests.store.open_store import NOW, numbered_event, open_file_in


def test_more_than_go_into_one_statement_are_journalled_and_wait_in_their_order(
    tmp_path: Path,
) -> None:
    """The returned entries have the ids of the waiting entries, for every sink."""
    events = [numbered_event(number) for number in range(3 * MAX_ROWS_PER_STATEMENT + 1)]
    with open_file_in(tmp_path / "relay.db") as file:
        for batch in range(2):
            tx = Transaction(file.connection, lambda _: ("bus", "chat"))
            tx.record_all([(event, f"t{event.id}") for event in events], NOW)
            recorded, _ = tx.finish()
            assert [recorded_event.event for recorded_event in recorded] == events
            assert [recorded_event.position for recorded_event in recorded] == list(
                range(batch * len(events) + 1, (batch + 1) * len(events) + 1)
            )
            returned_entries = [
                replace(entry, event=None)
                for recorded_event in recorded
                for entry in recorded_event.entries
            ]
            assert [entry.sink for entry in returned_entries] == ["bus", "chat"] * len(events)
            assert tx.deliveries.waiting_entries()[-len(returned_entries) :] == returned_entries
            assert [
                tx.journal.require_event_at_position(recorded_event.position).id
                for recorded_event in recorded
            ] == [event.id for event in events]
            last = f"t{events[-1].id}"
            assert tx.journal.counts_by_transition([last, "never"]) == {last: batch + 1}
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
