"""Slack, outward: messages that are posted, edited and told in its channel, from the first notice to the end."""

from __future__ import annotations

from pathlib import Path

from tests.chatops.slack_server import slack
from tests.chatops.stage import rule, stage
from tests.journey.process import eventually

APPROVALS = {"rules": [rule(1, "client:alice")]}


async def test_an_event_is_one_message_that_is_edited_to_its_end(tmp_path: Path) -> None:
    async with slack() as here, stage(tmp_path, [here.settings(signing_secret=None)], approvals=APPROVALS) as relay:
        event = relay.reboot("vm-0")
        await eventually(lambda: len(here.tops()) == 1)
        (message,) = here.tops()
        assert set(message.buttons()) == {"Approve", "Hold"}
        assert await relay.approve(event) == 202
        await eventually(lambda: relay.starts(event) == 1)
        await eventually(lambda: "Azure has begun" in message.words())
        assert "Azure has accepted the StartRequest" in message.words()
        await eventually(lambda: any("Azure began" in line for line in here.thread(message)))
        assert len(here.tops()) == 1
