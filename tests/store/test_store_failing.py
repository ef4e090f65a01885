"""A disk that rejects writes: the relay sends notices from memory and refuses approvals.

It records the notices once the disk takes writes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from relay.errors import StoreError, StoreUnavailable
from relay.store import Attempt, RecordedEvent
from relay.store.audit import verify_journal
from relay.store.file import open_for_reading, open_state_file
from relay.store.sqlite import Store, Work
from relay.store.transaction import Transaction
from tests.depth import depth
from tests.eventually import eventually
from tests.store.conftest import Disk
from tests.store.open_store import (
    IDENTITY,
    NOW,
    blocked,
    file_names,
    numbered_event,
    open_store_in,
    read_column,
    record_event,
)

ROWS = depth(1_000_000, 100_000)


@dataclass(slots=True)
class Notified:
    recorded: list[RecordedEvent] = field(default_factory=list)
    failing: list[str | None] = field(default_factory=list)


@asynccontextmanager
async def open_listened_store(folder: Path) -> AsyncIterator[tuple[Store, Notified]]:
    async with open_store_in(folder) as store:
        notified = Notified()
        store.listeners.recorded.append(notified.recorded.extend)
        store.listeners.write_error_changed.append(notified.failing.append)
        yield store, notified


async def recover(store: Store, disk: Disk) -> None:
    disk.free()
    await eventually(lambda: store.write_error is None)


def entries(path: Path) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(
            "SELECT id, sink, position, state FROM entry ORDER BY id"
        ).fetchall()


def chain_holds(path: Path) -> int:
    with contextlib.closing(open_for_reading(path)) as reader:
        return verify_journal(reader)[1]


async def test_a_full_disk_refuses_what_fails_closed_and_takes_what_fails_open(disk: Disk) -> None:
    path = disk.folder / "relay.db"
    async with open_listened_store(disk.folder) as (store, notified):
        await store.transact(record_event(1))
        disk.fill()
        with pytest.raises(StoreUnavailable, match="the state file cannot be written: "):
            await store.transact(record_event(2))
        assert store.write_error
        assert await store.transact(record_event(3), fail_open=True) == 2
        assert await store.transact(record_event(4), fail_open=True) == 3
        with pytest.raises(StoreUnavailable):
            await store.transact(record_event(5))
        first = notified.recorded[0].entries[0]
        await store.transact(
            lambda tx: tx.deliveries.store_final_state(first.id, "delivered", None, NOW),
            fail_open=True,
        )

        journal = await store.read(lambda tx: tx.journal.events_after(0, 9))
        assert [event.id for _, event in journal] == [numbered_event(n).id for n in (1, 3, 4)]
        waiting = await store.read(lambda tx: tx.deliveries.waiting_entries())
        assert [entry.position for entry in waiting] == [2, 3]
        assert read_column(path, "SELECT position FROM journal") == [1]
        told = [
            (each.position, each.id, [entry.id for entry in each.entries])
            for each in notified.recorded
        ]
        ids = [numbered_event(number).id for number in (1, 3, 4)]
        assert told == [(number, id_, [number]) for number, id_ in enumerate(ids, start=1)]

        await recover(store, disk)
        states = ["delivered", "waiting", "waiting"]
        assert entries(path) == [(n, "bus", n, state) for n, state in enumerate(states, start=1)]
        assert await store.read(lambda tx: tx.journal.events_after(0, 9)) == journal
        assert await store.transact(record_event(6)) == 4
        assert len(notified.recorded) == 4
        assert [reason is None for reason in notified.failing] == [False, True]
    assert chain_holds(path) == 4


async def test_notices_go_out_promptly_however_much_waits_to_be_written(disk: Disk) -> None:
    """The store retries the file from time to time, not with every piece of work."""
    async with open_listened_store(disk.folder) as (store, notified):
        statements: list[str] = []
        await store.read(lambda tx: tx.connection.set_trace_callback(statements.append))
        disk.fill()
        began = time.monotonic()
        for number in range(500):
            await store.transact(record_event(number), fail_open=True)
        tries = statements.count("BEGIN IMMEDIATE")
        took = time.monotonic() - began
        await recover(store, disk)
        assert tries <= 4 + 2 * took
        assert len(notified.recorded) == 500
    assert chain_holds(disk.folder / "relay.db") == 500


@pytest.mark.parametrize("failure", ["full disk", "lock"])
def test_a_large_journal_needs_no_memory_while_writes_fail(failure: str, tmp_path: Path) -> None:
    output = subprocess.run(
        (sys.executable, "-m", "tests.store.record_on_failing_disk", tmp_path, failure, str(ROWS)),
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # each thread would reserve 64 MB
    ).stdout
    file_size, grown = map(int, output.split())
    assert file_size > ROWS // 2000
    assert grown < 8


def counted(runs: list[int], number: int) -> Work[int]:
    """Return work that records an event, or nothing for an even number, and notes that it ran."""

    def work(tx: Transaction) -> int:
        runs.append(number)
        return record_event(number)(tx) if number % 2 else 0

    return work


@pytest.mark.parametrize("disk", ["limit"], indirect=True)
async def test_a_write_that_fails_repeats_in_order_what_changed_something(disk: Disk) -> None:
    runs: list[int] = []
    async with open_listened_store(disk.folder) as (store, notified):
        disk.fill()
        for number in (1, 2, 3):
            await store.transact(counted(runs, number), fail_open=True)
        done = len(runs)
        await eventually(lambda: runs[done:].count(3) >= 2)
        assert await store.transact(record_event(5), fail_open=True) == 3
        await recover(store, disk)
        assert len(notified.recorded) == 3
    assert runs[done : done + 4] == [1, 3, 1, 3]
    path = disk.folder / "relay.db"
    assert read_column(path, "SELECT event_key FROM journal") == ["e-1", "e-3", "e-5"]
    assert chain_holds(path) == 3


async def test_a_repeat_that_fails_midway_is_begun_anew(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise what comes next would take the place of what was told before."""
    run, runs = Store._run_in_savepoint, list[object]()  # noqa: SLF001

    def fail_second(self: Store, *arguments: Any) -> bool:
        runs.append(arguments)
        if len(runs) == 2:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error
        return run(self, *arguments)

    async with open_listened_store(disk.folder) as (store, notified):
        await store.transact(record_event(1))
        disk.fill()
        for number in (2, 3, 4):
            await store.transact(record_event(number), fail_open=True)
        monkeypatch.setattr(Store, "_run_in_savepoint", fail_second)
        await eventually(lambda: len(runs) >= 2)  # the next try to write repeats what was told
        await store.transact(record_event(5), fail_open=True)
        await recover(store, disk)
        journal = await store.read(lambda tx: tx.journal.events_after(0, 9))
    assert [event.id for _, event in journal] == [each.id for each in notified.recorded]
    assert [head.position for head, _ in journal] == [1, 2, 3, 4, 5]


