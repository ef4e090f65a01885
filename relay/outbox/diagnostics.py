"""Looks at the state file from outside, for `doctor`: nothing is written, locked or set aside."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from relay.diagnostics import Finding, failure, ok, warning
from relay.errors import StoreError
from relay.files import may_be_folder, may_exist, reason, user
from relay.outbox import StoreSettings
from relay.outbox.file import SCHEMA_VERSION, open_for_reading

_LITTLE = 200 * 2**20
"""Bytes of free space under which somebody should know."""
_TOO_LITTLE = 2**20
_LOST_WITH_THE_VM = "DATALOSS_WARNING_README.txt"
"""Azure puts it at the root of a temporary disk."""
_IN_MEMORY = ("tmpfs", "ramfs")


def diagnose(settings: StoreSettings, *, scope: str | None, vm_id: str | None) -> list[Finding]:
    """Everything that can be seen of the state file; blocking. None: which scope or VM this is is not known."""
    path = settings.path.absolute()
    return [
        *_folder(path),
        *(
            _file(path, scope, vm_id)
            if may_exist(path)
            else [ok("state file", f"{path}: none yet, it will be made")]
        ),
    ]


def _folder(path: Path) -> Iterator[Finding]:
    there = next(folder for folder in path.parents if may_exist(folder))
    wrong = [one for one in (there, path) if may_exist(one) and not os.access(one, os.W_OK)]
    if wrong or not may_be_folder(there):
        remedy = "run doctor as the user that the service has, or give that user the right to write"
        yield failure(
            "state folder", f"{(wrong or [there])[0]} cannot be written by {user()}", remedy
        )
    else:
        yield ok("state folder", f"{there} can be written by {user}")
    try:
        free = shutil.disk_usage(there).free
    except PermissionError:  # of a folder around it
        return
    said = f"{free / 2**20:,.0f} MiB free in {there}"
    if free < _LITTLE:
        make = failure if free < _TOO_LITTLE else warning
        yield make("disk space", said, "make room: on a full disk approvals are refused")
    else:
        yield ok("disk space", said)
    if (why := _passing(there)) is not None:
        yield warning(
            "disk", f"{there} is {why}", "set store.path to a disk that outlives the VM's next move"
        )


def _passing(folder: Path) -> str | None:
    """Why what is written there will not last, or None."""
    root = next((one for one in (folder, *folder.parents) if one.is_mount()), folder)
    if (root / _LOST_WITH_THE_VM).exists():
        return "on Azure's temporary disk"
    try:
        mounts = (
            Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
        )
    except OSError:
        return None
    kinds = [
        fields[2]
        for fields in (line.split(" ") for line in mounts)
        if len(fields) > 2 and fields[1] == str(root)
    ]
    return "in memory" if kinds and kinds[-1] in _IN_MEMORY else None


def _file(path: Path, scope: str | None, vm_id: str | None) -> Iterator[Finding]:
    try:
        path.open("rb").close()  # SQLite does not say why it cannot
    except OSError as error:
        remedy = "run doctor as the user that the service has, or give that user the right to read and write it"
        yield failure("state file", f"{path} cannot be read: {reason(error)}", remedy)
        return
    try:
        with closing(open_for_reading(path)) as connection:
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            meta = dict(
                connection.execute(
                    "SELECT key, value FROM meta WHERE key IN ('scope', 'vm_id', 'mode')"
                )
            )
    except (StoreError, sqlite3.Error) as error:
        yield failure(
            "state file",
            str(error),
            "a relay that starts sets it aside and begins a fresh one, with approvals off",
        )
        return
    if version > SCHEMA_VERSION:
        yield failure(
            "state file",
            f"{path}: version {version}, this relay knows {SCHEMA_VERSION}",
            "update this relay",
        )
    elif wrong := _another(meta, scope, vm_id):
        yield warning(
            "state file",
            f"{path} {wrong}",
            "a relay that starts sets it aside and begins a fresh one, with approvals off",
        )
    else:
        yield ok("state file", f"{path}: version {version}, of scope {meta.get('scope')}")
    if meta.get("mode") not in ("on", None):
        yield warning(
            "approvals", f"an operator has set them to {meta['mode']}", "imds-relay approvals on"
        )
    yield _lock(path)


def _another(meta: dict[str, str], scope: str | None, vm_id: str | None) -> str | None:
    if vm_id is not None and "vm_id" in meta and meta["vm_id"].lower() != vm_id.lower():
        return "belongs to another VM"
    if scope is not None and meta.get("scope") != scope:
        return f"belongs to another scope ({meta.get('scope')})"
    return None


def _lock(path: Path) -> Finding:
    """Whether a relay holds the file. Reading the lock's own database shows it, and takes nothing."""
    lock = path.resolve().with_name(f"{path.resolve().name}.lock")
    if not may_exist(lock):
        return ok("lock", "no relay holds the state file")
    try:
        with closing(
            sqlite3.connect(f"{lock.as_uri()}?mode=ro", uri=True, timeout=0)
        ) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
            return ok("lock", "a running relay holds the state file")
        return failure(
            "lock",
            f"{lock} cannot be read: {error}",
            "give the service's user the right to read and write it",
        )
    return ok("lock", "no relay holds the state file")
