"""The identity of the state file, and files that are broken, foreign, too new or in use."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from relay.errors import StoreError
from relay.store import StateFileScopeAndVm, StoreSettings
from relay.store.audit import verify_journal
from relay.store.diagnostics import diagnose
from relay.store.file import SCHEMA_VERSION, lock_path, open_for_reading, open_state_file
from relay.store.journal import Journal
from relay.store.transaction import Transaction
from tests.depth import depth
from tests.programs import needs_strace
from tests.store.open_store import (
    IDENTITY,
    NOW,
    add_occurrence,
    append_row,
    numbered_event,
    open_file_in,
    read_column,
)

HOLD = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from relay.store import StateFileScopeAndVm
from relay.store.file import open_state_file
file = open_state_file(Path(sys.argv[1]), StateFileScopeAndVm("scope", None), datetime.now(UTC))
print("open", flush=True)
sys.stdin.read()
"""


def mode(path: Path) -> str:
    values: list[str] = read_column(path, "SELECT value FROM meta WHERE key = 'mode'")
    return values[0]


def set_aside(path: Path) -> list[Path]:
    """Return the files that were set aside for a path, the oldest first."""
    return sorted(
        file
        for file in path.parent.glob(f"{path.name}.set-aside-*")
        if not file.name.endswith(("-wal", "-shm"))
    )


def begin(path: Path, identity: StateFileScopeAndVm = IDENTITY) -> None:
    """A state file with a row in it, closed in good order."""
    with open_file_in(path, identity) as file:
        append_row(Journal(file.connection))


def opened_afresh(path: Path) -> Path:
    """Open a file that cannot be used, whose place a fresh one takes; return where it is now."""
    with open_file_in(path) as file:
        assert verify_journal(file.connection)[1] == 0
        assert file.trusted
    assert mode(path) == "off"
    (aside,) = set_aside(path)
    return aside


