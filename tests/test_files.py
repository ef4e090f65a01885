"""Files: one without permission never counts as absent, and one that changes is read again."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from pydantic import ValidationError

from relay.api.server import file_backed_server_context, make_server_context
from relay.api.settings import Client, ServerTlsSettings
from relay.config import load
from relay.errors import ConfigError, StoreError
from relay.files import MAX_FILE_BYTES, FileBackedValue, current_user, may_exist
from relay.store import StoreSettings
from relay.store.diagnostics import diagnose
from relay.store.file import open_for_reading
from tests.certificates import LOCALHOST, Authority
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
    there, absent = [[True, True, False], [True, False, True]], [[False] * 3] * 3
    assert list(results.values()) == there + absent


def test_what_cannot_be_looked_at_may_be_there(closed: Path) -> None:
    assert all(may_exist(closed / "relay.yaml", kind) for kind in KINDS)


def test_a_configuration_in_a_closed_folder_is_unreadable_and_not_absent(
    closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = rf"Permission denied \(this runs as {current_user()}\)"
    message = rf"relay\.yaml: expected a file that can be read: {denied}"
    monkeypatch.setattr("relay.config.DEFAULT_PATHS", (closed / "relay.yaml",))
    with pytest.raises(ConfigError, match=message):
        load(environment={})
    done = run_command("check", "-c", str(closed / "relay.yaml"))
    assert (done.code, "Permission denied" in done.err) == (2, True)


def test_a_state_file_in_a_closed_folder_is_unreadable_and_not_absent(closed: Path) -> None:
    path = closed / "relay.db"
    found = diagnose(StoreSettings(path=path), scope=None, vm_id=None)
    findings = {finding.about: finding for finding in found}
    assert findings["state file"].state == "failed"
    denied = f"Permission denied (this runs as {current_user()})"
    assert findings["state file"].said == f"{path} cannot be read: {denied}"
    assert findings["state folder"].said == f"{closed} cannot be written by {current_user()}"
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


# --- values that follow their files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "number"
    file.write_text("1")
    return file


def test_the_value_is_loaded_again_only_after_a_change(file: Path) -> None:
    loads: list[str] = []

    def load() -> int:
        loads.append(file.read_text())
        return int(loads[-1])

    value = FileBackedValue((file, None), load)
    assert (value.get(), value.get()) == (1, 1)
    file.write_text("22")
    assert (value.get(), value.get()) == (22, 22)
    assert loads == ["1", "22"]


def test_the_first_load_must_succeed(file: Path) -> None:
    file.unlink()
    with pytest.raises(FileNotFoundError):
        FileBackedValue((file,), file.read_text)


def test_an_unusable_file_keeps_the_last_value_until_it_is_usable(file: Path) -> None:
    errors: list[Exception] = []
    value = FileBackedValue((file,), lambda: int(file.read_text()), on_failure=errors.append)
    file.write_text("no number")
    assert (value.get(), value.get()) == (1, 1)
    assert [type(error) for error in errors] == [ValueError], "once for each change"
    file.unlink()
    assert (value.get(), value.get()) == (1, 1)
    assert [type(error) for error in errors] == [ValueError, FileNotFoundError]
    file.write_text("333")
    assert value.get() == 333
    assert len(errors) == 2


def test_a_failed_load_is_tried_again_without_another_change(file: Path) -> None:
    is_locked = False

    def load() -> str:
        if is_locked:
            raise PermissionError
        return file.read_text()

    value = FileBackedValue((file,), load)
    file.write_text("22")
    is_locked = True
    assert value.get() == "1"
    is_locked = False
    assert value.get() == "22"


# --- a pipe or a device in the place of a secret or a certificate does not stop the relay
# Nothing here may wait for a pipe's writer: each test would never end.


KEY = "bearer-test-key-of-alice"


def link_to_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_huge_file(path: Path) -> None:
    path.touch()
    os.truncate(path, MAX_FILE_BYTES + 1)


unusable = pytest.mark.parametrize(
    "put_unusable_file", [os.mkfifo, link_to_endless_device, make_huge_file]
)


@unusable
def test_a_secret_stays_while_its_file_is_no_file(
    tmp_path: Path, put_unusable_file: Callable[[Path], None]
) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    client = Client.model_validate({"name": "alice", "key_file": file})
    file.unlink()
    put_unusable_file(file)
    assert client.reveal("key") == KEY
    with pytest.raises(ValidationError, match=r"no regular file|larger than"):
        Client.model_validate({"name": "alice", "key_file": file})


@unusable
@pytest.mark.parametrize("field", ["cert_file", "key_file", "client_ca_file"])
def test_certificates_stay_while_their_file_is_no_file(
    tmp_path: Path, field: str, put_unusable_file: Callable[[Path], None]
) -> None:
    content = Authority("authority").issue("localhost", LOCALHOST)
    files = {name: tmp_path / name for name in ("cert_file", "key_file", "client_ca_file")}
    for file in files.values():
        file.write_bytes(content)
    settings = ServerTlsSettings.model_validate(files)
    contexts = file_backed_server_context(settings)
    first = contexts.get()
    files[field].unlink()
    put_unusable_file(files[field])
    assert contexts.get() is first
    with pytest.raises(ConfigError, match=r"no regular file|larger than"):
        make_server_context(settings)
