"""A relay whose reboots need two votes from people of a Mattermost channel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relay.simulator import Event, Simulator
from tests.chat.mattermost_server import SECRET, Json, MattermostServer
from tests.chat.running_relay import rule, stage
from tests.eventually import eventually
from tests.relay_in_process import RelayInProcess


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
