"""A relay with a channel in Slack, in which a reboot is announced."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relay.simulator import Event, Simulator
from tests.chat.running_relay import rule, stage
from tests.chat.slack_block_kit import text_of_blocks
from tests.chat.slack_server import ALICE, BOB, TEAM, PostedMessage, SlackServer
from tests.eventually import eventually
from tests.relay_in_process import RelayInProcess

ANN, BEN = f"slack:{TEAM}/{ALICE}", f"slack:{TEAM}/{BOB}"
VOTERS = {"rules": [rule(2, ANN, BEN)]}


@dataclass(frozen=True, slots=True)
class AnnouncedReboot:
    """A relay with an announced reboot, and the message about it."""

    slack: SlackServer
    relay: RelayInProcess
    event: Event
    message: PostedMessage

    async def click(self, label: str, user_id: str = ALICE, **changes: Any) -> None:
        """Click a button of the message, and wait for the acknowledgement."""
        await self.slack.click(self.message, label, user_id, **changes)

    async def command(self, text: str, user_id: str = ALICE, **changes: Any) -> PostedMessage:
        """Type a command, and return what only that person sees."""
        payload = self.slack.command_payload(text, user_id, **changes)
        reply = await self.slack.send_envelope(payload, "slash_commands")
        assert reply is not None
        assert reply["response_type"] == "ephemeral"
        return PostedMessage("", reply["text"], reply["blocks"])

    async def voters(self) -> list[str]:
        return [
            vote["principal"].rpartition("/")[2]
            for vote in (await self.relay.event(self.event))["votes"]
            if vote["counts"]
        ]

    async def recorded(self) -> list[str]:
        return [
            entry["type"].removeprefix("io.imdsrelay.").removesuffix(".v1")
            for entry in (await self.relay.event(self.event))["history"]
        ]

    async def told(self, user_id: str = ALICE) -> str:
        """Return what the newest message to one person says, once one has come."""
        await eventually(lambda: bool(self.slack.private_replies))
        reply = self.slack.private_replies[-1]
        assert reply["user"] == user_id
        return text_of_blocks(reply["blocks"])


@asynccontextmanager
async def announced_reboot(
    slack: SlackServer,
    directory: Path,
    *,
    azure: Simulator | None = None,
    approvals: Mapping[str, Any] = VOTERS,
    **settings: Any,
) -> AsyncIterator[AnnouncedReboot]:
    """Run a relay whose channel shows a reboot. Over the same directory it is the same relay."""
    sink = slack.settings(**{"approve_in_chat": True, **settings})
    async with stage(directory, [sink], approvals=approvals, azure=azure) as relay:
        await eventually(lambda: len(slack.sockets) == 1)
        event = relay.azure.events[0] if relay.azure.events else relay.reboot("vm-0")
        await eventually(lambda: len(slack.channel_messages()) == 1)
        await relay.settle()
        yield AnnouncedReboot(slack, relay, event, slack.channel_messages()[0])
