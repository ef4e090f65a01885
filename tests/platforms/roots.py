"""Root file systems of Debian, made with debootstrap, cached, and used as temporary copies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("python3", "python3-venv", "make", "git", "ca-certificates")
"""What `make demo` and `make test` assume, and the certificates that HTTPS needs."""
ISOLATED = (
    "setpriv",
    "--pdeathsig=KILL",
    "unshare",
    "--mount",
    "--pid",
    "--uts",
    "--fork",
    "--kill-child=KILL",
)
"""When this program ends, `unshare` ends; then every process and mount of the namespaces does."""
MARKER = ".made-by-make-platforms"
"""A cache has this file: nothing is removed in any other folder."""
SECONDS_TO_END = 30.0
"""The processes of a namespace that was killed have ended within this time."""
SECONDS_TO_MAKE = 3600.0
DAYS_KEPT = 30
"""An older root file system is made again: packages of testing change every day."""


@dataclass(frozen=True, slots=True)
class Release:
    """A release of Debian: its suite and what people call it."""

    suite: str
    title: str


RELEASES = (
    Release("bookworm", "Debian 12"),
    Release("trixie", "Debian 13"),
    Release("testing", "Debian testing"),
)


@dataclass(frozen=True, slots=True)
class Copy:
    """A fresh copy of a root file system in a folder; with `overlay` it holds only the changes."""

    base: Path
    folder: Path
    overlay: bool

    @property
    def root(self) -> Path:
        """The root of the copy; an overlay is there only inside a namespace."""
        return self.folder / "root"

    @property
    def tree(self) -> Path:
        """The clone of this repository."""
        return self.folder / "tree"


def default_cache() -> Path:
    """Return the folder that PLATFORMS_CACHE names, or the usual place for a cache."""
    if chosen := os.environ.get("PLATFORMS_CACHE"):
        return Path(chosen).absolute()
    if user := os.environ.get("XDG_CACHE_HOME"):
        return Path(user).absolute() / "imds-relay-platforms"
    return Path("/var/cache/imds-relay-platforms")


def claim(cache: Path) -> None:
    """Make the cache, or end with a sentence where the folder holds files of somebody else."""
    cache.mkdir(parents=True, exist_ok=True)
    marker = cache / MARKER
    if marker.exists():
        return
    if any(cache.iterdir()):
        sys.exit(
            f"make platforms: {cache} holds files but not {MARKER}, so it is not a cache of this "
            "program; name an empty or a new folder in PLATFORMS_CACHE"
        )
    marker.touch()


def is_ready(cache: Path, release: Release) -> bool:
    """Whether the cache has the root file system, and it is young enough."""
    base = cache / "roots" / release.suite
    return base.is_dir() and time.time() - base.stat().st_mtime < DAYS_KEPT * 86_400


def make(cache: Path, release: Release, log: Path) -> None:
    """Make the root file system with debootstrap. Only a complete one gets its final name."""
    base = cache / "roots" / release.suite
    unfinished = base.with_suffix(".unfinished")
    remove(unfinished)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *ISOLATED,
        "--mount-proc",
        "debootstrap",
        "--variant=minbase",
        f"--include={','.join(PACKAGES)}",
        release.suite,
        str(unfinished),
    ]
    if mirror := os.environ.get("DEBIAN_MIRROR"):
        command.append(mirror)
    with log.open("wb") as output:
        subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=SECONDS_TO_MAKE,
        )
    remove(base)
    unfinished.rename(base)
    os.utime(base)


@contextmanager
def fresh_copy(cache: Path, release: Release) -> Iterator[Copy]:
    """Yield a copy, and remove it afterwards: an overlay if possible, else a copy of every file."""
    base = cache / "roots" / release.suite
    runs = cache / "runs"
    runs.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{release.suite}-", dir=runs))
    folder.chmod(0o755)
    try:
        for name in ("root", "upper", "work"):
            (folder / name).mkdir()
        copy = Copy(base, folder, _overlay_works(base, folder))
        if not copy.overlay:
            subprocess.run(["cp", "-a", "--reflink=auto", f"{base}/.", str(copy.root)], check=True)
        yield copy
    finally:
        remove(folder)


def _overlay_works(base: Path, folder: Path) -> bool:
    mount = [
        "mount",
        "-t",
        "overlay",
        "overlay",
        "-o",
        overlay_options(base, folder),
        str(folder / "root"),
    ]
    return (
        subprocess.run(["unshare", "--mount", *mount], check=False, capture_output=True).returncode
        == 0
    )


def overlay_options(base: Path, folder: Path) -> str:
    """Return the options of mount for an overlay of the folder on the base."""
    return f"lowerdir={base},upperdir={folder / 'upper'},workdir={folder / 'work'}"


def remove(folder: Path) -> None:
    """Remove a folder if it is there. Nothing is mounted in it: mounts live in other namespaces.

    Processes of a namespace that was just killed may still write to it: it is tried again then.
    """
    deadline = time.monotonic() + SECONDS_TO_END
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
