"""docs/simulator.md: its commands, JSON, Python and playbook work, and it lists every key."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from relay.cli.demo import DEFAULT_PORT
from relay.simulator import Fault, Plan, Setup, Simulator
from relay.simulator.playbook import ACTIONS, Playbook, load_playbook
from relay.simulator.setup import Kind
from tests import documented
from tests.programs import output_of

PAGE = "docs/simulator.md"
TEXT = (documented.ROOT / PAGE).read_text(encoding="utf-8")
CALLS = "Against your own software"
"""The heading above the calls with curl."""


def without_dates(document: dict[str, Any]) -> dict[str, Any]:
    return document | {
        "Events": [event | {"NotBefore": bool(event["NotBefore"])} for event in document["Events"]]
    }


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's commands are curl's")
async def test_the_commands_do_what_the_page_shows() -> None:
    """In the order of the page, against a simulator as ``imds-relay simulate`` starts it."""
    shown = documented.select(PAGE, "sh", CALLS) + documented.select(PAGE, "json", CALLS)
    answers: list[str] = []
    async with Simulator(Setup(rate_limit=None)) as sim:
        for block in sorted(shown, key=lambda block: block.line):
            if block.language == "sh":
                assert f"http://127.0.0.1:{DEFAULT_PORT}/" in block.text
                here = block.text.replace(f"http://127.0.0.1:{DEFAULT_PORT}", sim.url)
                answers.append(await asyncio.to_thread(output_of, "bash", "-ec", here))
            else:
                expected = without_dates(json.loads(block.text))
                assert without_dates(json.loads(answers[-1])) == expected
        assert not [answer for answer in answers if '"error"' in answer]
        assert (await sim.wait_until_started("reboot", within=60)).approved_by == ("vm-0",)
        assert [call.status for call in sim.calls] == [200, 200, 200]
        assert sim.faults == ()


def test_the_python_runs() -> None:
    source = documented.block(PAGE, "python", "From Python")
    assert "db_1" in output_of(sys.executable, "-c", source)


def test_the_playbook_holds(tmp_path: Path) -> None:
    source = documented.block(PAGE, "yaml", "Playbooks")
    file = tmp_path / "page.yaml"
    file.write_text(source, encoding="utf-8")
    assert len(load_playbook(file).steps) == 6


@pytest.mark.parametrize(
    "names",
    [
        ACTIONS,
        get_args(Kind),
        [part.name for part in dataclasses.fields(Plan)],
        [part.name for part in dataclasses.fields(Setup)],
        [part.name for part in dataclasses.fields(Fault)],
        Playbook.model_fields,
    ],
    ids=["actions", "faults", "plan", "setup", "fault", "playbook"],
)
def test_every_key_is_on_the_page(names: list[str]) -> None:
    assert [name for name in names if not re.search(rf"`{re.escape(name)}[`:,]", TEXT)] == []
