"""What is released: byte-identical builds, the bill of materials, and the audit of packages."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from release.audit import read_report
from release.dist import SUMS, BuildError, build, compare, main, version_of
from release.lock import read_lock
from release.sbom import SbomError, check_sbom

ROOT = Path(__file__).parent.parent
A, B, C = ("a" * 64, "b" * 64, "c" * 64)
LOCK = f"""\
some-package==1.0 \\
    --hash=sha256:{A} \\
    --hash=sha256:{B}
other==2.1 ; sys_platform == 'win32' \\
    --hash=sha256:{C}
"""


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with what `make dist` builds of the last commit."""
    target = tmp_path_factory.mktemp("dist")
    build(ROOT, target)
    return target


def test_two_builds_are_the_same_and_their_digests_are_written(built: Path) -> None:
    """`build` raises BuildError where two builds differ."""
    version = version_of(ROOT)
    names = [f"imds_relay-{version}-py3-none-any.whl", f"imds_relay-{version}.tar.gz"]
    assert sorted(path.name for path in built.iterdir()) == [SUMS, *names]
    lines = [f"{hashlib.sha256((built / name).read_bytes()).hexdigest()}  {name}" for name in names]
    assert (built / SUMS).read_text().splitlines() == lines


def test_the_files_have_the_time_of_the_commit_and_nobodys_name(built: Path) -> None:
    seconds = int(git(ROOT, "log", "-1", "--format=%ct"))
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert {member.mtime for member in members} == {seconds}
    assert {(member.uid, member.gid, member.uname, member.gname) for member in members} == {
        (0, 0, "", "")
    }
    assert {member.mode & 0o022 for member in members} == {0}


