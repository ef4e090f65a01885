"""Opens the state file: its version, whose it is, and what happens to one that is not ours or is broken."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import sqlite3
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import get_args

from relay.errors import StoreError, StoreLocked, StoreTooNew
from relay.files import reason
from relay.outbox import Identity, Mode

SCHEMA_VERSION = 2
"""Of the tables, each version of which is a file in ``schema/``: a file of an older one gets what it lacks."""
MIN_SQLITE_VERSION = (3, 33)
"""The oldest SQLite that knows UPDATE … FROM; RHEL 9 has 3.34, which rules out STRICT tables and RETURNING."""
_APPLICATION = 0x494D4452  # "IMDR"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StateFile:
    """The open file. ``trusted`` is False where a store that is bound to a VM could not be compared with this one."""

    path: Path
    connection: sqlite3.Connection
    lock: sqlite3.Connection
    trusted: bool

    def close(self) -> None:
        """Close the file and let another relay have it; the next can open it on a full disk too."""
        with contextlib.ExitStack() as last:
            with contextlib.suppress(sqlite3.Error, StoreError):
                self._empty_log()
                last.enter_context(contextlib.closing(open_for_reading(self.path)))
            self.connection.close()
        self.lock.close()

    def _empty_log(self) -> None:
        # The one that is the last to close removes log and index, unless it may only read; to make them anew takes room on the
        # disk. They stay, empty: a log with something in it would spoil an older copy that is put in the file's place.
        self.connection.execute("PRAGMA busy_timeout = 0")
        if self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            raise StoreError("somebody else has the file open, and so it all stays")


class _NotOurs(Exception):
    """The file cannot be used; the text goes on from "the state file x"."""


def open_state_file(path: Path, identity: Identity, now: datetime) -> StateFile:
    """Open the file, or begin one; blocking.

    A corrupt or foreign file is set aside under a new name, loudly, and the fresh one begins with approvals off. Raises
    StoreLocked when another relay holds it, StoreTooNew when a newer version wrote it, StoreError when it cannot be opened.
    """
    if sqlite3.sqlite_version_info < MIN_SQLITE_VERSION:
        raise StoreError(
            f"expected a Python with SQLite {MIN_SQLITE_VERSION[0]}.{MIN_SQLITE_VERSION[1]} or newer, this one has {sqlite3.sqlite_version}: use a newer one"
        )
    path = path.resolve()  # where SQLite puts its log, and one lock however the file is called
    lock = _lock(path)
    try:
        try:
            connection, trusted = _open(path, identity)
        except _NotOurs as wrong:
            _log.warning(
                "the state file %s %s. It is now %s, and a fresh one is begun",
                path,
                wrong,
                _set_aside(path, now),
            )
            connection, trusted = _open(path, identity)
    except (sqlite3.Error, OSError, _NotOurs) as error:
        lock.close()
        raise StoreError(
            f"store.path: expected a file that can be written, {path}: {_said(error)}"
        ) from error
    except Exception:
        lock.close()
        raise
    return StateFile(path, connection, lock, trusted)


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A second, read-only connection, for the audit; works beside a running relay. Raises StoreError where there is none."""
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None
        )
        try:
            connection.execute("SELECT 1 FROM journal LIMIT 1")
        except sqlite3.Error:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise StoreError(
            f"store.path: expected a relay's state file, {path}: {_why_unreadable(path) or error}"
        ) from error
    return connection


def _why_unreadable(path: Path) -> str | None:
    try:
        path.open("rb").close()  # SQLite does not say why it cannot
    except OSError as error:
        return reason(error)
    return None


def _lock(path: Path) -> sqlite3.Connection:
    # An exclusive transaction on a database of its own beside the file: a lock that works on every platform and that the
    # kernel drops with the process. The state file itself stays open to readers such as the audit.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = sqlite3.connect(
            f"{path}.lock", isolation_level=None, timeout=0, check_same_thread=False
        )
    except (sqlite3.Error, OSError) as error:
        raise StoreError(
            f"store.path: expected a folder that can be written, {path.parent}: {error}"
        ) from error
    try:
        if lock.execute("PRAGMA page_count").fetchone()[0] == 0:
            lock.execute(
                "PRAGMA user_version = 1"
            )  # with a first page, locking it writes nothing: it works on a full disk
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        lock.close()
        if _code(error) == sqlite3.SQLITE_BUSY:
            raise StoreLocked(
                f"another relay holds {path}: stop it, or give this one a store.path of its own"
            ) from error
        raise StoreError(
            f"store.path: expected a folder that can be written, {path.parent}: {_said(error)}"
        ) from error
    return lock


