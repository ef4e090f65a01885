"""Runs a whole relay in this process, with a simulated Azure and chats, of Slack or Mattermost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relay.simulator import Event, Simulator
from tests.chat.mattermost_server import SECRET, Json, MattermostServer
from tests.chat.slack_block_kit import text_of_blocks
from tests.chat.slack_server import ALICE as ALICE_ID
from tests.chat.slack_server import BOB as BOB_ID
from tests.chat.slack_server import TEAM, PostedMessage, SlackServer
from tests.eventually import eventually
from tests.journey.relay_process import KEY
from tests.relay_in_process import RelayInProcess, document_of, relay_in_process, simulated

ALICE = {"name": "alice", "key": KEY, "can": ["read", "approve", "hold", "operate"]}
BOB = {"name": "bob", "key": "bearer-test-key-of-bob", "can": ["read", "approve", "hold"]}


def rule(votes: int, *voters: str, **quorum: Any) -> dict[str, Any]:
    """Make a rule by which reboots need so many votes of these principals."""
    return {
        "name": "reboots",
        "match": {"event_type": ["Reboot"]},
        "approve": {"votes": votes, "from": list(voters), **quorum},
    }


@asynccontextmanager
async def stage(
    directory: Path,
    sinks: Sequence[Mapping[str, Any]],
    *,
    approvals: Mapping[str, Any],
    public_url: str | None = "https://relay.example.com",
    azure: Simulator | None = None,
) -> AsyncIterator[RelayInProcess]:
    """Run a relay with these sinks. Over the same directory it is the same relay, started again.

    ``azure`` is a simulator that outlives the relay; by default each relay has its own.
    """
    async with AsyncExitStack() as stack:
        if azure is None:
            azure = await stack.enter_async_context(simulated())
        document = document_of(
            directory,
            azure,
            scope="prod",
            sinks=list(sinks),
            approvals={"tell_first": "0s", **approvals},
            api={"listen": "127.0.0.1:0", "clients": [ALICE, BOB], "public_url": public_url},
        )
        yield await stack.enter_async_context(relay_in_process(azure, document))


# --- Slack


ANN, BEN = f"slack:{TEAM}/{ALICE_ID}", f"slack:{TEAM}/{BOB_ID}"
VOTERS = {"rules": [rule(2, ANN, BEN)]}


@dataclass(frozen=True, slots=True)
class AnnouncedReboot:
    """A relay with an announced reboot, and the message about it."""

    slack: SlackServer
    relay: RelayInProcess
    event: Event
    message: PostedMessage

    async def click(self, label: str, user_id: str = ALICE_ID, **changes: Any) -> None:
        """Click a button of the message, and wait for the acknowledgement."""
        await self.slack.click(self.message, label, user_id, **changes)

    async def command(self, text: str, user_id: str = ALICE_ID, **changes: Any) -> PostedMessage:
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

    async def told(self, user_id: str = ALICE_ID) -> str:
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


# --- Mattermost


@dataclass(frozen=True, slots=True, kw_only=True)
class MattermostRelay:
    """A running relay and a server. Ann and Ben, named by their user ids, may vote."""

    relay: RelayInProcess
    server: MattermostServer
    ann: str
    ben: str

    async def announce_reboot(self, **plan: Any) -> tuple[Event, Json]:
        """Announce a reboot; return the event and its post."""
        count = len(self.server.channel_posts)
        event = self.relay.reboot(**plan)
        await eventually(lambda: len(self.server.channel_posts) > count)
        await self.relay.settle()
        return event, self.server.channel_posts[-1]

    async def votes(self, event: Event) -> list[tuple[str, str]]:
        """Return the recorded decisions about an event, each with its principal."""
        votes = (await self.relay.event(event))["votes"]
        return [(vote["decision"], vote["principal"]) for vote in votes]

    async def count_events(self, event: Event, name: str) -> int:
        """Return how many CloudEvents of this name the history of an event has."""
        history = (await self.relay.event(event))["history"]
        return sum(entry["type"] == f"io.imdsrelay.{name}.v1" for entry in history)


@asynccontextmanager
async def running_mattermost_relay(
    directory: Path, server: MattermostServer, azure: Simulator
) -> AsyncIterator[MattermostRelay]:
    """Run a relay. Over the same directory it is the same relay, started again."""
    approvals = {"rules": [rule(2, server.principal(server.ann), server.principal(server.ben))]}
    sink = server.sink_section(approve_in_chat=True, secret=SECRET)
    async with stage(directory, [sink], approvals=approvals, azure=azure) as relay:
        server.relay_url = relay.url
        yield MattermostRelay(relay=relay, server=server, ann=server.ann, ben=server.ben)
