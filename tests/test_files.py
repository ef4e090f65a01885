"""A path without permission never counts as absent, on all versions of Python."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from relay.config import load
from relay.errors import ConfigError, StoreError
from relay.files import current_user, may_exist
from relay.store import StoreSettings
from relay.store.diagnostics import diagnose
from relay.store.file import open_for_reading
from tests.cli.command import run_async, run_command

NOBODY = 65534
KINDS: tuple[Callable[[int], bool], ...] = (lambda _: True, stat.S_ISREG, stat.S_ISDIR)


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder that this user may not read. Root becomes another user for the test."""
    folder = tmp_path / "closed"
    folder.mkdir()
    (folder / "relay.yaml").write_text("scope: west\n")
    folder.chmod(0)
    # Load all verbs, and what threads need, while this user can read the modules of Python.
    run_command("--help")
    import_module("concurrent.futures.thread")
    root = os.geteuid() == 0
    if root:
        os.setresuid(NOBODY, NOBODY, 0)
    yield folder
    if root:
        os.setresuid(0, 0, 0)
    folder.chmod(0o700)


def test_what_is_there_and_what_is_not_is_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    results = {
        path: [may_exist(path, kind) for kind in KINDS]
        for path in (file, tmp_path, tmp_path / "no", file / "within", tmp_path / "loop")
    }
    assert list(results.values()) == [
        [True, True, False],
        [True, False, True],
        [False] * 3,
        [False] * 3,
        [False] * 3,
    ]


def test_what_cannot_be_looked_at_may_be_there(closed: Path) -> None:
    assert all(may_exist(closed / "relay.yaml", kind) for kind in KINDS)


def test_a_configuration_in_a_closed_folder_is_unreadable_and_not_absent(closed: Path) -> None:
    message = (
        r"relay\.yaml: expected a file that can be read: "
        rf"Permission denied \(this runs as {current_user()}\)"
    )
    with pytest.raises(ConfigError, match=message):
        load(environment={}, default_paths=(closed / "relay.yaml",))
    done = run_command("check", "-c", str(closed / "relay.yaml"))
    assert (done.code, "Permission denied" in done.err) == (2, True)


def test_a_state_file_in_a_closed_folder_is_unreadable_and_not_absent(closed: Path) -> None:
    path = closed / "relay.db"
    findings = {
        finding.subject: finding
        for finding in diagnose(StoreSettings(path=path), scope=None, vm_id=None)
    }
    assert findings["state file"].state == "failed"
    assert (
        findings["state file"].message
        == f"{path} cannot be read: Permission denied (this runs as {current_user()})"
    )
    assert findings["state folder"].message == f"{closed} cannot be written by {current_user()}"
    with pytest.raises(StoreError, match="Permission denied"):
        open_for_reading(path)


async def test_a_socket_in_a_closed_folder_is_refused_and_not_absent(
    closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = closed / "relay.sock"
    monkeypatch.setenv("IMDS_RELAY_API__SOCKET", str(socket))
    done = await run_async("events")
    assert done.code == 1
    assert f"you may not open {socket}" in done.err
