"""Values that follow their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.files import FileBackedValue


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
