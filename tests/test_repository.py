"""The repository is consistent: locks, wheel, and the rules under which the tests run."""

from __future__ import annotations

import asyncio
import os
import re
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
LOCKS = ("run", "build", "dev")


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


@pytest.mark.parametrize("arguments", ["-k 'a or b'", '-k "it\'s"'])
def test_make_platforms_gets_arguments_with_quotes(arguments: str, tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nprintf %s "$ARGS"\n')
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(
        ["make", "--no-print-directory", "platforms", f"ARGS={arguments}"],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout == arguments


async def test_asyncio_runs_in_debug_mode() -> None:
    """`DebugLoop` in conftest.py says which part of the mode it leaves out."""
    loop = asyncio.get_running_loop()
    with pytest.raises(RuntimeError, match="Non-thread-safe"):
        await asyncio.to_thread(loop.call_soon, lambda: None)


def test_warnings_are_errors() -> None:
    with pytest.raises(UserWarning):
        warnings.warn("any", stacklevel=1)
