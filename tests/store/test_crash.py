"""A relay that is killed at any instant keeps all that it acknowledged and no partial write."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from relay.store.audit import verify_journal
from tests.programs import killed_at_sync, needs_strace
from tests.store.open_store import open_file_in

RECORDING = (sys.executable, "-m", "tests.store.record_until_killed")


def count_acknowledged(folder: Path, output: list[str]) -> int:
    """Check the file of a killed relay. Return how many lines it had acknowledged."""
    acknowledged = [line.split() for line in output if line.endswith("\n")]
    path = folder / "relay.db"
    with open_file_in(path) as state_file:
        assert state_file.trusted
        count = verify_journal(state_file.connection)[1]
    assert not [file for file in folder.iterdir() if "set-aside" in file.name]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        positions = {position for (position,) in connection.execute("SELECT position FROM journal")}
        assert positions == set(range(1, count + 1))
        assert {int(number) for verb, number in acknowledged if verb == "recorded"} <= positions
        incomplete = connection.execute(
            "SELECT position, count(*) FROM entry GROUP BY position HAVING count(*) != 2"
        ).fetchall()
        assert not incomplete
        assert connection.execute("SELECT count(DISTINCT position) FROM entry").fetchone() == (
            count,
        )
        delivered = {
            entry
            for (entry,) in connection.execute("SELECT id FROM entry WHERE state = 'delivered'")
        }
        assert {int(number) for verb, number in acknowledged if verb == "settled"} <= delivered
    return len(acknowledged)


@needs_strace  # kills at any time are tried in any case
@pytest.mark.parametrize(
    ("begun", "sync"),
    [
        *(pytest.param(False, sync, id=f"fresh file, {sync}") for sync in (1, 3, 6, 9)),
        *(pytest.param(True, sync, id=f"old file, {sync}") for sync in (1, 2, 3, 4, 5, 8, 20)),
    ],
)
def test_kills_at_a_sync_lose_nothing_acknowledged(tmp_path: Path, begun: bool, sync: int) -> None:
    """With a fresh file, the first dozen syncs are those that create it."""
    if begun:
        with open_file_in(tmp_path / "relay.db"):
            pass
    command = [*killed_at_sync(sync), *RECORDING, str(tmp_path)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
    assert ended.returncode in (-9, 137)
    acknowledged = count_acknowledged(tmp_path, ended.stdout.splitlines(keepends=True))
    assert acknowledged >= (sync // 5 - 1 if begun else 0)  # commits can precede the output by far


@pytest.mark.parametrize("lines", [1, 50, 101, 102, 150, 1000])
def test_killed_at_any_time_nothing_acknowledged_is_lost(tmp_path: Path, lines: int) -> None:
    with subprocess.Popen(
        [*RECORDING, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as recording:
        assert recording.stdout is not None
        output = [recording.stdout.readline() for _ in range(lines)]
        recording.kill()
        output += recording.stdout.readlines()
    assert count_acknowledged(tmp_path, output) >= lines
