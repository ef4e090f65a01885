"""Every file of the state is for its user alone, and nobody else keeps the relay from starting."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.errors import StoreError, StoreLocked
from relay.store.file import lock_path
from relay.store.journal import Journal, verify_journal
from tests.store.open_store import append_row, open_file_in, read_column

LOCK_ALL = """
import fcntl, sys
files = [open(path, "rb") for path in sys.argv[2:]]
for file in files:
    if sys.argv[1] == "posix":
        fcntl.lockf(file, fcntl.LOCK_SH)
    else:
        fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
OLD_RELAY = """
import sqlite3, sys
lock = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=0)
lock.execute("PRAGMA user_version = 1")
lock.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    """The rights must not come from the umask."""
    before = os.umask(0)
    yield
    os.umask(before)


@contextlib.contextmanager
def running(program: str, *arguments: object) -> Iterator[None]:
    """Run a program until the end of the context, once it has said that it is ready."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield
        process.communicate()


def rights(folder: Path) -> dict[str, int]:
    """The rights of every file in a folder, by name."""
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def widen(folder: Path) -> None:
    """Give everybody the rights that an older version left them with a umask of 022."""
    for path in folder.iterdir():
        path.chmod(0o644)


@pytest.mark.parametrize("mode", [0o777, 0o1777], ids=["open to all", "sticky"])
def test_every_file_is_private_in_a_folder_that_all_can_write(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    path = tmp_path / "relay.db"
    with open_file_in(path) as file:
        append_row(Journal(file.connection))
        found = rights(tmp_path)
    assert set(found) >= {"relay.db", "relay.db-wal", "relay.db-shm", lock_path(path).name}
    assert set(found.values()) == {0o600}


def test_folders_that_the_relay_creates_are_private(tmp_path: Path) -> None:
    with open_file_in(tmp_path / "not" / "yet" / "relay.db"):
        pass
    for folder in (tmp_path / "not", tmp_path / "not" / "yet"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_files_of_an_older_version_are_narrowed(tmp_path: Path) -> None:
    path = tmp_path / "relay.db"
    with open_file_in(path) as file:
        append_row(Journal(file.connection))
        copy = tmp_path / "copy"
        copy.mkdir()
        for part in tmp_path.glob("relay.db*"):  # as after a kill, with a log
            shutil.copy(part, copy)
    shutil.copy(path, copy / "relay.db.set-aside-20260101T000000.000000Z")
    widen(copy)
    with open_file_in(copy / "relay.db") as file:
        assert verify_journal(file.connection)[1] == 1
        assert set(rights(copy).values()) == {0o600}


def test_a_file_that_is_set_aside_is_private(tmp_path: Path) -> None:
    path = tmp_path / "relay.db"
    path.write_bytes(b"not a database, and long enough to be taken for a broken header" * 10)
    path.chmod(0o644)
    with open_file_in(path):
        found = rights(tmp_path)
    assert any("set-aside" in name for name in found)
    assert set(found.values()) == {0o600}


@pytest.mark.parametrize("kind", ["posix", "flock"])
def test_locks_on_the_readable_files_of_an_older_version_stop_no_start(
    tmp_path: Path, kind: str
) -> None:
    """Whoever could read the files may have locked them before they were narrowed."""
    path = tmp_path / "relay.db"
    with open_file_in(path) as file:
        append_row(Journal(file.connection))
    lock_path(path).rename(tmp_path / "relay.db.lock")
    widen(tmp_path)
    with running(LOCK_ALL, kind, *tmp_path.iterdir()), open_file_in(path) as file:
        append_row(Journal(file.connection))
        assert verify_journal(file.connection)[1] == 2
    assert not (tmp_path / "relay.db.lock").exists()


def test_a_running_relay_of_an_older_version_still_holds_the_file(tmp_path: Path) -> None:
    with running(OLD_RELAY, tmp_path / "relay.db.lock"):
        with (
            pytest.raises(StoreLocked, match="older version, holds"),
            open_file_in(tmp_path / "relay.db"),
        ):
            pass
        assert not (tmp_path / "relay.db").exists()


def wait_until_locked(file: Path, *, by: int | None = None) -> None:
    """Return once a process has locked a file."""
    deadline = time.monotonic() + 30
    owner = "" if by is None else rf" {by} \S+"
    pattern = re.compile(rf"{owner}:{file.stat().st_ino} ")
    while pattern.search(Path("/proc/locks").read_text()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_second_start_leaves_the_lock_of_the_first_in_force(tmp_path: Path) -> None:
    """To close a file releases this process's locks on it: the relay must not open the lock."""
    path = tmp_path / "relay.db"
    start = """
import sys
from pathlib import Path
from tests.store.open_store import open_file_in
with open_file_in(Path(sys.argv[1])):
    pass
"""
    with open_file_in(path):
        with pytest.raises(StoreLocked), open_file_in(path):
            pass
        done = subprocess.run([sys.executable, "-c", start, path], check=False, capture_output=True)
        assert b"another relay holds" in done.stderr


def test_a_relay_that_starts_waits_for_a_doctor_who_reads_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "relay.db"
    with open_file_in(path):
        pass
    start = """
import sys
from pathlib import Path
from relay.store import file
from tests.store.open_store import open_file_in
file.LOCK_TIMEOUT = 60
with open_file_in(Path(sys.argv[1])):
    pass
"""
    lock = lock_path(path)
    with contextlib.closing(sqlite3.connect(lock, isolation_level=None)) as doctor:
        doctor.execute("BEGIN")
        doctor.execute("SELECT count(*) FROM sqlite_master").fetchone()
        with subprocess.Popen([sys.executable, "-c", start, path]) as starting:
            wait_until_locked(lock, by=starting.pid)
            doctor.execute("ROLLBACK")
    assert starting.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["relay.db", "relay.db-wal", "relay.db-shm", "relay.db-lock"])
def test_a_file_of_another_user_is_not_used(tmp_path: Path, name: str) -> None:
    """In a folder that all can write, somebody else may have put it there."""
    planted = tmp_path / name
    planted.touch()
    os.chown(planted, 65534, 65534)
    with (
        pytest.raises(StoreError, match="belongs to another user"),
        open_file_in(tmp_path / "relay.db"),
    ):
        pass
    assert planted.stat().st_size == 0


def test_a_link_of_this_user_leads_to_the_file(tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(tmp_path / "relay.db")
    with open_file_in(link) as file:
        assert file.path == tmp_path / "relay.db"
    assert read_column(tmp_path / "relay.db", "SELECT value FROM meta WHERE key = 'mode'") == ["on"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "private.db", tmp_path / "relay.db"
    link.symlink_to(target)
    os.chown(link, 65534, 65534, follow_symlinks=False)
    with pytest.raises(StoreError, match="a link of user 65534"), open_file_in(link):
        pass
    assert not target.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("way", ["through a link of ours", "in a folder"])
def test_a_link_of_another_user_on_the_way_is_not_followed(tmp_path: Path, way: str) -> None:
    """In a folder that all can write; others cannot put one anywhere else."""
    shared, private = tmp_path / "shared", tmp_path / "private"
    shared.mkdir(0o755)
    private.mkdir()
    planted = shared / "planted"
    if way == "in a folder":
        planted.symlink_to(private)
        path = planted / "relay.db"
    else:
        planted.symlink_to(private / "relay.db")
        path = tmp_path / "ours.db"
        path.symlink_to(Path("private") / ".." / "shared" / "planted")
    os.chown(planted, 65534, 65534, follow_symlinks=False)
    with open_file_in(path) as file:  # root has put it there
        assert file.path == private / "relay.db"
    shared.chmod(0o1777)
    with pytest.raises(StoreError, match="planted is a link of user 65534"), open_file_in(path):
        pass


def test_a_file_with_two_names_is_not_used(tmp_path: Path) -> None:
    """Two relays could hold it: each name has a lock and a log of its own."""
    (tmp_path / "copy").mkdir()
    path, other = tmp_path / "relay.db", tmp_path / "copy" / "relay.db"
    with open_file_in(path):
        os.link(path, other)
        with pytest.raises(StoreError, match="other names"), open_file_in(other):
            pass
    with pytest.raises(StoreError, match="other names"), open_file_in(path):
        pass
    other.unlink()
    with open_file_in(path):
        pass


@pytest.mark.parametrize("name", ["relay.db", "relay.db-wal", "relay.db-shm", "relay.db-lock"])
def test_a_file_under_another_name_is_not_overwritten(tmp_path: Path, name: str) -> None:
    path, precious = tmp_path / "relay.db", tmp_path / "precious"
    with open_file_in(path):
        pass
    precious.write_bytes(b"precious " * 2000)
    precious.chmod(0o644)
    (tmp_path / name).unlink(missing_ok=True)
    os.link(precious, tmp_path / name)
    with pytest.raises(StoreError, match="other names"), open_file_in(path):
        pass
    assert precious.read_bytes() == b"precious " * 2000
    assert rights(tmp_path)["precious"] == 0o644


@pytest.mark.parametrize("name", ["relay.db-wal", "relay.db-lock"])
def test_a_link_in_the_place_of_a_part_is_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").touch(0o644)
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(StoreError, match="no regular file"),
        open_file_in(tmp_path / "relay.db"),
    ):
        pass
    assert rights(tmp_path)["elsewhere"] == 0o644