async def test_works_own_error_in_memory_undoes_it_alone_and_is_not_done_again(disk: Disk) -> None:
    runs: list[int] = []

    def mistaken(tx: object) -> None:
        runs.append(1)
        record_event(2)(tx)  # type: ignore[arg-type]  # a transaction
        raise LookupError("a mistake")

    async with open_listened_store(disk.folder) as (store, _):
        disk.fill()
        await store.transact(record_event(1), fail_open=True)
        with pytest.raises(LookupError):
            await store.transact(mistaken, fail_open=True)
        before = len(runs)
        await store.transact(record_event(3), fail_open=True)
        await recover(store, disk)
        assert len(runs) == before
    assert read_column(disk.folder / "relay.db", "SELECT event_key FROM journal") == ["e-1", "e-3"]


async def test_closing_writes_down_what_there_is_room_for_again(disk: Disk) -> None:
    async with open_listened_store(disk.folder) as (store, notified):
        disk.fill()
        await store.transact(record_event(1), fail_open=True)
        disk.free()
    assert len(notified.recorded) == 1
    assert chain_holds(disk.folder / "relay.db") == 1


async def test_closing_while_the_disk_is_full_says_what_is_lost_and_ends(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_listened_store(disk.folder) as (store, notified):
        await store.transact(record_event(1))
        disk.fill()
        await store.transact(record_event(2), fail_open=True)
        log = [(1, Attempt(at=NOW, elapsed=0.1, outcome="delivered"))]
        await store.transact(lambda tx: tx.deliveries.log_attempts(log), fail_open=True)
    disk.free()
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "could still not be written" in error
    assert [each.id for each in notified.recorded] == [numbered_event(n).id for n in (1, 2)]
    assert chain_holds(disk.folder / "relay.db") == 1


async def test_a_relay_that_starts_on_a_full_disk_still_tells(disk: Disk) -> None:
    """The file exists and needs no change. A read-only file is no reason to send no notices."""
    async with open_store_in(disk.folder) as store:
        await store.transact(record_event(1))
        keep_open = sqlite3.connect(
            disk.folder / "relay.db"
        )  # else the log is gone with the last that used it
        keep_open.execute("SELECT * FROM journal").fetchall()
    disk.fill()
    try:
        async with open_listened_store(disk.folder) as (store, notified):
            assert await store.transact(record_event(2), fail_open=True) == 2
            assert len(notified.recorded) == 1
            with pytest.raises(StoreUnavailable):
                await store.transact(record_event(3))
            await recover(store, disk)
    finally:
        keep_open.close()
    assert chain_holds(disk.folder / "relay.db") == 2


@pytest.mark.parametrize("disk", ["full disk"], indirect=True)
async def test_a_relay_that_was_stopped_in_order_starts_on_a_full_disk_too(disk: Disk) -> None:
    """This happens after the reboot of a VM whose disk is full."""
    async with open_store_in(disk.folder) as store:
        await store.transact(record_event(1))
    assert (disk.folder / "relay.db-wal").stat().st_size == 0
    disk.fill()
    for _ in range(2):
        async with open_listened_store(disk.folder) as (store, notified):
            assert await store.transact(record_event(2), fail_open=True) == 2
            assert len(notified.recorded) == 1
    disk.free()
    async with open_listened_store(disk.folder) as (store, _):
        assert await store.transact(record_event(2)) == 2
    assert chain_holds(disk.folder / "relay.db") == 2


@pytest.mark.parametrize("disk", ["full disk"], indirect=True)
async def test_where_a_full_disk_has_no_room_to_begin_it_is_said_so(disk: Disk) -> None:
    disk.fill()
    said = r"store\.path: expected a {} that can be written, .*: the disk is full: make room"
    with pytest.raises(StoreError, match=said.format("folder")):
        open_state_file(disk.folder / "relay.db", IDENTITY, NOW)
    disk.free()
    async with open_store_in(disk.folder):
        pass
    for removed in ("relay.db-wal", "relay.db-shm"):
        (disk.folder / removed).unlink()
    disk.fill()
    with pytest.raises(StoreError, match=said.format("file")):
        open_state_file(disk.folder / "relay.db", IDENTITY, NOW)


async def test_another_ones_lock_is_waited_for_and_then_gone_around(tmp_path: Path) -> None:
    """A shell has the file open in the middle of a transaction."""
    async with open_listened_store(tmp_path) as (store, notified):
        await store.read(
            lambda tx: tx.connection.execute("PRAGMA busy_timeout = 50")
        )  # five seconds are long for a test
        with contextlib.closing(
            sqlite3.connect(tmp_path / "relay.db", isolation_level=None)
        ) as shell:
            shell.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable, match="locked"):
                await store.transact(record_event(1))
            assert await store.transact(record_event(2), fail_open=True) == 1
            shell.execute("ROLLBACK")
            await eventually(lambda: store.write_error is None)
        assert await store.transact(record_event(3)) == 2
        assert len(notified.recorded) == 2
    assert chain_holds(tmp_path / "relay.db") == 2


