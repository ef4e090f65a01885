"""Opens the state file: checks its schema version and owner, and locks it.

`open_store` calls `open_state_file`; ``imds-relay audit`` and ``doctor`` only read, with
`open_for_reading`. A file that cannot be used is set aside under a new name, and a fresh one
begins, with approvals off. The folder belongs to this user, and nobody else can write in it, so
nobody else puts anything into it. Every file is for this user alone.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import get_args

from relay.errors import StoreError
from relay.files import create_private_folder, current_user, describe_os_error, ensure_private_file
from relay.store import SINGLE_SCOPE, EventKeyFormat, Mode, SinkState, StateFileScopeAndVm
from relay.store.audit import verify_journal
from relay.store.deliveries import Deliveries
from relay.store.fleet import FleetTables
from relay.store.journal import VALUE_ERRORS, Journal
from relay.store.occurrences import Occurrences
from relay.store.rows import get_meta

SCHEMA_VERSION = 3
"""That of ``schema.sql``. A file of another version is refused."""
_APPLICATION_ID = 0x494D4452  # "IMDR"
_SCHEMA = "SELECT type, name, sql FROM sqlite_master WHERE type != 'trigger' AND sql IS NOT NULL"
_log = logging.getLogger(__name__)
_FILE_ERRORS = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_NOMEM,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """The open and locked file.

    ``trusted`` is False if the file belongs to a VM and the relay could not learn its own VM ID.
    ``damaged`` says why approvals are off, as in `relay.store.approvals.Memory`.
    """

    path: Path
    connection: sqlite3.Connection
    lock: sqlite3.Connection
    trusted: bool
    damaged: dict[str | None, str]
    keys: EventKeyFormat = SINGLE_SCOPE

    def close(self) -> None:
        """Close the file, so that another relay can open it, even on a full disk.

        The last connection to close deletes the log and its index, except if it can only read. To
        create them again needs room on the disk, so a reader closes last and they stay. The log
        must be empty: otherwise it would spoil an older copy put in the place of the file.
        """
        reader = None
        with contextlib.suppress(sqlite3.Error, StoreError):
            self.connection.execute("PRAGMA busy_timeout = 0")
            if not self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                reader = open_for_reading(self.path)
        self.connection.close()
        if reader is not None:
            reader.close()
        self.lock.close()


class _UnusableFileError(Exception):
    """The file is set aside. The text continues the sentence "the state file x"."""


def open_state_file(path: Path, identity: StateFileScopeAndVm, now: datetime) -> StateFile:
    """Open or create the state file; blocking.

    A corrupt or foreign file is set aside under a new name, with a warning. The fresh file begins
    with approvals off. Raises StoreError if another relay holds the file, its folder is open to
    others, another version wrote it, or it cannot be opened.
    """
    path = Path(os.path.realpath(path))  # one log and one lock, whatever link leads to it
    lock = _take_lock(path)
    try:
        problem = ""
        for _ in range(2):
            try:
                return _open(path, lock, identity)
            except _UnusableFileError as error:
                # Its text alone. The frames of its traceback hold statements that have not ended,
                # and with them the connection would keep its lock, closed or not.
                problem = str(error)
            # SQLite calls a file corrupt if a page cannot be read: its disk can have failed for a
            # moment. If it still fails, this raises OSError.
            for part in (path, path.with_name(f"{path.name}-wal")):
                with contextlib.suppress(FileNotFoundError), part.open("rb") as file:
                    while file.read(2**20):
                        pass
        aside = _set_aside(path, now)
        _log.warning(
            "the state file %s %s. It was renamed to %s, and a fresh file begins",
            path,
            problem,
            aside,
        )
        return _open(path, lock, identity)
    except Exception as error:
        lock.close()
        if isinstance(error, sqlite3.Error | OSError | _UnusableFileError):
            is_folder = os.path.isdir(path)  # noqa: PTH112  # Path.is_dir can raise
            problem = "it is a folder" if is_folder else _error_text(error)
            raise StoreError(
                f"store.path: expected a file that can be written, {path}: {problem}"
            ) from error
        raise


def open_for_reading(path: Path, option_name: str = "store.path") -> sqlite3.Connection:
    """Open a read-only connection beside a running relay. Raises StoreError if there is no file."""
    connection = None
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None)
        connection.execute("SELECT 1 FROM journal LIMIT 1")
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter is about a broken schema
        if connection is not None:
            connection.close()
        problem = f"expected a relay's state file, {path}: {read_problem(path) or error}"
        raise StoreError(f"{option_name}: {problem}") from error
    return connection


def read_problem(path: Path) -> str | None:
    """Why a file cannot be read; SQLite does not say. None if it can be read."""
    try:
        path.open("rb").close()
    except OSError as error:
        return describe_os_error(error)
    return None


def _require_own_folder(folder: Path) -> None:
    # Whoever can write there can put another file in the place of any.
    create_private_folder(folder)
    if not hasattr(os, "geteuid"):  # Windows has no such rights
        return
    status = folder.stat()
    if status.st_uid != os.geteuid():
        problem = f"{folder} belongs to user {status.st_uid}"
    elif status.st_mode & 0o022:
        problem = f"others can write in {folder}: chmod 700 {folder}"
    else:
        return
    raise StoreError(
        f"store.path: expected a folder of {current_user()} in which nobody else can write, "
        f"{problem}, or name one that is not there yet"
    )


def lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}-lock")


def _take_lock(path: Path) -> sqlite3.Connection:
    # The lock is an exclusive transaction on a second database beside the file. This works on every
    # platform, and the kernel releases it with the process. Other programs, such as the audit, can
    # still read the state file itself.
    lock = None
    try:
        _require_own_folder(path.parent)
        ensure_private_file(lock_path(path))
        lock = sqlite3.connect(
            lock_path(path), isolation_level=None, timeout=0, check_same_thread=False
        )
        if lock.execute("PRAGMA page_count").fetchone()[0] == 0:
            # With a first page, later locks write nothing and work on a full disk.
            lock.execute("PRAGMA user_version = 1")
        lock.execute("BEGIN EXCLUSIVE")
    except (sqlite3.Error, OSError) as error:
        if lock is not None:
            lock.close()
        if isinstance(error, sqlite3.Error) and _result_code(error) == sqlite3.SQLITE_BUSY:
            raise StoreError(
                f"another relay holds {path}: stop it, or give this one a store.path of its own"
            ) from error
        raise StoreError(
            f"store.path: expected a folder that can be written, {path.parent}: "
            f"{_error_text(error)}"
        ) from error
    return lock


def _open(path: Path, lock: sqlite3.Connection, identity: StateFileScopeAndVm) -> StateFile:
    ensure_private_file(path)
    keys = EventKeyFormat(with_scope=identity.is_hub)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA busy_timeout = 5000")  # milliseconds
        # Without this, SQLite can write to the file in the middle of a transaction. A full disk
        # must only show at the commit.
        connection.execute("PRAGMA cache_spill = OFF")
        # A savepoint must not need room on a full disk, either.
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA foreign_keys = ON")
        is_new = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if not is_new:
            _check_owner(connection, identity)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        # All tables appear, or none.
        connection.executescript(f"BEGIN IMMEDIATE; {_schema() if is_new else ''}")
        if is_new:
            _begin_file(connection, path, identity)
        else:
            _require_schema(connection)
            _load(connection, keys)
        # This changes nothing, but fails if the file can only be read.
        connection.execute("UPDATE meta SET value = '' WHERE key = ''")
        owner = get_meta(connection, "vm_id")
        if identity.vm_id is not None and owner is None:
            connection.execute("INSERT INTO meta VALUES ('vm_id', ?)", (identity.vm_id,))
        connection.execute("COMMIT")
        damaged = _find_damage(connection)
    except Exception as error:
        connection.close()
        if isinstance(error, VALUE_ERRORS) or (
            isinstance(error, sqlite3.Error) and _is_damage(path, error)
        ):
            raise _UnusableFileError(f"is corrupt ({error})") from error
        raise
    is_trusted = identity.vm_id is not None or owner is None
    return StateFile(
        path=path, connection=connection, lock=lock, trusted=is_trusted, damaged=damaged, keys=keys
    )


def _is_damage(path: Path, error: sqlite3.Error) -> bool:
    """Whether this error is about what the file holds: SQL that no column of ours fits, too."""
    code = _result_code(error)
    if code == sqlite3.SQLITE_READONLY:  # SQLite says so, too, if the header is broken
        return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    return code in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR}


def _require_schema(connection: sqlite3.Connection) -> None:
    """Check that the tables are those of `schema.sql`: a flipped bit gives a column a new name."""
    with contextlib.closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(_schema())
        found, expected = ({*each.execute(_SCHEMA)} for each in (connection, fresh))
    # The relay works without its triggers, too: they only forbid it to change the journal.
    if missing := expected - found:
        raise _UnusableFileError(f"is corrupt (it has another {' '.join(min(missing)[:2])})")


def _load(connection: sqlite3.Connection, keys: EventKeyFormat) -> None:
    """Read what the relay reads after its start. What that raises says that the file is corrupt."""
    live = Occurrences(connection, keys).live_occurrences()
    for occurrence in live:
        if occurrence.key != keys.make_key(occurrence.scope, occurrence.event.event_id):
            raise ValueError(f"the event {occurrence.key} has another EventId")
    Journal(connection).head().hash.encode()
    deliveries = Deliveries(connection)
    newest_entry = connection.execute("SELECT max(id) FROM entry").fetchone()[0] or 0
    if newest_entry >= deliveries.next_entry_id():
        raise ValueError("the next id of an entry is not new")
    deliveries.waiting_entries()
    for name, (state, _) in deliveries.sink_states().items():
        if state not in get_args(SinkState):
            raise ValueError(f"the sink {name} has the state {state}")
    if keys.with_scope:
        fleet = FleetTables(connection)
        fleet.agents()
        fleet.sightings([occurrence.key for occurrence in live])


def _find_damage(connection: sqlite3.Connection) -> dict[str | None, str]:
    # Later only rows that are looked for are verified. A row can have been removed, or changed so
    # that nobody looks for it. Whose it was is not known.
    try:
        verify_journal(connection)
    except StoreError as error:
        _log.error("approvals are off: %s; see imds-relay audit verify", error)
        return {None: str(error)}
    return {}


def _check_owner(connection: sqlite3.Connection, identity: StateFileScopeAndVm) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
        raise _UnusableFileError("is the database of another program")
    if version == 0:  # nobody writes this: a bit was flipped
        raise _UnusableFileError("is corrupt (it has version 0)")
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"store.path: expected a file of version {SCHEMA_VERSION}, got version {version} of "
            "another relay: run that one, or move the file away"
        )
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise _UnusableFileError(f"is corrupt ({problem})")
    meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    if "scope" not in meta or meta.get("mode") not in get_args(Mode):
        raise _UnusableFileError("is corrupt (its scope or its mode is missing)")
    if (owner := find_other_owner(meta, identity.scope, identity.vm_id)) is not None:
        raise _UnusableFileError(f"belongs to {owner}")
    is_hub = meta.get("role") == "hub"
    if is_hub != identity.is_hub:
        raise _UnusableFileError(f"belongs to a {'hub' if is_hub else 'relay that is no hub'}")


def find_other_owner(meta: Mapping[str, str], scope: str | None, vm_id: str | None) -> str | None:
    """Return whose a file is that is not ours. What is not known is None."""
    owner = meta.get("vm_id")
    if vm_id is not None and owner is not None and owner.lower() != vm_id.lower():
        return "another VM (a cloned image or a restored disk)"
    if scope is not None and meta.get("scope") != scope:
        return f"another scope ({meta.get('scope')})"
    return None


def _begin_file(connection: sqlite3.Connection, path: Path, identity: StateFileScopeAndVm) -> None:
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    # Approvals stay off even if a crash came before the fresh file, or if it was deleted since.
    was_set_aside = any(path.parent.glob(f"{glob.escape(path.name)}.set-aside-*"))
    meta = {"mode": "off" if was_set_aside else "on", "scope": identity.scope}
    if identity.is_hub:
        meta["role"] = "hub"
    connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
    if was_set_aside:
        _log.warning("approvals are off until an operator turns them on: imds-relay approvals on")


def is_file_error(error: Exception) -> bool:
    """Whether the file is at fault, or its disk. Otherwise the work has made a mistake."""
    return isinstance(error, sqlite3.Error) and _result_code(error) in _FILE_ERRORS


def _result_code(error: sqlite3.Error) -> int:
    """Return the primary result code; SQLITE_ERROR for an error of Python's own module."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _error_text(error: Exception) -> str:
    # If there is no room for the index, SQLite reports an I/O error.
    full_disk = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE}
    if getattr(error, "sqlite_errorcode", None) in full_disk:
        return "the disk is full: make room"
    return describe_os_error(error) if isinstance(error, OSError) else str(error)


def _set_aside(path: Path, now: datetime) -> Path:
    timestamp = now.strftime("%Y%m%dT%H%M%S.%fZ")
    new_path = path.with_name(f"{path.name}.set-aside-{timestamp}")
    for suffix in ("-wal", "-shm", ""):
        part = path.with_name(path.name + suffix)
        with contextlib.suppress(FileNotFoundError):
            part.rename(new_path.with_name(new_path.name + suffix))
    return new_path


def _schema() -> str:
    return files("relay.store").joinpath("schema.sql").read_text(encoding="utf-8")
