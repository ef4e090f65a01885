"""A state file whose values were damaged is set aside: the relay could not start with it again."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from datetime import timedelta
from pathlib import Path

import pytest

from relay.store import Decision, EventKeyFormat, StandingHold
from relay.store.fleet import FleetTables, SightingRow
from relay.store.transaction import Transaction
from tests.builders import DATA
from tests.store.open_store import (
    IDENTITY,
    NOW,
    add_occurrence,
    end_occurrence,
    numbered_event,
    open_file_in,
    read_column,
)

SINK = "the-sink-of-this-test"
LATER = NOW + timedelta(hours=1)


def make_transaction(connection: sqlite3.Connection) -> Transaction:
    """Return a transaction on a state file that sends everything to one sink."""
    return Transaction(connection, lambda _: (SINK,), EventKeyFormat())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state file with a row in each table that the relay reads at its start."""
    path = tmp_path_factory.mktemp("whole") / "relay.db"
    with open_file_in(path) as file:
        tx = make_transaction(file.connection)
        for number in (1, 2):
            event = numbered_event(number)
            tx.record(event, NOW)
            data = {**DATA, "eventId": f"E-{number}", "revision": "0123456789abcdef"}
            add_occurrence(tx, f"e-{number}", data, None, event, NOW)
        end_occurrence(tx, "e-2", "completed", numbered_event(3), NOW)
        tx.decisions.add_decision(
            Decision(
                approval_id="a1",
                occurrence=1,
                decision="approve",
                principal="client:alice",
                channel="http",
                revision="0123456789abcdef",
                reason=None,
                at=NOW,
                expires=None,
                dry_run=False,
                counts=True,
                recorded_event_id="1",
                message_id=None,
            )
        )
        tx.decisions.insert_grant_row(
            1, "0123456789abcdef", "two", "a1", NOW, dry_run=False, cause="1", position=1
        )
        tx.standing_holds.add(
            StandingHold(
                number=1,
                hold_id="h1",
                conditions="{}",
                within="[]",
                starts=NOW,
                ends=LATER,
                principal="client:alice",
                channel="http",
                reason="",
                created=NOW,
                position=1,
            )
        )
        FleetTables(file.connection).save_sightings(
            [
                SightingRow(
                    event_key="e-1",
                    relay="vm-0",
                    state="1",
                    place=1,
                    at=NOW,
                    seen=NOW,
                    rebooted=False,
                    gap=False,
                )
            ]
        )
        tx.deliveries.set_sink_state("chat", "on")
        tx.set_last_read_at(NOW)
        file.connection.execute(
            "INSERT INTO message (sink, code, told, stale_at) VALUES ('chat', '', 1, '2026')"
        )
    return path


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    """A copy of the state file."""
    return Path(shutil.copy(whole, tmp_path / "relay.db"))


def is_set_aside(path: Path) -> bool:
    """Open the file as a relay does, and return whether a fresh one began with approvals off."""
    with open_file_in(path):
        pass
    aside = list(path.parent.glob("*.set-aside-*"))
    assert read_column(path, "SELECT value FROM meta WHERE key = 'mode'") == [
        "off" if aside else "on"
    ]
    return bool(aside)


def test_a_file_with_sound_values_is_kept(path: Path) -> None:
    assert not is_set_aside(path)
    assert read_column(path, "SELECT count(*) FROM occurrence") == [2]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE occurrence SET data = replace(data, 'eventSource', 'eventSourcf') WHERE live",
        "UPDATE occurrence SET data = replace(data, '\"E-1\"', '\"E-3\"') WHERE live",
        "UPDATE occurrence SET data = replace(data, 'resources', 'resourcfs') WHERE NOT live",
        "UPDATE occurrence SET first_seen = CAST(x'b2303236' AS TEXT) WHERE NOT live",
        "UPDATE meta SET value = x'32303236' WHERE key = 'last_read'",
        "UPDATE message SET stale_at = CAST(x'b2303236' AS TEXT)",
        "UPDATE decision SET occurrence = 2, decision = 'hold', at = '2026-19-99T00:00:00Z'",
        "UPDATE start_request SET state = 'acceptee'",
        "UPDATE sink SET state = 'oo'",
        "UPDATE standing_hold SET ends = '~'",
        "UPDATE sqlite_sequence SET seq = 0 WHERE name = 'entry'",
        "UPDATE sqlite_sequence SET seq = 0 WHERE name = 'standing_hold'",
        "UPDATE entry SET recorded = '2026x'",
    ],
)
def test_a_file_with_a_value_that_cannot_be_read_is_set_aside(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute(statement).rowcount > 0
        connection.commit()
    assert is_set_aside(path)


@pytest.mark.parametrize("value", ["CAST(x'c6' AS TEXT)", "CAST(hash AS BLOB)"])
@pytest.mark.parametrize("table", ["journal", "checkpoint"])
def test_a_file_whose_journal_cannot_grow_is_set_aside(path: Path, table: str, value: str) -> None:
    """The hash of the next row covers the last hash, also where all rows were pruned."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TRIGGER journal_is_append_only")
        if table == "checkpoint":
            connection.execute("INSERT INTO checkpoint SELECT 3, hash, at FROM journal LIMIT 1")
            connection.execute("DELETE FROM journal")
        changed = connection.execute(f"UPDATE {table} SET hash = {value}")  # noqa: S608  # our own text
        assert changed.rowcount > 0
        connection.commit()
    assert is_set_aside(path)


def test_a_file_whose_index_says_another_thing_than_its_table_is_set_aside(path: Path) -> None:
    """The relay finds waiting deliveries by an index: one that is missing there would be lost."""
    content = path.read_bytes()
    assert content.count(SINK.encode()) >= 2, "the table and its index"
    path.write_bytes(content.replace(SINK.encode(), SINK.upper().encode(), 1))
    assert is_set_aside(path)


@pytest.mark.parametrize("name", ["first_seen", "message_id", "occurrence_ended"])
def test_a_file_whose_tables_lack_something_is_set_aside(path: Path, name: str) -> None:
    """A flipped bit in the schema gives a column or an index another name."""
    content = path.read_bytes()
    assert name.encode() in content
    path.write_bytes(content.replace(name.encode(), name.replace("e", "f", 1).encode()))
    assert is_set_aside(path)


def test_the_file_of_another_relay_is_not_read_before_its_owner_is_known(path: Path) -> None:
    """It is set aside because of its owner; the message is not about its contents."""
    assert IDENTITY.vm_id is not None
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE occurrence SET data = '[]'")
        connection.execute("INSERT OR REPLACE INTO meta VALUES ('vm_id', 'another')")
        connection.commit()
    assert is_set_aside(path)
