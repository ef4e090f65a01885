"""Runs every case of `conformance` with every chat platform."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relay import plugins
from relay.chat import platforms
from tests.chat import apprise_server, mattermost_server, slack_server, teams_server
from tests.chat.conformance import CASES, Case, FarSide
from tests.sinks.test_conformance import Door


@dataclass(slots=True)
class _BehindDoor:
    """What all far sides behind a door have in common."""

    door: Door

    async def leave(self) -> None:
        await self.door.shut()

    async def hang(self) -> None:
        self.door.open.clear()


@asynccontextmanager
async def open_door(port: int) -> AsyncIterator[Door]:
    """Open a door in front of a server at this port."""
    door = Door("127.0.0.1", port)
    await door.listen()
    yield door
    await door.shut()


@dataclass(slots=True)
class TeamsFarSide(_BehindDoor):
    """A workflow."""

    workflow: teams_server.TeamsWorkflow
    kind: str = "teams"
    edits: bool = False
    telltales: tuple[str, ...] = (teams_server.SIGNATURE, teams_server.PATH)

    def settings(self) -> dict[str, Any]:
        return {
            "url": f"http://127.0.0.1:{self.door.port}{teams_server.PATH}{teams_server.QUERY}",
            "allow_http": True,
        }

    async def refuse(self) -> None:
        self.workflow.state = "forbidding"

    async def come(self) -> None:
        self.workflow.state = "on"
        await self.door.listen()

    def messages(self) -> list[str]:
        assert self.workflow.failed_runs == []
        return self.workflow.card_texts

    def replies(self) -> list[str]:
        return []

    def slipped_in(self) -> list[str]:
        return [one for card in self.workflow.cards for one in teams_server.active_markup(card)]


@asynccontextmanager
async def teams_far_side() -> AsyncIterator[FarSide]:
    """A workflow behind a door."""
    async with teams_server.running_workflow() as workflow, open_door(workflow.port) as door:
        yield TeamsFarSide(door, workflow)


@dataclass(slots=True)
class MattermostFarSide:
    """A server with a channel."""

    server: mattermost_server.MattermostServer
    kind: str = "mattermost"
    edits: bool = True
    telltales: tuple[str, ...] = (mattermost_server.TOKEN,)

    def settings(self) -> dict[str, Any]:
        section = self.server.sink_section()
        return {key: value for key, value in section.items() if key not in {"kind", "name"}}

    async def leave(self) -> None:
        await self.server.stop()

    async def refuse(self) -> None:
        self.server.rejects_tokens = True

    async def hang(self) -> None:
        self.server.hanging_prefix = ""

    async def come(self) -> None:
        await self.server.start()

    def messages(self) -> list[str]:
        return [mattermost_server.post_text(post) for post in self.server.channel_posts]

    def replies(self) -> list[str]:
        return [mattermost_server.post_text(post) for post in self.server.replies]

    def slipped_in(self) -> list[str]:
        return [
            markup
            for post in self.server.posts.values()
            for markup in mattermost_server.active_markup(post)
        ]


@asynccontextmanager
async def mattermost_far_side() -> AsyncIterator[FarSide]:
    """A server, and the bot in its channel."""
    async with mattermost_server.running_mattermost() as server:
        yield MattermostFarSide(server)


@dataclass(slots=True)
class SlackFarSide(_BehindDoor):
    """A workspace with a channel."""

    server: slack_server.SlackServer
    kind: str = "slack"
    edits: bool = True
    telltales: tuple[str, ...] = (slack_server.TOKEN, slack_server.SECRET)

    def settings(self) -> dict[str, Any]:
        section = self.server.settings(api_url=f"http://127.0.0.1:{self.door.port}/api/")
        return {key: value for key, value in section.items() if key not in {"kind", "name"}}

    async def refuse(self) -> None:
        self.server.failures["*"] = slack_server.api_error("channel_not_found")

    async def come(self) -> None:
        self.server.failures.clear()
        await self.door.listen()

    def messages(self) -> list[str]:
        return [post.text_of_blocks() for post in self.server.channel_messages()]

    def replies(self) -> list[str]:
        return [
            post.text_of_blocks()
            for post in self.server.messages.values()
            if post.thread_ts is not None
        ]

    def slipped_in(self) -> list[str]:
        """Only the text beside the blocks, for notifications, is read for markup."""
        return [
            markup
            for post in self.server.messages.values()
            for markup in re.findall(r"<(?!!date\^)[^>]*>", post.text)
        ]


@asynccontextmanager
async def slack_far_side() -> AsyncIterator[FarSide]:
    """A workspace behind a door."""
    async with slack_server.running_slack() as server, open_door(server.port) as door:
        yield SlackFarSide(door, server)


@dataclass(slots=True)
class AppriseFarSide(_BehindDoor):
    """A receiver of Apprise's json://."""

    service: apprise_server.AppriseService
    kind: str = "apprise"
    edits: bool = False
    telltales: tuple[str, ...] = (apprise_server.TOKEN, apprise_server.PASSWORD)

    def settings(self) -> dict[str, Any]:
        return {"urls": [apprise_server.apprise_url(self.door.port)], "allow_http": True}

    async def refuse(self) -> None:
        self.service.status = 403

    async def come(self) -> None:
        self.service.status = 200
        await self.door.listen()

    def messages(self) -> list[str]:
        return [text.replace("\N{ZERO WIDTH SPACE}", "") for text in self.service.messages]

    def replies(self) -> list[str]:
        return []

    def slipped_in(self) -> list[str]:
        return re.findall(r"\w+://\S+|@\w+|<[\w!/@]\S*|\]\(", "\n".join(self.service.messages))


@asynccontextmanager
async def apprise_far_side() -> AsyncIterator[FarSide]:
    """A receiver behind a door."""
    async with apprise_server.running_service() as service, open_door(service.port) as door:
        yield AppriseFarSide(door, service)


FAR_SIDES: dict[str, Callable[[], AbstractAsyncContextManager[FarSide]]] = {
    "mattermost": mattermost_far_side,
    "apprise": apprise_far_side,
    "slack": slack_far_side,
    "teams": teams_far_side,
}


def test_every_platform_has_a_far_side() -> None:
    assert set(FAR_SIDES) == set(plugins.members(platforms))


@pytest.fixture(params=sorted(FAR_SIDES))
async def far(request: pytest.FixtureRequest) -> AsyncIterator[FarSide]:
    """Start the far side of each platform in turn."""
    async with FAR_SIDES[request.param]() as far_side:
        yield far_side


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_a_chat_platform(
    case: Case, far: FarSide, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await case(far, tmp_path, caplog)
