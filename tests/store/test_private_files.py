"""The state folder is ours alone, every file in it is private, and one relay holds the lock."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.errors import StoreError
from relay.store.file import lock_path
from relay.store.journal import Journal
from tests.store.open_store import append_row, open_file_in, read_column


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    """The rights must not come from the umask."""
    before = os.umask(0)
    yield
    os.umask(before)


def rights(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def test_new_folders_and_all_files_are_private(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "relay.db"
    with open_file_in(path) as file:
        append_row(Journal(file.connection))
        found = rights(path.parent)
    assert set(found) >= {"relay.db", "relay.db-wal", "relay.db-shm", lock_path(path).name}
    assert set(found.values()) == {0o600}
    for folder in (tmp_path / "not", path.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_file_that_others_can_read_and_one_that_is_set_aside_are_narrowed(tmp_path: Path) -> None:
    path = tmp_path / "relay.db"
    path.write_bytes(b"not a database, and long enough to be taken for a broken header" * 10)
    path.chmod(0o644)
    with open_file_in(path):
        found = rights(tmp_path)
    assert any("set-aside" in name for name in found)
    assert set(found.values()) == {0o600}


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o720])
def test_a_folder_others_can_write_to_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    """They could put another file in the place of any."""
    tmp_path.chmod(mode)
    with (
        pytest.raises(StoreError, match=f"others can write in {tmp_path}: chmod 700 {tmp_path}"),
        open_file_in(tmp_path / "relay.db"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_folder_that_others_can_only_read_is_used(tmp_path: Path) -> None:
    """The files in it are private."""
    tmp_path.chmod(0o755)
    with open_file_in(tmp_path / "relay.db"):
        assert set(rights(tmp_path).values()) == {0o600}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_the_folder_of_another_user_is_refused_with_the_remedy(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    with (
        pytest.raises(StoreError, match="belongs to user 65534, or name one that is not there yet"),
        open_file_in(tmp_path / "relay.db"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_link_of_this_user_leads_to_the_file(tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(tmp_path / "relay.db")
    with open_file_in(link) as file:
        assert file.path == tmp_path / "relay.db"
    assert read_column(tmp_path / "relay.db", "SELECT value FROM meta WHERE key = 'mode'") == ["on"]
