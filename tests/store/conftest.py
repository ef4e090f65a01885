"""Disks that a test can fill."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """A file system of its own: ENOSPC."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        assert shutil.disk_usage(self.folder).free == 0

    def free(self) -> None:
        self._filler.unlink()


class LimitedDisk:
    """A limit on the size of files of this process: EFBIG, which SQLite takes for an I/O error."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        size = max((wal.stat().st_size for wal in self.folder.glob("*.db-wal")), default=0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, self._limits[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


Disk = SmallDisk | LimitedDisk


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "1m") -> Iterator[SmallDisk]:
    """Mount one at a new folder, with room for a small state file."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root; others limit the size of files")
    folder.mkdir()
    options = f"size={size},mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(params=["full disk", "limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """A disk with room for a small state file; freed and gone afterwards."""
    if request.param == "limit":
        limited = LimitedDisk(tmp_path)
        yield limited
        limited.free()
        return
    with small_disk(tmp_path / "disk") as small:
        yield small
