"""Many events said at once, which is fewer statements and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from relay.outbox.bulk_insert import MAX_ROWS_PER_STATEMENT
from relay.outbox.journal import verify_journal
from relay.outbox.transaction import Transaction
from tests.outbox.open_store import NOW, numbered_event, open_file_in


def test_more_than_go_into_one_statement_are_journalled_and_wait_in_their_order(
    tmp_path: Path,
) -> None:
    """For every sink, with the ids that the file gives them: what is handed out is what waits."""
    events = [numbered_event(number) for number in range(3 * MAX_ROWS_PER_STATEMENT + 1)]
    with open_file_in(tmp_path / "relay.db") as file:
        for again in range(2):
            tx = Transaction(file.connection, lambda _: ("bus", "chat"))
            tx.record_all([(event, f"t{event.id}") for event in events], NOW)
            recorded, _ = tx.take_results()
            assert [one.event for one in recorded] == events
            assert [one.position for one in recorded] == list(
                range(again * len(events) + 1, (again + 1) * len(events) + 1)
            )
            handed = [replace(entry, event=None) for one in recorded for entry in one.entries]
            assert [entry.sink for entry in handed] == ["bus", "chat"] * len(events)
            assert tx.deliveries.waiting()[-len(handed) :] == handed
            assert [tx.journal.event(one.position).id for one in recorded] == [
                event.id for event in events
            ]
            assert tx.journal.count_transition(f"t{events[-1].id}") == again + 1
        assert verify_journal(file.connection)[1] == 2 * len(events)


def test_a_piece_of_work_hands_out_what_it_said_and_not_what_others_did(tmp_path: Path) -> None:
    """In one transaction, whose head and ids go on."""
    with open_file_in(tmp_path / "relay.db") as file:
        tx = Transaction(file.connection, lambda _: ("bus",))
        for number in range(3):
            tx.record(numbered_event(number), NOW)
            (one,), _ = tx.take_results()
            assert (one.position, [entry.id for entry in one.entries]) == (number + 1, [number + 1])
        assert tx.take_results() == ([], [])