def _open(path: Path, identity: Identity) -> tuple[sqlite3.Connection, bool]:
    """The file, checked and with its tables, and whether it is to be trusted. Raises _NotOurs, StoreTooNew, sqlite3.Error."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    broken = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR}
    try:
        connection.execute("PRAGMA busy_timeout = 5000")
        # A spill would write to the file in the middle of a transaction: a full disk is to be met at the commit.
        connection.execute("PRAGMA cache_spill = OFF")
        connection.execute("PRAGMA foreign_keys = ON")
        version = _check(connection, identity)
        broken.remove(sqlite3.SQLITE_ERROR)  # after this it would be a mistake in our own SQL
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")  # the tables appear whole or not at all
        _make_tables(connection, version)
        if not version:
            _begin(connection, "off" if _set_aside_before(path) else "on")
        connection.execute(
            "UPDATE meta SET value = '' WHERE key = ''"
        )  # changes nothing; a file that can only be read says so
        bound = _meta(connection, "vm_id")
        if identity.vm_id is not None and bound is None:
            connection.execute("INSERT INTO meta VALUES ('vm_id', ?)", (identity.vm_id,))
        if not version:
            connection.execute("INSERT INTO meta VALUES ('scope', ?)", (identity.scope,))
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        connection.close()
        if _code(error) in broken or _claims_to_be_read_only(path, error):
            raise _NotOurs(f"is corrupt ({error})") from error
        raise
    except UnicodeDecodeError as error:  # names in a broken schema
        connection.close()
        raise _NotOurs(f"is corrupt ({error})") from error
    except Exception:
        connection.close()
        raise
    return connection, identity.vm_id is not None or bound is None


def _check(connection: sqlite3.Connection, identity: Identity) -> int:
    """The version of its tables, 0 for a file that is still empty. Raises _NotOurs, StoreTooNew, sqlite3.Error, UnicodeDecodeError."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        return 0
    if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
        raise _NotOurs("is a database of something else")
    if version > SCHEMA_VERSION:
        raise StoreTooNew(
            f"store.path: expected a file of version {SCHEMA_VERSION} or older, a newer relay wrote version {version}; update this one"
        )
    if version < 1:
        raise _NotOurs(f"is corrupt (it has version {version})")
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise _NotOurs(f"is corrupt ({problem})")
    vm_id, scope, mode = (_meta(connection, key) for key in ("vm_id", "scope", "mode"))
    if scope is None or mode not in get_args(Mode):
        raise _NotOurs("is corrupt (it does not say whose it is)")
    if identity.vm_id is not None and vm_id is not None and vm_id.lower() != identity.vm_id.lower():
        raise _NotOurs("belongs to another VM (a cloned image or a restored disk)")
    if scope != identity.scope:
        raise _NotOurs(f"belongs to another scope ({scope})")
    return int(version)


def _make_tables(connection: sqlite3.Connection, version: int) -> None:
    """What the versions after this one have added."""
    for later in range(version + 1, SCHEMA_VERSION + 1):
        for statement in _statements(
            files("relay.outbox").joinpath("schema", f"{later}.sql").read_text(encoding="utf-8")
        ):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {later}")


def _begin(connection: sqlite3.Connection, mode: str) -> None:
    connection.execute("INSERT INTO meta VALUES ('mode', ?)", (mode,))
    connection.execute(f"PRAGMA application_id = {_APPLICATION}")
    if mode == "off":
        _log.warning("approvals are off until an operator turns them on: imds-relay approvals on")


def _meta(connection: sqlite3.Connection, key: str) -> str | None:
    found = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return found[0] if found else None


def _code(error: sqlite3.Error) -> int:
    """The primary result code; SQLITE_ERROR for what Python's own module complains of."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _said(error: Exception) -> str:
    # Where there is no room for the index, SQLite speaks of an I/O error.
    full = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE}
    return (
        "the disk is full: make room"
        if getattr(error, "sqlite_errorcode", None) in full
        else str(error)
    )


def _claims_to_be_read_only(path: Path, error: sqlite3.Error) -> bool:
    # A broken header can say so of a file that everybody may write.
    return (
        _code(error) == sqlite3.SQLITE_READONLY
        and os.access(path, os.W_OK)
        and os.access(path.parent, os.W_OK)
    )


def _set_aside(path: Path, now: datetime) -> Path:
    stamp = now.strftime("%Y%m%dT%H%M%S.%fZ")
    aside = path.with_name(f"{path.name}.set-aside-{stamp}")
    for suffix in ("-wal", "-shm", ""):
        part = path.with_name(path.name + suffix)
        with contextlib.suppress(FileNotFoundError):
            part.rename(aside.with_name(aside.name + suffix))
    return aside


def _set_aside_before(path: Path) -> bool:
    # Also when a crash came between setting aside and beginning afresh, or somebody has removed the fresh one.
    return any(path.parent.glob(f"{glob.escape(path.name)}.set-aside-*"))


def _statements(script: str) -> list[str]:
    # executescript would commit first; a schema must appear whole or not at all.
    statements, current = [], ""
    for line in script.splitlines(keepends=True):
        current += line
        if sqlite3.complete_statement(current):
            statements.append(current)
            current = ""
    return statements
