"""The repository is consistent: locks, wheel, and the rules under which the tests run."""

from __future__ import annotations

import re
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import relay
from tests.programs import output_of

ROOT = Path(__file__).parent.parent
LOCKS = ("run", "build", "dev", "site", "release", "fuzz")


def lock(name: str) -> str:
    return (ROOT / f"requirements/{name}.lock").read_text()


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("name", LOCKS)
def test_everything_in_a_lock_has_hashes_and_nothing_names_a_registry(name: str) -> None:
    entries = re.split(r"\n(?=\S)", lock(name).strip())
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in lock(name)
    assert not re.search(r"^--", lock(name), re.MULTILINE)


def test_the_package_says_the_version_of_its_distribution() -> None:
    assert relay.__version__ == project()["project"]["version"]


def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(tmp_path: Path) -> None:
    build = (sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory")
    output_of(*build, tmp_path, cwd=ROOT)
    (wheel,) = tmp_path.glob("imds_relay-*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    written = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "relay").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == written
    assert "relay/py.typed" in inside


def text_files() -> dict[str, str]:
    """Return the text of each tracked file but locks and what the fuzzer kept, by path."""
    listed = output_of("git", "ls-files", "-z", cwd=ROOT)
    paths = [ROOT / name for name in listed.split("\0") if name]
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
        each
        for each in installs
        if not re.match(r" (--require-hashes -r requirements/|--no-deps (/wheel/|dist/))", each[1])
    ] == []
    installer = files["requirements/install"]
    for arguments in re.findall(r"' install (.*?)(?: ;;)?$", installer, re.MULTILINE):
        assert re.match(r"--require-hashes -r |--no-deps --no-build-isolation ", arguments)
    # pipx takes the project from the clone, and says so where it is documented.
    from_index = r"pipx(?! install \.`)|uvx|npx|npm install|go get|uv tool"
    fetched = re.compile(rf"imds-relay\[|\b(?:{from_index})\b")
    mine = "tests/test_repository.py"
    assert [name for name, text in files.items() if name != mine and fetched.search(text)] == []
