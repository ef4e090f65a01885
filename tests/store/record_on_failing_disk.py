"""A program that records with little memory while its large state file cannot be written.

It prints how many MB the file has, and by how many its own memory grew. `test_store_failing` runs
it: a limit on memory is for a whole process.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.eventually import eventually
from tests.store.conftest import LimitedDisk
from tests.store.open_store import numbered_event, open_file_in, open_store_in, record_event

ROOM = 32 * 2**20
"""Bytes that the program may take from when the file cannot be written."""
_FILL_JOURNAL = """
WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < ?)
INSERT INTO journal SELECT n, '2026-04-11T22:26:58.000000Z', 'event.updated', 'e-' || n / 5, NULL,
CAST(printf('%-400s', '{}') AS BLOB), printf('%064x', n) FROM number
"""


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    disk = LimitedDisk(folder)
    disk.fill()
    try:
        yield
    finally:
        disk.free()


@contextlib.contextmanager
def lock_of_another_program(folder: Path) -> Iterator[None]:
    with contextlib.closing(
        sqlite3.connect(folder / "relay.db", isolation_level=None)
    ) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


def memory_now() -> tuple[int, int]:
    """Return how many bytes the process has, of addresses and in memory."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


async def main(folder: Path, failure: str, rows: int) -> None:
    path = folder / "relay.db"
    with open_file_in(path) as file:
        file.connection.execute("PRAGMA synchronous = OFF")
        file.connection.execute(_FILL_JOURNAL, (rows,))
    failing = {"full disk": full_disk, "lock": lock_of_another_program}[failure]
    async with open_store_in(folder) as store:
        # Five seconds are long for a test.
        await store.read(lambda tx: tx.connection.execute("PRAGMA busy_timeout = 50"))
        size, before = memory_now()
        resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, resource.RLIM_INFINITY))
        with failing(folder):
            position = await store.transact(record_event(1), fail_open=True)
            assert position == rows + 1, "the chain goes on"
            head = await store.read(lambda tx: tx.journal.events_after(rows, 9))
            assert [event.id for _, event in head] == [numbered_event(1).id]
            oldest = await store.read(lambda tx: tx.journal.bodies_at_positions([1, 2]))
            assert len(oldest) == 2, "what is old is read from the file"
            grown = memory_now()[1] - before
        await eventually(lambda: store.write_error is None)
        assert await store.transact(record_event(2)) == rows + 2
    print(path.stat().st_size // 2**20, grown // 2**20)  # noqa: T201  # the test reads it


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
