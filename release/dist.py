"""Builds the wheel and the source distribution from the last commit, twice, and compares them.

`make dist` runs it. Each build has a clone, a path, a time zone and file rights of its own. The
wheel is also built from the source distribution. The results are in ``dist/``, with their SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUMS = "SHA256SUMS"


class BuildError(Exception):
    """Nothing was written to the target. The text says why."""


def build(repository: Path, target: Path) -> list[Path]:
    """Write wheel, source distribution and their SHA-256 of the last commit to ``target``.

    Raises BuildError if two builds differ, or if something is missing for them.
    """
    epoch = _run(["git", "log", "-1", "--format=%ct"], repository).strip()
    with tempfile.TemporaryDirectory() as folder:
        first = _build_clone(repository, Path(folder) / "a", epoch, zone="UTC", umask=0o022)
        second = _build_clone(
            repository, Path(folder) / "another-path", epoch, zone="Asia/Tokyo", umask=0o077
        )
        compare(first, second)
        (sdist,) = (path for path in first if path.suffix == ".gz")
        (wheel,) = (path for path in first if path.suffix == ".whl")
        compare([wheel], _build_from_sdist(sdist, Path(folder) / "unpacked", epoch))
        target.mkdir(parents=True, exist_ok=True)
        for old in [*target.glob("imds_relay-*"), *target.glob(SUMS)]:
            old.unlink()
        built = [Path(shutil.copy(path, target)) for path in first]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in built]
    (target / SUMS).write_text("".join(lines))
    return built


def compare(first: list[Path], second: list[Path]) -> None:
    """Raise BuildError if the files differ by name or content, and say in what."""
    if (names := [path.name for path in first]) != (others := [path.name for path in second]):
        raise BuildError(f"expected the same files of each build, got {names} and {others}")
    for one, other in zip(first, second, strict=True):
        if one.read_bytes() == other.read_bytes():
            continue
        contents, other_contents = dict(_members(one)), dict(_members(other))
        differing = sorted(
            name
            for name in contents.keys() | other_contents.keys()
            if contents.get(name) != other_contents.get(name)
        )
        inside = ", ".join(differing[:10]) or "the way in which they are packed"
        raise BuildError(f"expected the same {one.name} of each build, they differ in: {inside}")


def _members(archive: Path) -> Iterator[tuple[str, object]]:
    """Yield the name of each file in an archive with what must be equal."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for info in wheel.infolist():
                yield info.filename, (wheel.read(info), info.date_time, info.external_attr)
        return
    with tarfile.open(archive) as sdist:
        for member in sdist:
            content = sdist.extractfile(member)
            about = (member.mtime, member.mode, member.uid, member.gid, member.uname, member.gname)
            yield member.name, (content.read() if content else None, about)


def _build_clone(
    repository: Path, folder: Path, epoch: str, *, zone: str, umask: int
) -> list[Path]:
    clone = folder / "clone"
    command = ["git", "clone", "--quiet", "--no-hardlinks", str(repository), str(clone)]
    _run(command, repository, umask=umask)
    # A clone takes the branch of the repository; what is built is what is checked out there.
    commit = _run(["git", "rev-parse", "HEAD"], repository).strip()
    _run(["git", "checkout", "--quiet", "--detach", commit], clone, umask=umask)
    return _hatchling(clone, folder / "out", epoch, ("sdist", "wheel"), zone=zone, umask=umask)


def _build_from_sdist(sdist: Path, folder: Path, epoch: str) -> list[Path]:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return _hatchling(source, folder / "out", epoch, ("wheel",), zone="UTC", umask=0o022)


def _hatchling(
    source: Path, target: Path, epoch: str, kinds: tuple[str, ...], *, zone: str, umask: int
) -> list[Path]:
    targets = [word for kind in kinds for word in ("--target", kind)]
    command = [sys.executable, "-m", "hatchling", "build", *targets, "--directory", str(target)]
    _run(command, source, umask=umask, SOURCE_DATE_EPOCH=epoch, TZ=zone)
    return sorted(target.iterdir())


def _run(command: list[str], folder: Path, *, umask: int = -1, **variables: str) -> str:
    environment: Mapping[str, str] = {**os.environ, **variables}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            umask=umask,
            capture_output=True,
            text=True,
            check=True,
        )
    except FileNotFoundError as error:
        raise BuildError(f"expected {error.filename}, but it is not installed") from error
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{' '.join(command[:4])} … failed: {error.stderr.strip()}") from error
    return done.stdout


def version_of(repository: Path) -> str:
    """Return the version in pyproject.toml."""
    version: str = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["version"]
    return version


def main() -> int:
    """Build, and say what was built."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", help="refuse to build if the version is not that of this tag")
    parser.add_argument("--target", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    version = version_of(ROOT)
    if arguments.tag not in (None, f"v{version}"):
        print(f"make: expected the tag v{version}, got {arguments.tag}", file=sys.stderr)
        return 2
    try:
        if _run(["git", "status", "--porcelain"], ROOT):
            print("make: what is not committed is left out", file=sys.stderr)
        built = build(ROOT, arguments.target)
    except BuildError as error:
        print(f"make: {error}", file=sys.stderr)
        return 1
    for line in (arguments.target / SUMS).read_text().splitlines():
        print(line)
    print(f"{len(built)} files in {arguments.target}, twice the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
