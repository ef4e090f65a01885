"""The workflow that releases is pinned."""

from __future__ import annotations

import re
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent


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
