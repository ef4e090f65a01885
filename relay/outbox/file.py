"""Opens the state file: its version, whose it is, and what happens to one that is not ours or is broken."""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from relay.errors import StoreError, StoreLocked, StoreTooNew
from relay.outbox import Identity

VERSION = 1
_APPLICATION = 0x494D4452  # "IMDR"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """The open file. ``trusted`` is False where a store that is bound to a VM could not be compared with this one."""

    connection: sqlite3.Connection
    lock: sqlite3.Connection
    trusted: bool

    def close(self) -> None:
        """Close the file and let another relay have it."""
        self.connection.close()
        self.lock.close()


def open_file(path: Path, identity: Identity, now: datetime) -> Opened:
    """Open the file, or begin one; blocking.

    A corrupt or foreign file is set aside under a new name, loudly, and the fresh one begins with approvals off. Raises
    StoreLocked when another relay holds it, StoreTooNew when a newer version wrote it, StoreError when it cannot be opened.
    """
    lock = _lock(path)
    try:
        connection = _connect(path)
        wrong = _what_is_wrong(connection, identity)
        if wrong is not None:
            connection.close()
            aside = _set_aside(path, now)
            _log.warning(
                "the state file %s %s. It is now %s and a fresh one was begun. Approvals are off until an operator turns them on: "
                "imds-relay approvals on",
                path,
                wrong,
                aside,
            )
            connection = _connect(path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            _migrate(connection, "off" if wrong else "on")
            bound = dict(connection.execute("SELECT key, value FROM meta WHERE key = 'vm_id'")).get("vm_id")
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('scope', ?)", (identity.scope,))
            if identity.vm_id is not None:
                connection.execute("INSERT OR REPLACE INTO meta VALUES ('vm_id', ?)", (identity.vm_id,))
    except (sqlite3.Error, OSError) as error:
        lock.close()
        raise StoreError(f"store.path: expected a file that can be written, {path}: {error}") from error
    except StoreError:
        lock.close()
        raise
    return Opened(connection, lock, trusted=identity.vm_id is not None or bound is None)


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A second, read-only connection, for the audit; works beside a running relay. Raises StoreError where there is none."""
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        connection.execute("SELECT 1 FROM journal LIMIT 1")
    except sqlite3.Error as error:
        raise StoreError(f"store.path: expected a relay's state file, {path}: {error}") from error
    return connection


def _lock(path: Path) -> sqlite3.Connection:
    # An exclusive transaction on an empty database beside the file: a lock that works on every platform and that the
    # kernel drops with the process. The state file itself stays open to readers such as the audit.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = sqlite3.connect(f"{path}.lock", isolation_level=None, timeout=0, check_same_thread=False)
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"store.path: expected a folder that can be written, {path.parent}: {error}") from error
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        lock.close()
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            raise StoreLocked(f"another relay holds {path}: stop it, or give this one a store.path of its own") from error
        raise StoreError(f"store.path: expected a folder that can be written, {path.parent}: {error}") from error
    return lock


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA busy_timeout = 5000")
    # A spill would write to the file in the middle of a transaction: a full disk is to be met at the commit.
    connection.execute("PRAGMA cache_spill = OFF")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _what_is_wrong(connection: sqlite3.Connection, identity: Identity) -> str | None:
    """Why the file cannot be used, or None. Raises StoreTooNew, and StoreError for trouble that is not the file's."""
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if tables == 0:
            return None
        if application != _APPLICATION:
            return "is a database of something else"
        if version > VERSION:
            raise StoreTooNew(
                f"store.path: expected a file of version {VERSION} or older, a newer relay wrote version {version}; update this one"
            )
        problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            return f"is corrupt ({problem})"
        known = dict(connection.execute("SELECT key, value FROM meta WHERE key IN ('vm_id', 'scope')"))
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR):
            return f"is corrupt ({error})"
        raise
    if identity.vm_id is not None and known.get("vm_id", identity.vm_id) != identity.vm_id:
        return "belongs to another VM (a cloned image or a restored disk)"
    if known.get("scope", identity.scope) != identity.scope:
        return f"belongs to another scope ({known['scope']})"
    return None


def _set_aside(path: Path, now: datetime) -> Path:
    stamp = now.strftime("%Y%m%dT%H%M%S.%fZ")
    aside = path.with_name(f"{path.name}.set-aside-{stamp}")
    for suffix in ("-wal", "-shm", ""):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    return aside


def _migrate(connection: sqlite3.Connection, mode: str) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version < 1:
        for statement in _statements(files("relay.outbox").joinpath("schema.sql").read_text(encoding="utf-8")):
            connection.execute(statement)
        connection.execute("INSERT INTO meta VALUES ('mode', ?)", (mode,))
    connection.execute(f"PRAGMA application_id = {_APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def _statements(script: str) -> list[str]:
    # executescript would commit first; a schema must appear whole or not at all.
    statements, current = [], ""
    for line in script.splitlines(keepends=True):
        current += line
        if sqlite3.complete_statement(current):
            statements.append(current)
            current = ""
    return statements