def test_a_fresh_file_is_ours_durable_and_on(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "there" / "relay.db"
    with open_file_in(path) as file:
        assert file.trusted
        settings_ = {
            name: file.connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous")
        }
        assert settings_ == {"journal_mode": "wal", "synchronous": 2}
        assert verify_journal(file.connection)[1] == 0
    assert mode(path) == "on"
    scope_and_vm = read_column(path, "SELECT value FROM meta WHERE key != 'mode' ORDER BY key")
    assert scope_and_vm == [IDENTITY.scope, IDENTITY.vm_id]


def test_the_schema_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """A kill at any statement of the schema leaves an empty file. The next start creates it."""
    path, parts = tmp_path / "relay.db", "SELECT count(*) FROM sqlite_schema WHERE sql IS NOT NULL"
    with open_file_in(path) as file:
        (count,) = file.connection.execute(parts).fetchone()
    dying_relay = """
import os, signal, sqlite3, sys
from datetime import UTC, datetime
from pathlib import Path
from relay.store import StateFileScopeAndVm
from relay.store.file import open_state_file
class Dying(sqlite3.Connection):
    left = int(sys.argv[2])
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.set_trace_callback(self.count)
    def count(self, statement):
        if "CREATE" in statement or "INSERT" in statement or statement == "COMMIT":
            Dying.left -= 1
            if Dying.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
connect = sqlite3.connect
sqlite3.connect = lambda *given, **named: connect(*given, factory=Dying, **named)
open_state_file(Path(sys.argv[1]), StateFileScopeAndVm("scope", None), datetime.now(UTC))
"""
    for number in (1, 2, count // 2, count, count + 2):
        dying = tmp_path / f"{number}.db"
        ended = subprocess.run([sys.executable, "-c", dying_relay, dying, str(number)], check=False)
        assert ended.returncode == -9
        assert read_column(dying, "SELECT count(*) FROM sqlite_schema") == [0]
        with open_file_in(dying) as file:
            assert file.connection.execute(parts).fetchone() == (count,)
        assert (mode(dying), set_aside(dying)) == ("on", [])


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda data: os.urandom(len(data)),
    "cut after the header": lambda data: data[:100],
    "cut in half": lambda data: data[: len(data) // 2],
    "zeroes in the middle": lambda data: data[:4096] + bytes(8192) + data[12288:],
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_corrupt_file_is_set_aside_untouched_and_a_fresh_one_begins_off(
    tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "relay.db"
    begin(path)
    content = BROKEN[broken](path.read_bytes())
    path.write_bytes(content)
    aside = opened_afresh(path)
    assert aside.read_bytes() == content
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert "is corrupt" in warnings[0]
    assert str(aside) in warnings[0]
    assert "imds-relay approvals on" in warnings[1]


def test_the_log_of_a_file_that_somebody_else_has_open_is_set_aside_with_it(tmp_path: Path) -> None:
    """The rows of the log are not in the file yet, and they do not belong to the fresh file."""
    path = tmp_path / "relay.db"
    begin(path, StateFileScopeAndVm("another-scope", None))
    with contextlib.closing(sqlite3.connect(path)) as shell:
        shell.execute("CREATE TABLE note (text TEXT)")
        aside = opened_afresh(path)
        assert Path(f"{aside}-wal").stat().st_size
    assert read_column(aside, "SELECT name FROM sqlite_schema WHERE name = 'note'") == ["note"]


def test_a_log_that_holds_everything_restores_a_broken_file(tmp_path: Path) -> None:
    """SQLite restores it. The relay sets no usable file aside."""
    path, copy = tmp_path / "one" / "relay.db", tmp_path / "two" / "relay.db"
    copy.parent.mkdir()
    with open_file_in(path) as file:
        append_row(Journal(file.connection))
        shutil.copy(f"{path}-wal", f"{copy}-wal")
    copy.write_bytes(b"broken")
    with open_file_in(copy) as file:
        assert verify_journal(file.connection)[1] == 1
    assert not set_aside(copy)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "relay.db"
    begin(path)
    return path


FLIPS = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=depth(150, 25),
)


@contextlib.contextmanager
def written(factory: pytest.TempPathFactory, data: bytearray) -> Iterator[Path]:
    """A state file with this content, which is gone afterwards with all that came of it."""
    folder = factory.mktemp("flips")
    (folder / "relay.db").write_bytes(data)
    yield folder / "relay.db"
    shutil.rmtree(folder)


@FLIPS
@given(flips=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 7)), min_size=1, max_size=3))
@example(flips=[(18, 2)])  # says that it can only be read
@example(flips=[(47, 0)])  # a format that SQLite does not know
@example(flips=[(60, 0)])  # the version: newer than ours
@example(flips=[(63, 0)])  # the version: none
@example(flips=[(71, 0)])  # whose it is
def test_flipped_bits_in_the_header_never_harm_more_than_the_file(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    """The relay uses the file, sets it aside unchanged, or refuses it as of another version."""
    data = bytearray(whole.read_bytes())
    for byte, bit in flips:
        data[byte] ^= 1 << bit
    with written(tmp_path_factory, data) as path:
        try:
            with open_file_in(path) as file:
                count = verify_journal(file.connection)[1]
                append_row(Journal(file.connection))
        except StoreError:
            assert path.read_bytes() == data
            return
        aside = [copy.read_bytes() for copy in set_aside(path)]
        assert (count, mode(path), aside) in ((1, "on", []), (0, "off", [bytes(data)]))


@FLIPS
@given(seed=st.randoms(use_true_random=False), count=st.integers(1, 40))
def test_flipped_bytes_anywhere_never_keep_a_relay_from_starting(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, seed: Random, count: int
) -> None:
    """A schema whose names are not valid text causes errors that cannot be decoded."""
    data = bytearray(whole.read_bytes())
    for _ in range(count):
        data[100 + seed.randrange(len(data) - 100)] = seed.randrange(256)
    with written(tmp_path_factory, data) as path:
        with open_file_in(path):
            pass
        assert mode(path) == ("off" if set_aside(path) else "on")
        assert all(copy.read_bytes() == data for copy in set_aside(path))


def test_somebody_elses_database_is_set_aside_with_all_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "relay.db"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE songs (title TEXT)")
        other.execute("INSERT INTO songs VALUES ('So What')")
        other.commit()
    assert read_column(opened_afresh(path), "SELECT title FROM songs") == ["So What"]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(StateFileScopeAndVm(IDENTITY.scope, "another-vm"), id="vm"),
        pytest.param(StateFileScopeAndVm("another-scope", IDENTITY.vm_id), id="scope"),
        pytest.param(StateFileScopeAndVm("another-scope", None), id="scope, with no vm to compare"),
        pytest.param(StateFileScopeAndVm(IDENTITY.scope, IDENTITY.vm_id, is_hub=True), id="hub"),
    ],
)
def test_another_ones_file_is_set_aside(tmp_path: Path, other: StateFileScopeAndVm) -> None:
    """A cloned disk would send another VM's notices again, and its votes would count for this VM.

    See docs/protocol.md#a-copied-disk.
    """
    path = tmp_path / "relay.db"
    begin(path, other)
    assert read_column(opened_afresh(path), "SELECT count(*) FROM journal") == [1]
    with open_file_in(path) as file:
        assert file.trusted
    assert len(set_aside(path)) == 1


