"""The hash chain: what it shows, what it cannot, and that nothing but pruning takes from it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.errors import StoreError
from relay.events.cloudevent import CloudEvent
from relay.store import JournalHead
from relay.store.audit import verify_journal
from relay.store.file import open_for_reading
from relay.store.journal import GENESIS, Journal, read_all_rows, row_hash
from relay.store.rows import PageLimit
from relay.store.transaction import Transaction
from tests.depth import depth
from tests.store.open_store import BUS, NOW, append_row, numbered_event, open_file_in, read_column

ROWS = 6


def fill(connection: sqlite3.Connection, count: int = ROWS) -> list[JournalHead]:
    """Append rows, one a minute. Return every head, beginning with the empty journal's."""
    journal = Journal(connection)
    heads = [journal.head()]
    for number in range(count):
        at, key, body = NOW + timedelta(minutes=number), f"e-{number}", numbered_event(number).body
        if number % 3 == 2:
            journal.append_non_event_row(at, "claim", {"eventId": f"E-{number}"}, event_key=key)
        else:
            kind, transition = "event.scheduled", f"t{number}"
            append_row(journal, at, kind, body, event_key=key, transition=transition)
        heads.append(journal.head())
    return heads


@contextlib.contextmanager
def undone(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("SAVEPOINT before")
    try:
        yield
    finally:
        connection.execute("ROLLBACK TO before")
        connection.execute("RELEASE before")


@contextlib.contextmanager
def filled(path: Path) -> Iterator[tuple[sqlite3.Connection, list[JournalHead]]]:
    """A journal with rows, but without the triggers that forbid changes."""
    with open_file_in(path) as file:
        heads = fill(file.connection)
        for trigger in read_column(path, "SELECT name FROM sqlite_schema WHERE type = 'trigger'"):
            file.connection.execute(f"DROP TRIGGER {trigger}")
        yield file.connection, heads


def test_what_was_written_verifies(tmp_path: Path) -> None:
    with filled(tmp_path / "relay.db") as (connection, heads):
        assert verify_journal(connection) == (heads[-1], ROWS)
        for head in heads:
            assert verify_journal(connection, head) == (heads[-1], ROWS)


SEARCH = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=depth(150, 30),
)
TEXTS = st.sampled_from(["", "x", "2026-04-11T22:26:59.000000Z", "event.ended", "\x00", "ä"])
CHANGES = st.one_of(
    st.tuples(st.sampled_from(["at", "kind", "event_key", "transition"]), TEXTS),
    st.tuples(st.sampled_from(["event_key", "transition"]), st.none()),
    st.tuples(st.just("body"), st.binary(max_size=8)),
    st.tuples(st.just("hash"), st.integers(0, 2**256 - 1).map(lambda number: f"{number:064x}")),
    st.tuples(st.just("position"), st.integers(-1, 20)),
)


@SEARCH
@given(position=st.integers(1, ROWS), change=CHANGES)
def test_any_changed_column_of_any_row_is_found(
    journal: sqlite3.Connection, position: int, change: tuple[str, object]
) -> None:
    column_, value = change
    with undone(journal):
        before = journal.execute(
            f"SELECT {column_} FROM journal WHERE position = ?",  # noqa: S608  # our own names
            (position,),
        ).fetchone()[0]
        taken = (
            column_ == "position"
            and journal.execute("SELECT 1 FROM journal WHERE position = ?", (value,)).fetchone()
            is not None
        )
        if value == before or taken:
            return
        journal.execute(f"UPDATE journal SET {column_} = ? WHERE position = ?", (value, position))  # noqa: S608  # our own names
        with pytest.raises(StoreError, match=r"^journal: "):
            verify_journal(journal)


@pytest.mark.parametrize("position", range(1, ROWS))
def test_a_changed_row_whose_hash_fits_is_found_by_the_next(tmp_path: Path, position: int) -> None:
    """Each hash covers all earlier rows. A forger must change every later row and the head too."""
    with filled(tmp_path / "relay.db") as (connection, heads):
        row = list(read_all_rows(connection))[position - 1]
        before = heads[position - 1].hash
        fitting = row_hash(before, position, row.at, row.kind, row.event_key, row.transition, b"{}")
        connection.execute(
            "UPDATE journal SET body = ?, hash = ? WHERE position = ?", (b"{}", fitting, position)
        )
        with pytest.raises(
            StoreError, match=f"the row at position {position + 1} is not the one that was written"
        ):
            verify_journal(connection)


@SEARCH
@given(gone=st.sets(st.integers(1, ROWS), min_size=1))
def test_removed_rows_are_found_by_themselves_or_by_a_head_that_was_seen(
    journal: sqlite3.Connection, gone: set[int]
) -> None:
    """A cut tail leaves a shorter journal that is valid: only a head kept elsewhere shows it.

    See docs/protocol.md#a-cut-tail.
    """
    with undone(journal):
        seen = Journal(journal).head()
        for position in gone:
            journal.execute("DELETE FROM journal WHERE position = ?", (position,))
        with pytest.raises(StoreError, match=r"^journal: "):
            verify_journal(journal, seen)
        only_the_tail = gone == set(range(min(gone), ROWS + 1))
        if only_the_tail:
            assert verify_journal(journal)[1] == ROWS - len(gone)
        else:
            with pytest.raises(StoreError, match="removed or inserted"):
                verify_journal(journal)


