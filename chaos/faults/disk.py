"""The disk of the state file is full, cannot be written, or fails to sync; somebody locks it."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from chaos.faults import Fault, Place, under_load
from chaos.trial import Trial, Wiring
from tests.store.conftest import SmallDisk, small_disk

FULL_FOR = 3.0
"""Seconds without room on the disk."""
LOCKED_FOR = 2.0
"""Seconds in which another program holds the write lock of the state file."""
DISK_SIZE = "32m"
MOST_SYNCS = 60
"""The sync that fails is one of the first so many after a start."""


@asynccontextmanager
async def _on_small_disk(place: Place) -> AsyncIterator[Wiring]:
    with small_disk(place.folder / "disk", DISK_SIZE) as disk:
        yield Wiring(store=disk.folder / "relay.db")


async def _fill(running: Trial) -> None:
    disk = SmallDisk(running.process.store.parent)
    await asyncio.to_thread(disk.fill)
    await asyncio.sleep(FULL_FOR)
    disk.free()
    await running.load.wait_until_busy(1)


async def _lock(running: Trial) -> None:
    await asyncio.to_thread(_hold_write_lock, running.process.store)
    await running.load.wait_until_busy(1)


def _hold_write_lock(file: Path) -> None:
    with closing(sqlite3.connect(file, isolation_level=None, timeout=10)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        time.sleep(LOCKED_FOR)
        connection.execute("ROLLBACK")


async def _fail_sync(running: Trial) -> None:
    await running.process.kill()
    number = running.chance.randrange(1, MOST_SYNCS)
    trace = ("-e", "trace=fdatasync,fsync")
    inject = ("-e", f"inject=fdatasync,fsync:error=EIO:when={number}")
    running.process.prefix = ("strace", "-D", "-f", "-qq", "-o", "/dev/null", *trace, *inject)
    await running.process.start(ready=False)
    await running.load.wait_until_busy(2)


async def _be_read_only(running: Trial) -> None:
    """Start the relay where its folder is mounted without the right to write."""
    folder = str(running.process.store.parent)
    mount = f'mount --bind "{folder}" "{folder}" && mount -o remount,ro,bind "{folder}"'
    await running.process.kill()
    running.process.prefix = ("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh")
    await running.process.start(ready=False)
    await asyncio.sleep(FULL_FOR)
    await running.process.kill()
    running.process.prefix = ()
    await running.process.start(ready=False)
    await running.load.wait_until_busy(1)


FAULTS = (
    Fault(
        name="disk-full",
        text=f"the disk of the state file is full for {FULL_FOR:g} s",
        quick=2,
        full=20,
        run=under_load(_fill, _on_small_disk),
        needs="root",
    ),
    Fault(
        name="sync-fails",
        text="a sync of the state file fails with an error of the disk",
        quick=3,
        full=30,
        run=under_load(_fail_sync),
        needs="strace",
    ),
    Fault(
        name="store-locked",
        text=f"another program holds the write lock of the state file for {LOCKED_FOR:g} s",
        quick=2,
        full=20,
        run=under_load(_lock),
    ),
    Fault(
        name="store-read-only",
        text="the relay is started where it cannot write its state file, and later where it can",
        quick=1,
        full=10,
        run=under_load(_be_read_only),
        needs="root",
    ),
)