def test_the_source_distribution_holds_every_tracked_file(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = git(ROOT, "ls-tree", "-r", "-z", "--name-only", "HEAD").split("\0")[:-1]
    assert names == {*tracked, "PKG-INFO"}


def repository(folder: Path, hook: str) -> Path:
    """Return a repository of one module whose build runs this hook."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "imds-relay"\nversion = "1"\n'
        '[tool.hatch.build.targets.wheel]\npackages = ["relay"]\n'
        "[tool.hatch.build.hooks.custom]\n"
    )
    (folder / "relay").mkdir()
    (folder / "relay/__init__.py").write_text("")
    (folder / "hatch_build.py").write_text(
        "import os, pathlib, time\n"
        "from hatchling.builders.hooks.plugin.interface import BuildHookInterface\n"
        "class Hook(BuildHookInterface):\n"
        "    def initialize(self, version, build_data):\n"
        f"        {hook}\n"
    )
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "All")
    return folder


def test_a_build_that_depends_on_the_machine_is_an_error_that_names_the_files(
    tmp_path: Path,
) -> None:
    texts = "dict(path=os.getcwd(), zone=time.tzname[0], time=str(time.time_ns()), same='same')"
    hook = f"[pathlib.Path(self.root, f'relay/{{k}}.py').write_text(v) for k, v in {texts}.items()]"
    with pytest.raises(BuildError, match="they differ in: ") as caught:
        build(repository(tmp_path / "repository", hook), tmp_path / "dist")
    differing = str(caught.value).partition("they differ in: ")[2].split(", ")
    assert {"relay/path.py", "relay/time.py", "relay/zone.py"} <= set(differing)
    assert "relay/same.py" not in differing
    assert not (tmp_path / "dist").exists()


def test_what_is_not_committed_is_not_built(tmp_path: Path) -> None:
    source = repository(tmp_path / "repository", "pass")
    (source / "relay/stray.py").write_text("")
    (source / "relay/__init__.py").write_text("changed = True")
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/imds_relay-0.9.tar.gz").write_text("old")
    (tmp_path / "dist/notes.txt").write_text("kept")
    build(source, tmp_path / "dist")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("relay/__init__.py") == b""
        assert "relay/stray.py" not in archive.namelist()
    assert sorted(path.suffix for path in (tmp_path / "dist").iterdir()) == [
        "",
        ".gz",
        ".txt",
        ".whl",
    ]


def test_archives_with_the_same_files_can_still_differ(tmp_path: Path) -> None:
    for folder, level in (("a", 1), ("b", 9)):
        (tmp_path / folder).mkdir()
        with zipfile.ZipFile(
            tmp_path / folder / "x.whl", "w", zipfile.ZIP_DEFLATED, compresslevel=level
        ) as archive:
            archive.writestr(zipfile.ZipInfo("text", (2020, 2, 2, 0, 0, 0)), b"ab" * 5000)
    one, other = tmp_path / "a/x.whl", tmp_path / "b/x.whl"
    compare([one], [one])
    if one.read_bytes() != other.read_bytes():
        with pytest.raises(BuildError, match="the way in which they are packed"):
            compare([one], [other])
    with pytest.raises(BuildError, match="the same files"):
        compare([one], [])


def test_a_tag_of_another_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dist", "--tag", "v9.9.9"])
    assert main() == 2
    assert f"expected the tag v{version_of(ROOT)}, got v9.9.9" in capsys.readouterr().err


# --- packages


@pytest.mark.parametrize("name", ["run", "build", "dev", "release"])
def test_each_lock_is_read_whole(name: str) -> None:
    text = (ROOT / f"requirements/{name}.lock").read_text()
    packages = read_lock(text)
    assert len(packages) == len(re.findall(r"^[a-z0-9]", text, re.MULTILINE))
    assert sum(map(len, packages.values())) == text.count("--hash=")


def test_a_lock_is_names_versions_and_hashes() -> None:
    assert read_lock(LOCK) == {
        ("some-package", "1.0"): frozenset({A, B}),
        ("other", "2.1"): frozenset({C}),
    }
    with pytest.raises(ValueError, match="expected name==version"):
        read_lock("-e .\n")


def component(name: str, version: str, *hashes: str) -> dict[str, Any]:
    digests = [{"alg": "SHA-256", "content": text} for text in hashes]
    return {"name": name, "version": version, "externalReferences": [{"hashes": digests}]}


def test_a_bill_of_materials_has_what_is_locked_and_nothing_else() -> None:
    some, other = component("Some_Package", "1.0", B, A), component("other", "2.1", C)
    check_sbom({"components": [other, some]}, LOCK)
    for wrong in (
        [some],
        [some, other, component("more", "1", A)],
        [some, component("other", "2.2", C)],
        [some, component("other", "2.1", A)],
        [component("some-package", "1.0", A), other],
        [],
    ):
        with pytest.raises(SbomError, match="these differ"):
            check_sbom({"components": wrong}, LOCK)
    with pytest.raises(SbomError, match=r"some-package 1\.0"):
        check_sbom({}, LOCK)


def audited(name: str, version: str, *ids: str) -> dict[str, Any]:
    vulnerabilities = [{"id": text, "fix_versions": ["9.0"]} for text in ids]
    return {"name": name, "version": version, "vulns": vulnerabilities}


def test_an_audit_is_good_only_if_every_package_was_looked_up() -> None:
    """pip-audit ends with 0 and "No known vulnerabilities" where it could look up nothing."""
    both = [audited("Some.Package", "1.0"), audited("other", "2.1")]
    result = read_report({"dependencies": both}, LOCK)
    assert (result.vulnerabilities, result.unknown) == ((), ())
    skipped = {"name": "other", "skip_reason": "Dependency not found"}
    result = read_report({"dependencies": [both[0], skipped]}, LOCK)
    assert result.unknown == ("other: Dependency not found",)
    result = read_report({"dependencies": [both[0]]}, LOCK)
    assert result.unknown == ("other: not in the report",)
    assert len(read_report({}, LOCK).unknown) == 2


def test_each_vulnerability_is_named_with_its_remedy() -> None:
    found = [audited("some-package", "1.0", "PYSEC-2026-1", "CVE-2026-2"), audited("other", "2.1")]
    assert read_report({"dependencies": found}, LOCK).vulnerabilities == (
        "some-package 1.0: PYSEC-2026-1, fixed in 9.0",
        "some-package 1.0: CVE-2026-2, fixed in 9.0",
    )
    found[0]["vulns"][0]["fix_versions"] = []
    first, _ = read_report({"dependencies": found}, LOCK).vulnerabilities
    assert first == "some-package 1.0: PYSEC-2026-1, fixed in no version"


# --- the workflow


def test_every_action_of_the_workflow_is_pinned_and_rights_are_given_job_by_job() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    workflow = YAML(typ="safe").load(text)
    assert workflow["permissions"] == {}
    used = re.findall(r"uses: (\S+)(.*)", text)
    assert len(used) >= 5
    for action, comment in used:
        name, _, pin = action.partition("@")
        if name != "pypa/gh-action-pypi-publish":  # only its releases of 2024 could be looked up
            assert re.fullmatch(r"[0-9a-f]{40}", pin), action
            assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action
    jobs = workflow["jobs"]
    writers = {name: job.get("permissions", {}) for name, job in jobs.items()}
    assert writers["publish"] == {"id-token": "write"}
    assert "write" not in writers["build"].values()
    assert all("permissions" in job for job in jobs.values())
    commands = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    called = re.findall(r"\bmake (\w+)", commands)
    assert {"dist", "sbom", "audit"} <= set(called) <= set(targets)
