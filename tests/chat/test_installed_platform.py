"""A chat platform that another package installs, with principals that it declares itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from relay.approvals import ApprovalsSettings
from tests.chat.answer_on_pinboard import VOTER

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Make a folder that has the entry point of an installed package."""
    metadata = tmp_path / "site" / "pinboard-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pinboard\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[relay.chat.platforms]\npinboard = tests.chat.pinboard_platform\n"
    )
    return metadata.parent


def test_people_answer_in_a_chat_that_a_package_installs(site: Path, tmp_path: Path) -> None:
    """Only those that a rule names, and only under principals of the chat's own form."""
    path = os.pathsep.join([str(site), str(REPOSITORY)])
    run = subprocess.run(  # our own module
        [sys.executable, "-m", "tests.chat.answer_on_pinboard", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["answers"] == {
        "pinboard:lobby/eve": {"http": 401, "reply": None},
        "client:alice": {"http": 401, "reply": None},
        VOTER: {"http": 200, "reply": {"status": 202, "principal": VOTER}},
    }
    assert result["votes"] == 1


def test_its_principals_are_unknown_where_it_is_not_installed() -> None:
    with pytest.raises(ValidationError, match="expected person:<name>, client:<name>"):
        ApprovalsSettings.model_validate({"groups": {"oncall": [VOTER]}})
