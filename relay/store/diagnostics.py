"""Checks the state file for ``imds-relay doctor``. It writes and sets aside nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

from relay.errors import StoreError
from relay.files import current_user, may_exist
from relay.logs import Finding, failure, ok, warning
from relay.store import StoreSettings
from relay.store.file import SCHEMA_VERSION, find_other_owner, open_for_reading, read_problem

FREE_BYTES_WARNING = 200 * 2**20
MIN_FREE_BYTES = 2**20
_USER_REMEDY = "run doctor as the service's user, or give that user the right to read and write it"
_SET_ASIDE_REMEDY = (
    "a relay that starts sets it aside and begins a fresh one, with approvals off; "
    "to keep it, put the right file in its place first"
)


def diagnose(settings: StoreSettings, *, scope: str | None, vm_id: str | None) -> list[Finding]:
    """Check the state file and its folder; blocking. What is not known is None."""
    path = settings.path.absolute()
    if may_exist(path):
        return [*_check_folder(path), *_check_file(path, scope, vm_id)]
    message = f"{path}: it does not exist yet, the relay creates it"
    return [*_check_folder(path), ok("state file", message)]


def _check_folder(path: Path) -> Iterator[Finding]:
    folder = next(parent for parent in path.parents if may_exist(parent))
    closed = [each for each in (folder, path) if may_exist(each) and not os.access(each, os.W_OK)]
    if closed or not may_exist(folder, stat.S_ISDIR):
        place = (closed or [folder])[0]
        problem = f"{place} cannot be written by {current_user()}"
        yield failure("state folder", problem, _USER_REMEDY)
    else:
        yield ok("state folder", f"{folder} can be written by {current_user()}")
    with contextlib.suppress(PermissionError):  # no right to enter a parent folder
        free = shutil.disk_usage(folder).free
        message = f"{free / 2**20:,.0f} MiB free in {folder}"
        remedy = "make room: on a full disk approvals are refused"
        if free < MIN_FREE_BYTES:
            yield failure("disk space", message, remedy)
        elif free < FREE_BYTES_WARNING:
            yield warning("disk space", message, remedy)
        else:
            yield ok("disk space", message)
    if (reason := _volatile_disk_reason(folder)) is not None:
        remedy = "set store.path to a disk that outlives the VM's next move"
        yield warning("disk", f"{folder} is {reason}", remedy)


def _volatile_disk_reason(folder: Path) -> str | None:
    try:
        root = next((place for place in (folder, *folder.parents) if place.is_mount()), folder)
        if (root / "DATALOSS_WARNING_README.txt").exists():  # Azure puts it there
            return "on Azure's temporary disk"
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:  # no right to enter a folder, or no /proc
        return None
    mounted_type: str | None = None
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) > 2 and fields[1] == str(root):
            mounted_type = fields[2]  # a later mount hides an earlier one
    return "in memory" if mounted_type in ("tmpfs", "ramfs") else None


def _check_file(path: Path, scope: str | None, vm_id: str | None) -> Iterator[Finding]:
    if (reason := read_problem(path)) is not None:
        is_folder = os.path.isdir(path)  # noqa: PTH112  # Path.is_dir can raise
        remedy = "name a file in store.path" if is_folder else _USER_REMEDY
        yield failure("state file", f"{path} cannot be read: {reason}", remedy)
        return
    try:
        with contextlib.closing(open_for_reading(path)) as connection:
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    except (StoreError, sqlite3.Error) as error:
        yield failure("state file", str(error), _SET_ASIDE_REMEDY)
        return
    owner = find_other_owner(meta, scope, vm_id)
    if version != SCHEMA_VERSION:
        message = f"{path}: version {version}, this relay knows {SCHEMA_VERSION}"
        yield failure("state file", message, "run the relay that wrote it, or move it away")
    elif owner is not None:
        yield warning("state file", f"{path} belongs to {owner}", _SET_ASIDE_REMEDY)
    else:
        yield ok("state file", f"{path}: version {version}, of scope {meta.get('scope')}")
    if meta.get("mode") not in ("on", None):
        yield warning(
            "approvals", f"an operator has set them to {meta['mode']}", "imds-relay approvals on"
        )