@SEARCH
@given(position=st.integers(1, ROWS + 1), copied=st.integers(1, ROWS))
def test_an_inserted_row_is_found(journal: sqlite3.Connection, position: int, copied: int) -> None:
    """This includes a row that moves all later rows, and one with the valid hash of another row."""
    with undone(journal):
        row = journal.execute(
            "SELECT at, kind, event_key, transition, body, hash FROM journal WHERE position = ?",
            (copied,),
        ).fetchone()
        for moved in range(ROWS, position - 1, -1):
            journal.execute(
                "UPDATE journal SET position = position + 1 WHERE position = ?", (moved,)
            )
        journal.execute("INSERT INTO journal VALUES (?, ?, ?, ?, ?, ?, ?)", (position, *row))
        with pytest.raises(StoreError, match="not the one that was written"):
            verify_journal(journal)


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    """A journal for many examples. Each example undoes its change."""
    with filled(tmp_path_factory.mktemp("journal") / "relay.db") as (connection, _):
        yield connection


def test_a_journal_that_was_written_anew_is_found_by_a_head_that_was_seen(tmp_path: Path) -> None:
    """A forger with write access can make a valid chain, but not one with the same last hash."""
    with open_file_in(tmp_path / "one.db") as file:
        seen = fill(file.connection)[3]
    with open_file_in(tmp_path / "other.db") as file:
        append_row(Journal(file.connection))
        fill(file.connection)
        with pytest.raises(StoreError, match="position 3 is not the one that was seen before"):
            verify_journal(file.connection, seen)


def test_text_that_is_no_text_is_a_broken_journal_and_no_crash(tmp_path: Path) -> None:
    with filled(tmp_path / "relay.db") as (connection, _):
        connection.execute("UPDATE journal SET kind = CAST(x'ff' AS TEXT) WHERE position = 2")
        with pytest.raises(StoreError, match="cannot be read"):
            verify_journal(connection)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE journal SET body = x'' WHERE position = 2",
        "UPDATE journal SET position = 99 WHERE position = 2",
        "DELETE FROM journal WHERE position = 2",
        "DELETE FROM journal",
        (
            "INSERT OR REPLACE INTO journal SELECT position, at, kind, event_key, transition, x'',"
            " hash FROM journal WHERE position = 2"
        ),
        (
            "INSERT INTO journal SELECT 0, at, kind, event_key, transition, body, hash"
            " FROM journal WHERE position = 2"
        ),
    ],
)
def test_the_table_only_grows_at_its_end(tmp_path: Path, statement: str) -> None:
    """The triggers of the file refuse changes by faulty code."""
    with open_file_in(tmp_path / "relay.db") as file:
        heads = fill(file.connection)
        with pytest.raises(sqlite3.IntegrityError, match="journal"):
            file.connection.execute(statement)
        assert verify_journal(file.connection, heads[2]) == (heads[-1], ROWS)


@pytest.mark.parametrize("young", range(ROWS + 1))
def test_pruning_leaves_a_checkpoint_and_the_chain_verifies(tmp_path: Path, young: int) -> None:
    with open_file_in(tmp_path / "relay.db") as file:
        heads = fill(file.connection)
        gone = Journal(file.connection).prune(NOW + timedelta(minutes=young), NOW)
        assert gone == young
        assert verify_journal(file.connection) == (heads[-1], ROWS - gone)
        for head in heads[young:]:
            assert verify_journal(file.connection, head) == (heads[-1], ROWS - gone)
        assert append_row(Journal(file.connection)) == ROWS + 1
        assert verify_journal(file.connection, heads[-1])[1] == ROWS - gone + 1


def test_a_checkpoint_that_is_not_what_was_seen_is_found(tmp_path: Path) -> None:
    with open_file_in(tmp_path / "relay.db") as file:
        heads = fill(file.connection)
        Journal(file.connection).prune(NOW + timedelta(minutes=3), NOW)
        with pytest.raises(StoreError, match="position 3 is not the one that was seen before"):
            verify_journal(file.connection, JournalHead(3, "0" * 64))
        file.connection.execute("DELETE FROM checkpoint")
        with pytest.raises(StoreError, match="expected position 1, found 4"):
            verify_journal(file.connection, heads[-1])


