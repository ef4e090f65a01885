"""The repository is consistent: locks, wheel, and the rules under which the tests run."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest

import relay

ROOT = Path(__file__).parent.parent
LOCKS = ("run", "build", "dev", "site", "release", "fuzz")


def lock(name: str) -> str:
    """Return the text of a lock."""
    return (ROOT / f"requirements/{name}.lock").read_text()


def versions(name: str) -> dict[str, str]:
    """Return the version of each distribution in a lock."""
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", lock(name), re.MULTILINE))


def project() -> dict[str, Any]:
    """Return pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("name", LOCKS)
def test_everything_in_a_lock_has_hashes_and_nothing_names_a_registry(name: str) -> None:
    entries = re.split(r"\n(?=\S)", lock(name).strip())
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in lock(name)
    assert not re.search(r"^--", lock(name), re.MULTILINE)


def test_the_locks_agree_on_versions() -> None:
    """So that `make demo` and `make test` can take turns in one environment."""
    everything = versions("dev")
    for name in ("run", "build"):
        assert versions(name).items() <= everything.items()


def test_what_the_project_asks_for_is_in_the_locks() -> None:
    """A dependency that was added without `make lock` is missing in a fresh clone."""
    wanted = {
        "run": project()["project"]["dependencies"],
        "build": project()["dependency-groups"]["build"],
        "dev": project()["dependency-groups"]["dev"],
        "site": project()["dependency-groups"]["site"],
        "release": project()["dependency-groups"]["release"],
        "fuzz": project()["dependency-groups"]["fuzz"],
    }
    for name, requirements in wanted.items():
        names = {
            re.split(r"[<>=!~\[; ]", requirement)[0].lower().replace(".", "-")
            for requirement in requirements
        }
        assert names - versions(name).keys() == set()


def test_the_package_says_the_version_of_its_distribution() -> None:
    assert relay.__version__ == project()["project"]["version"]


def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        str(tmp_path),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("imds_relay-*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    written = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "relay").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == written
    assert {"relay/py.typed", "relay/outbox/schema/1.sql"} <= inside


def text_files() -> dict[str, str]:
    """Return the text of each tracked file but locks and what the fuzzer kept, by path."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in paths
        if path.suffix not in {".png", ".lock", ".sum"}
        and path.is_file()
        and not path.is_relative_to(ROOT / "fuzz/corpus")
    }


def test_packages_are_installed_by_hash_and_the_project_from_its_source() -> None:
    """A package index may have something else under the project's name."""
    files = text_files()
    assert len(files) > 300
    installs = [
        (name, arguments)
        for name, text in files.items()
        if name != "requirements/install"
        for arguments in re.findall(r"\bpip3? install\b([^\n&]*)", text)
    ]
    assert len(installs) >= 3
    assert [
        install
        for install in installs
        if not re.match(
            r" (--require-hashes -r requirements/|--no-deps (/wheel/|dist/))", install[1]
        )
    ] == []
    installer = files["requirements/install"]
    for arguments in re.findall(r"' install (.*?)(?: ;;)?$", installer, re.MULTILINE):
        assert re.match(r"--require-hashes -r |--no-deps --no-build-isolation ", arguments)
    # pipx takes the project from the clone, and says so where it is documented.
    from_index = r"pipx(?! install \.`)|uvx|npx|npm install|go get|uv tool"
    fetched = re.compile(rf"imds-relay\[|\b(?:{from_index})\b")
    mine = "tests/test_repository.py"
    assert [name for name, text in files.items() if name != mine and fetched.search(text)] == []


def test_images_are_official_ones_or_built_here() -> None:
    official = {"docker.io/library/python", "docker.io/library/rabbitmq"}
    registry = re.compile(r"\b(?:docker\.io|ghcr\.io|quay\.io|mcr\.microsoft\.com)/[\w./-]*\w")
    local = re.compile(r"(?:\bimage: |\s-t |--tag[ =]|docker run .*)imds-relay\b")
    for name, text in text_files().items():
        if name != "tests/test_repository.py":
            assert {*registry.findall(text)} <= official, name
            assert not local.search(text), name


DIGEST = f"sha256:{'0123456789abcdef' * 4}"
NEWER_DIGEST = f"sha256:{'fedcba9876543210' * 4}"


def pin_images(folder: Path, answer: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a copy of the files, with a skopeo that gives this answer."""
    skopeo = folder / "bin/skopeo"
    skopeo.parent.mkdir(parents=True, exist_ok=True)
    skopeo.write_text(f"#!/bin/sh\nprintf '%s\\n' '{answer}'\n")
    skopeo.chmod(0o755)
    return subprocess.run(
        [folder / "requirements/pin-images"],
        env={"PATH": f"{skopeo.parent}:{os.environ['PATH']}"},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_digests_of_images_are_written_behind_their_tags(tmp_path: Path) -> None:
    """Nothing is written if the registry's answer is no digest."""
    names = ("requirements/pin-images", "Dockerfile", "docker-compose.yml")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    before = (tmp_path / "Dockerfile").read_text()
    assert pin_images(tmp_path, "<html>").returncode == 1
    assert (tmp_path / "Dockerfile").read_text() == before
    for digest in (DIGEST, NEWER_DIGEST):
        assert pin_images(tmp_path, digest).returncode == 0
        image = re.search(r"^ARG PYTHON=(.*)$", (tmp_path / "Dockerfile").read_text(), re.MULTILINE)
        assert image is not None
        assert re.fullmatch(rf"docker\.io/library/python:[\w.-]+@{digest}", image[1])
        compose = (tmp_path / "docker-compose.yml").read_text()
        assert len(re.findall(rf"image: docker\.io/\S+@{digest}$", compose, re.MULTILINE)) == 1


def test_every_rule_that_is_switched_off_has_its_reason() -> None:
    """In every list of ignored rules in pyproject.toml, each line ends in a comment."""
    text = (ROOT / "pyproject.toml").read_text()
    ignores = re.search(r"^ignore = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    per_file = re.search(
        r"^\[tool\.ruff\.lint\.per-file-ignores\]\n(.*?)^\[", text, re.MULTILINE | re.DOTALL
    )
    assert ignores is not None
    assert per_file is not None
    rules = [
        line
        for line in (ignores[1] + per_file[1]).splitlines()
        if re.match(r'\s+"[A-Z]+[0-9]*",', line)
    ]
    assert len(rules) > 20
    assert [rule for rule in rules if not re.search(r"# \S", rule)] == []


def test_make_test_distributes_the_tests_as_conftest_says() -> None:
    """The scheduler of conftest.py keeps files that share a costly fixture on the same worker."""
    workers = re.search(r"^WORKERS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert workers is not None
    options = [*workers[1].split(), "-n", "1", "--verbose", "-p", "no:cacheprovider"]
    test = "tests/test_repository.py::test_warnings_are_errors"
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST_") and name != "COLUMNS"
    }
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, test],
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout
    assert "scheduling tests via GroupScheduling\n" in ran.stdout


async def test_asyncio_runs_in_debug_mode() -> None:
    """`DebugLoop` in conftest.py says which part of the mode it leaves out."""
    loop = asyncio.get_running_loop()
    with pytest.raises(RuntimeError, match="Non-thread-safe"):
        await asyncio.to_thread(loop.call_soon, lambda: None)


def test_warnings_are_errors() -> None:
    with pytest.raises(UserWarning):
        warnings.warn("any", stacklevel=1)