def test_two_that_are_set_aside_do_not_overwrite_each_other(tmp_path: Path) -> None:
    path = tmp_path / "relay.db"
    for number in range(2):
        path.write_bytes(b"broken %d" % number)
        with open_file_in(path, now=NOW + timedelta(microseconds=number)):
            pass
    assert [copy.read_bytes() for copy in set_aside(path)] == [b"broken 0", b"broken 1"]


def test_a_crash_between_setting_aside_and_a_new_file_leaves_approvals_off(tmp_path: Path) -> None:
    path = tmp_path / "relay.db"
    path.write_bytes(b"broken")
    with open_file_in(path):
        pass
    for file in tmp_path.glob("relay.db*"):
        if "set-aside" not in file.name:
            file.unlink()  # a crash between the two steps leaves this
    with open_file_in(path) as opened:
        assert mode(path) == "off"
        opened.connection.execute("UPDATE meta SET value = 'on' WHERE key = 'mode'")
    with open_file_in(path):
        pass
    assert mode(path) == "on", "the switch of an operator outlives the next start"


def test_the_file_of_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "relay.db"
    begin(path)
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    content = path.read_bytes()
    for _ in range(2):  # the lock is free again
        with pytest.raises(
            StoreError,
            match=f"expected a file of version {SCHEMA_VERSION}, got version {SCHEMA_VERSION + 1} "
            "of another relay: run that one, or move the file away",
        ):
            open_state_file(path, IDENTITY, NOW)
    assert (path.read_bytes(), set_aside(path)) == (content, [])


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM meta WHERE key = 'mode'",
        "DELETE FROM meta WHERE key = 'scope'",
        "DROP TABLE meta",
        "PRAGMA user_version = 0",
        "UPDATE occurrence SET data = replace(data, 'eventSource', 'eventSourcf')",
        "UPDATE occurrence SET data = replace(data, '\"E-1\"', '\"E-3\"')",
        "UPDATE sink SET state = 'oo'",
        "UPDATE sqlite_sequence SET seq = 0 WHERE name = 'entry'",
        "UPDATE entry SET recorded = '2026x'",
        "UPDATE journal SET hash = CAST(hash AS BLOB)",
        "ALTER TABLE journal RENAME COLUMN at TO au",
    ],
)
def test_a_file_that_the_start_cannot_read_is_set_aside(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "relay.db"
    with open_file_in(path) as file:
        tx = Transaction(file.connection, lambda _: ("chat",))
        add_occurrence(tx, "e-1")
        for number in (1, 2, 3):  # a row that cannot be read is not the last of its query
            tx.record(numbered_event(number), NOW)
        tx.deliveries.set_sink_state("chat", "on")
    with open_file_in(path):
        assert not set_aside(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TRIGGER journal_is_append_only")
        connection.execute(statement)
        connection.commit()
    opened_afresh(path)


def test_a_second_relay_of_the_same_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "relay.db"
    (tmp_path / "by-another-name.db").symlink_to(path)
    with open_file_in(path) as file:
        for name in ("relay.db", "by-another-name.db"):
            for identity in (IDENTITY, StateFileScopeAndVm("another-scope", None)):
                with pytest.raises(StoreError, match="another relay holds"):
                    open_state_file(tmp_path / name, identity, NOW)
        # To close a file releases this process's locks on it: no try may have opened the lock.
        second = [sys.executable, "-c", HOLD, str(path)]
        done = subprocess.run(second, check=False, capture_output=True, stdin=subprocess.DEVNULL)
        assert b"another relay holds" in done.stderr
        assert not set_aside(path)
        assert verify_journal(file.connection)[1] == 0
    with open_file_in(path):
        pass


def test_a_second_process_is_refused_until_the_first_is_gone_in_any_way(tmp_path: Path) -> None:
    path = tmp_path / "relay.db"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(StoreError, match="another relay holds"):
            open_state_file(path, StateFileScopeAndVm("scope", None), NOW)
        holder.kill()
        holder.wait()
        with open_file_in(path, StateFileScopeAndVm("scope", None)) as file:
            assert file.trusted


def test_a_store_bound_to_a_vm_is_not_trusted_where_none_can_be_told(tmp_path: Path) -> None:
    path = tmp_path / "relay.db"
    nobody = StateFileScopeAndVm(IDENTITY.scope, None)
    with open_file_in(path, nobody) as file:
        assert file.trusted
    with open_file_in(path, IDENTITY) as file:  # binds it
        assert file.trusted
    with open_file_in(path, nobody) as file:
        assert not file.trusted
    with open_file_in(
        path, StateFileScopeAndVm(IDENTITY.scope, str(IDENTITY.vm_id).upper())
    ) as file:
        assert file.trusted
    assert not set_aside(path)


@pytest.mark.parametrize("place", ["under a file", "a lock that is none"])
def test_what_cannot_be_opened_says_so(tmp_path: Path, place: str) -> None:
    path = tmp_path / "relay.db"
    if place == "under a file":
        path.touch()
        path = path / "relay.db"
    else:
        lock_path(path).write_bytes(os.urandom(5000))
    with pytest.raises(
        StoreError, match=r"store\.path: expected a (file|folder) that can be written"
    ):
        open_state_file(path, IDENTITY, NOW)


@needs_strace
@pytest.mark.parametrize("read", [5, 8, 12, 20, 30])
def test_a_sound_file_is_kept_though_its_disk_fails_for_a_moment(tmp_path: Path, read: int) -> None:
    """SQLite says of a page that it could not read that the file is malformed."""
    path = tmp_path / "relay.db"
    begin(path, StateFileScopeAndVm("scope", None))
    # -D: strace runs detached, so the process that is started is the program itself.
    strace = ("strace", "-D", "-f", "-qq", "-o", tmp_path / "calls", "-P", path)
    inject = ("-e", "trace=pread64,read", "-e", f"inject=pread64,read:error=EIO:when={read}")
    subprocess.run(
        [*strace, *inject, sys.executable, "-c", HOLD, path],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,  # opening it may fail, too: the service manager tries again
    )
    assert "EIO" in (tmp_path / "calls").read_text(encoding="utf-8")
    assert (set_aside(path), mode(path)) == ([], "on")


def test_a_reader_sees_a_running_relay_and_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "relay.db"
    with open_file_in(path) as file:
        append_row(Journal(file.connection))
        with contextlib.closing(open_for_reading(path)) as reader:
            assert verify_journal(reader)[1] == 1
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                reader.execute("DELETE FROM meta")
    with contextlib.closing(open_for_reading(path)) as reader:  # and when it is not running
        assert verify_journal(reader)[1] == 1


def test_a_folder_in_the_place_of_the_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "relay.db").mkdir()
    with pytest.raises(StoreError, match=r"store\.path: .*relay\.db: it is a folder"):
        open_state_file(tmp_path / "relay.db", IDENTITY, NOW)
    (finding,) = (
        each
        for each in diagnose(StoreSettings(path=tmp_path / "relay.db"), scope=None, vm_id=None)
        if each.about == "state file"
    )
    assert finding.remedy == "name a file in store.path"


@pytest.mark.parametrize("content", [None, b"no database at all" * 99, b""])
def test_a_reader_needs_a_state_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "relay.db"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StoreError, match="expected a relay's state file"):
        open_for_reading(path)
    assert path.exists() == (content is not None)