@pytest.mark.parametrize("state", ["waiting", "parked"])
def test_pruning_keeps_what_has_yet_to_be_sent(tmp_path: Path, state: str) -> None:
    """A listed dead letter can be redelivered, so its row must stay."""
    with open_file_in(tmp_path / "relay.db") as file:
        tx = Transaction(file.connection, BUS)
        for number in range(4):
            tx.record(numbered_event(number), NOW)
        settled = [entry.id for recorded_event in tx.recorded for entry in recorded_event.entries]
        for entry in settled:
            tx.deliveries.store_final_state(entry, "delivered", None, NOW)
        tx.deliveries.store_final_state(settled[2], state, None, NOW)  # type: ignore[arg-type]  # the cases are states
        assert tx.journal.prune(NOW + timedelta(days=500), NOW) == 2
        assert tx.journal.require_event_at_position(3).id == numbered_event(2).id
        assert verify_journal(file.connection)[1] == 2


def test_a_clock_that_was_wrong_for_a_while_costs_no_young_row(tmp_path: Path) -> None:
    """A row of 1970 among rows of this year does not make pruning remove those of this year."""
    with open_file_in(tmp_path / "relay.db") as file:
        journal = Journal(file.connection)
        for days in (0, 1, -20_000, 2):
            append_row(journal, NOW + timedelta(days=days), "event.scheduled", b"{}")
        assert journal.prune(NOW - timedelta(days=400), NOW) == 0
        assert verify_journal(file.connection)[1] == 4


def test_a_head_that_the_journal_does_not_have_gives_its_beginning(tmp_path: Path) -> None:
    with open_file_in(tmp_path / "relay.db") as file:
        heads = fill(file.connection)
        journal = Journal(file.connection)
        for head in heads:
            assert journal.head_at(head.position) == head
            assert journal.head_at(head.position, head.hash) == head
            assert journal.head_at(head.position, "a" * 64) == GENESIS
        assert journal.head_at(ROWS + 1) == GENESIS
        journal.prune(NOW + timedelta(minutes=3), NOW)
        begin = heads[3]
        found = [journal.head_at(head.position, head.hash) for head in heads]
        assert found == [*[begin] * 4, *heads[4:]]


def test_an_audit_beside_a_relay_that_prunes_sees_one_moment(tmp_path: Path) -> None:
    """It reads the checkpoint and the rows in the same snapshot."""
    path = tmp_path / "relay.db"
    with open_file_in(path) as file, contextlib.closing(open_for_reading(path)) as reader:
        heads = fill(file.connection)

        def prune_in_between(statement: str) -> None:
            if "FROM journal ORDER BY" in statement:
                reader.set_trace_callback(None)
                assert Journal(file.connection).prune(NOW + timedelta(minutes=3), NOW) == 3

        reader.set_trace_callback(prune_in_between)
        assert verify_journal(reader) == (heads[-1], ROWS)
        assert verify_journal(reader) == (heads[-1], ROWS - 3)


def test_history_and_what_follows_a_position_leave_out_what_is_no_event(tmp_path: Path) -> None:
    with open_file_in(tmp_path / "relay.db") as file:
        journal = Journal(file.connection)
        ids = {number: numbered_event(number).id for number in (1, 2, 3)}
        for number, kind in enumerate(("event.scheduled", "event.ended", "approval.refused"), 1):
            body = numbered_event(number, subject="E").body
            append_row(journal, NOW, kind, body, event_key="e")
            if number == 1:
                journal.append_non_event_row(NOW, "mode", {"mode": "off"})
                journal.append_non_event_row(NOW, "claim", {"eventId": "E"}, event_key="e")

        def history(begin: int, before: int | None = None) -> tuple[list[str], bool]:
            rows, has_more = journal.history_page("e", begin, before, PageLimit(2))
            return [CloudEvent.parse(row.body).id for row in rows], has_more

        assert history(0) == ([ids[3], ids[2]], True)
        assert history(0, 4) == ([ids[1]], False)
        assert history(4) == ([ids[3], ids[2]], False)
        assert history(4, 4) == ([], False)
        page = journal.events_after(0, 2)
        assert [(head.position, event.id) for head, event in page] == [(1, ids[1]), (4, ids[2])]
        assert [head for head, _ in page] == [journal.head_at(1), journal.head_at(4)]
        assert journal.last_change_of("e") == 4
        assert journal.last_change_of("f") is None
        with pytest.raises(KeyError):
            journal.require_event_at_position(9)


@pytest.mark.parametrize("broken", [b"", b"\x00\xff\x00", "no JSON: é", b"{"])
def test_bodies_are_read_whole_though_one_is_broken(tmp_path: Path, broken: bytes | str) -> None:
    with filled(tmp_path / "relay.db") as (connection, _):
        connection.execute("UPDATE journal SET body = ? WHERE position = 2", (broken,))
        bodies = Journal(connection).bodies_at_positions([1, 2, 4, ROWS + 1])
        assert bodies.pop(2) == (broken if isinstance(broken, bytes) else broken.encode())
        assert bodies == {1: numbered_event(0).body, 4: numbered_event(3).body}
        assert Journal(connection).bodies_at_positions([ROWS + 1]) == {}
