"""What is released: the last commit as wheel and source distribution, by a pinned workflow."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent


def test_the_last_commit_is_built_whole_and_nothing_else(tmp_path: Path) -> None:
    """The script builds twice, on other paths, in other time zones, and compares."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    (clone / "relay/stray.py").touch()
    script = [f"{clone}/requirements/dist", sys.executable]
    refused = subprocess.run([*script, "v9.9.9"], check=False, capture_output=True, text=True)
    assert (refused.returncode, "expected the tag v" in refused.stderr) == (1, True)
    subprocess.run(script, check=True, capture_output=True)
    subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=clone / "dist", check=True)
    (wheel,) = (clone / "dist").glob("*.whl")
    assert "relay/stray.py" not in zipfile.ZipFile(wheel).namelist()
    (sdist,) = (clone / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listing = ["git", "ls-tree", "-r", "-z", "--name-only", "HEAD"]
    tracked = subprocess.run(listing, cwd=clone, check=True, capture_output=True, text=True)
    assert names == {*tracked.stdout.split("\0")[:-1], "PKG-INFO"}


def test_every_action_of_the_workflow_is_pinned_and_rights_are_given_job_by_job() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    workflow = YAML(typ="safe").load(text)
    assert workflow["permissions"] == {}
    pinned = re.findall(r"uses: (\S+)@[0-9a-f]{40} # v\d+\.\d+\.\d+$", text, re.MULTILINE)
    others = set(re.findall(r"uses: (\S+)@", text)) - set(pinned)
    assert others == {"pypa/gh-action-pypi-publish"}  # only its releases of 2024 could be looked up
    writers = {name: job["permissions"] for name, job in workflow["jobs"].items()}
    assert writers["publish"] == {"id-token": "write"}
    assert "write" not in writers["build"].values()