async def test_a_file_that_breaks_in_use_is_gone_around_and_set_aside_later(tmp_path: Path) -> None:
    path = tmp_path / "relay.db"
    async with open_listened_store(tmp_path) as (store, notified):
        for number in range(50):
            await store.transact(record_event(number))
        notified.recorded.clear()
        with contextlib.closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            other.execute(
                "CREATE TABLE another (one)"
            )  # makes the relay forget what it holds in memory, and
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # read the file again, of which
            with path.open("r+b") as file:  # only the first page is whole now
                file.seek(4096)
                file.write(os.urandom(path.stat().st_size - 4096))
        with pytest.raises(StoreUnavailable):
            await store.transact(record_event(50), fail_open=True)
        assert store.write_error is not None
        with pytest.raises(StoreUnavailable):
            await store.transact(record_event(51))
        assert not notified.recorded
    async with open_store_in(tmp_path) as store:
        assert await store.read(lambda tx: tx.stored_approval_mode()) == "off"
        assert await store.transact(record_event(1)) == 1
    assert sum("set-aside" in name for name in file_names(tmp_path)) == 1


async def test_a_group_that_meets_a_full_disk_is_sorted_out_job_by_job(disk: Disk) -> None:
    """The jobs of a group share the failed commit. The store then handles each by itself."""
    async with open_listened_store(disk.folder) as (store, notified):
        with blocked(store):
            futures = [
                store.submit(record_event(each), fail_open=each % 2 == 0) for each in range(40)
            ]
            disk.fill()
        results = await asyncio.gather(*futures, return_exceptions=True)
        refused = [isinstance(result, StoreUnavailable) for result in results]
        assert refused == [number % 2 == 1 for number in range(40)]
        assert [result for result in results if isinstance(result, int)] == list(range(1, 21))
        assert [each.position for each in notified.recorded] == list(range(1, 21))
        await recover(store, disk)
    assert chain_holds(disk.folder / "relay.db") == 20
