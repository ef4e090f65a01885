"""Killed at any instant: what was acknowledged is there, nothing is there by halves, and the chain holds."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from relay.outbox.journal import verify_journal
from tests.outbox.open_store import open_file_in

RECORDING = (sys.executable, "-m", "tests.outbox.record_until_killed")


def look(folder: Path, said: list[str]) -> int:
    """Open what a killed relay left, as the next one would; returns how much it had acknowledged."""
    acknowledged = [line.split() for line in said if line.endswith("\n")]
    path = folder / "relay.db"
    with open_file_in(path) as file:
        assert file.trusted
        count = verify_journal(file.connection)[1]
    assert not [one for one in folder.iterdir() if "set-aside" in one.name]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        positions = {position for (position,) in connection.execute("SELECT position FROM journal")}
        assert positions == set(range(1, count + 1))
        assert {int(number) for what, number in acknowledged if what == "recorded"} <= positions
        halves = connection.execute(
            "SELECT position, count(*) FROM entry GROUP BY position HAVING count(*) != 2"
        ).fetchall()
        assert not halves
        assert connection.execute("SELECT count(DISTINCT position) FROM entry").fetchone() == (
            count,
        )
        delivered = {
            entry
            for (entry,) in connection.execute("SELECT id FROM entry WHERE state = 'delivered'")
        }
        assert {int(number) for what, number in acknowledged if what == "settled"} <= delivered
    return len(acknowledged)


@pytest.mark.skipif(
    shutil.which("strace") is None,
    reason="strace kills at an exact system call; kills at any time are tried in any case",
)
@pytest.mark.parametrize(
    ("begun", "sync"),
    [*((False, sync) for sync in (1, 3, 6, 9)), *((True, sync) for sync in (1, 2, 3, 4, 5, 8, 20))],
)
def test_killed_at_any_sync_nothing_acknowledged_is_lost(
    tmp_path: Path, begun: bool, sync: int
) -> None:
    """Of a fresh file the first dozen are those of making it."""
    if begun:
        with open_file_in(tmp_path / "relay.db"):
            pass
    inject = f"inject=fdatasync,fsync:signal=SIGKILL:when={sync}"
    command = [
        "strace",
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        "trace=fdatasync,fsync",
        "-e",
        inject,
        *RECORDING,
        str(tmp_path),
    ]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
    assert ended.returncode in (-9, 137)
    acknowledged = look(tmp_path, ended.stdout.splitlines(keepends=True))
    assert acknowledged >= (sync - 4 if begun else 0)


@pytest.mark.parametrize("lines", [1, 50, 101, 102, 150, 1000])
def test_killed_at_any_time_nothing_acknowledged_is_lost(tmp_path: Path, lines: int) -> None:
    with subprocess.Popen(
        [*RECORDING, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as recording:
        assert recording.stdout is not None
        said = [recording.stdout.readline() for _ in range(lines)]
        recording.kill()
        said += recording.stdout.readlines()
    assert look(tmp_path, said) >= lines
