"""Runs a relay whose chat is the installed pinboard, answers on it, and prints what came of it.

``python -m tests.chat.answer_on_pinboard DIRECTORY``, with the entry point of the pinboard on the
path.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import orjson

from tests.chat import pinboard_platform
from tests.chat.running_relay import rule, stage
from tests.eventually import eventually
from tests.relay_in_process import RelayInProcess

VOTER = "pinboard:lobby/alice"


async def answer(relay: RelayInProcess, user: str) -> dict[str, Any]:
    """Click the first button of the first card as this user."""
    body = orjson.dumps({"pin": "pin-1", "click": f"click of {user}"})
    async with relay.session.post(
        f"{relay.url}/v1/chat/pins", data=body, headers={"X-User": user}
    ) as response:
        reply = await response.json() if response.status == 200 else None
        return {"http": response.status, "reply": reply}


async def main(directory: Path) -> None:
    """Print the answers to a stranger, to a client of the API, and to the voter; and the votes."""
    approvals = {"rules": [rule(2, VOTER, "client:alice")]}
    sinks = [{"kind": "pinboard", "name": "pins"}]
    async with stage(directory, sinks, approvals=approvals) as relay:
        reboot = relay.reboot("vm-0")
        await eventually(lambda: "pin-1" in pinboard_platform.board.cards)
        answers = {
            user: await answer(relay, user)
            for user in ("pinboard:lobby/eve", "client:alice", VOTER)
        }
        status = (await relay.event(reboot))["approval"]
        print(orjson.dumps({"answers": answers, "votes": status["votes"]}).decode())  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
