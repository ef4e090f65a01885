"""A chat platform that another package installs, with principals that it declares itself."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from pydantic import ValidationError

from relay.approvals import ApprovalsSettings
from tests.chat import pinboard_platform
from tests.chat.running_relay import rule, stage
from tests.cli.command import ROOT, run_program
from tests.eventually import eventually
from tests.relay_in_process import RelayInProcess
from tests.test_plugins import install

VOTER = "pinboard:lobby/alice"


def test_people_answer_in_a_chat_that_a_package_installs(tmp_path: Path) -> None:
    """Only those that a rule names, and only under principals of the chat's own form."""
    code = "from tests.chat.pinboard_platform import Settings, connect"
    install(tmp_path, "pinboard", "pinboard", code, "chat.platforms")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    module = "tests.chat.test_installed_platform"
    run = run_program(sys.executable, "-m", module, str(tmp_path), cwd=ROOT, PYTHONPATH=path)
    assert run.code == 0, run.err


def test_its_principals_are_unknown_where_it_is_not_installed() -> None:
    with pytest.raises(ValidationError, match="expected person:<name>, client:<name>"):
        ApprovalsSettings.model_validate({"groups": {"oncall": [VOTER]}})


# --- the program, which has the entry point on its path


async def answer(relay: RelayInProcess, user: str) -> dict[str, Any]:
    """Click the first button of the first card as this user."""
    body = orjson.dumps({"pin": "m1", "click": f"click of {user}"})
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{relay.url}/v1/chat/pins", data=body, headers={"X-User": user}) as response,
    ):
        reply = await response.json() if response.status == 200 else None
        return {"http": response.status, "reply": reply}


async def main(directory: Path) -> None:
    """Check the answers to a stranger, to a client of the API, and to the voter; and the votes."""
    approvals = {"rules": [rule(2, VOTER, "client:alice")]}
    sinks = [{"kind": "pinboard", "name": "pins"}]
    async with stage(directory, sinks, approvals=approvals) as relay:
        reboot = relay.reboot("vm-0")
        await eventually(lambda: "m1" in pinboard_platform.board.cards)
        for user in ("pinboard:lobby/eve", "client:alice"):
            assert await answer(relay, user) == {"http": 401, "reply": None}
        reply = {"status": 202, "principal": VOTER}
        assert await answer(relay, VOTER) == {"http": 200, "reply": reply}
        assert (await relay.event(reboot))["approval"]["votes"] == 1


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
