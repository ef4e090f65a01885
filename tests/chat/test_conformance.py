"""Every chat through every case of `conformance`, each with the stand-in of its platform behind a door."""

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
class ForTeams:
    """A workflow."""

    door: Door
    workflow: teams_server.Workflow
    kind: str = "teams"
    edits: bool = False
    telltales: tuple[str, ...] = (teams_server.SIGNATURE, teams_server.PATH)

    def settings(self) -> dict[str, Any]:
        return {
            "url": f"http://127.0.0.1:{self.door.port}{teams_server.PATH}{teams_server.QUERY}",
            "allow_http": True,
        }

    async def leave(self) -> None:
        await self.door.shut()

    async def refuse(self) -> None:
        self.workflow.state = "forbidding"

    async def hang(self) -> None:
        self.door.open.clear()

    async def come(self) -> None:
        self.workflow.state = "on"
        await self.door.listen()

    def messages(self) -> list[str]:
        assert self.workflow.failed == []
        return self.workflow.texts

    def replies(self) -> list[str]:
        return []

    def slipped_in(self) -> list[str]:
        return [one for card in self.workflow.cards for one in teams_server.alive(card)]


@asynccontextmanager
async def for_teams() -> AsyncIterator[FarSide]:
    """A workflow behind a door."""
    async with teams_server.workflow() as workflow:
        door = Door("127.0.0.1", workflow.port)
        await door.listen()
        yield ForTeams(door, workflow)
        await door.shut()


@dataclass(slots=True)
class ForMattermost:
    """A server with a channel."""

    server: mattermost_server.Mattermost
    kind: str = "mattermost"
    edits: bool = True
    telltales: tuple[str, ...] = (mattermost_server.TOKEN,)

    def settings(self) -> dict[str, Any]:
        return {
            key: value for key, value in self.server.sink().items() if key not in {"kind", "name"}
        }

    async def leave(self) -> None:
        await self.server.leave()

    async def refuse(self) -> None:
        self.server.mistrusts = True

    async def hang(self) -> None:
        self.server.stalled = ""

    async def come(self) -> None:
        await self.server.come()

    def messages(self) -> list[str]:
        return [self.server.texts_of(post) for post in self.server.roots]

    def replies(self) -> list[str]:
        return [
            self.server.texts_of(post) for post in self.server.posts.values() if post["root_id"]
        ]

    def slipped_in(self) -> list[str]:
        return [one for post in self.server.posts.values() for one in self.server.alive_in(post)]


@asynccontextmanager
async def for_mattermost() -> AsyncIterator[FarSide]:
    """A server, and the bot in its channel."""
    async with mattermost_server.mattermost() as server:
        yield ForMattermost(server)


@dataclass(slots=True)
class ForSlack:
    """A workspace with a channel."""

    door: Door
    server: slack_server.SlackServer
    kind: str = "slack"
    edits: bool = True
    telltales: tuple[str, ...] = (slack_server.TOKEN, slack_server.SECRET)

    def settings(self) -> dict[str, Any]:
        given = self.server.settings(api_url=f"http://127.0.0.1:{self.door.port}/api/")
        return {key: value for key, value in given.items() if key not in {"kind", "name"}}

    async def leave(self) -> None:
        await self.door.shut()

    async def refuse(self) -> None:
        self.server.trouble["*"] = slack_server.error("channel_not_found")

    async def hang(self) -> None:
        self.door.open.clear()

    async def come(self) -> None:
        self.server.trouble.clear()
        await self.door.listen()

    def messages(self) -> list[str]:
        return [post.words() for post in self.server.tops()]

    def replies(self) -> list[str]:
        return [post.words() for post in self.server.messages.values() if post.thread is not None]

    def slipped_in(self) -> list[str]:
        """In blocks words are words, whatever they are; only the text beside them, for notifications, is read for markup."""
        return [
            found
            for post in self.server.messages.values()
            for found in re.findall(r"<(?!!date\^)[^>]*>", post.text)
        ]


@asynccontextmanager
async def for_slack() -> AsyncIterator[FarSide]:
    """A workspace behind a door."""
    async with slack_server.slack() as server:
        door = Door("127.0.0.1", server.port)
        await door.listen()
        yield ForSlack(door, server)
        await door.shut()


@dataclass(slots=True)
class ForApprise:
    """A receiver of Apprise's json://."""

    door: Door
    service: apprise_server.Service
    kind: str = "apprise"
    edits: bool = False
    telltales: tuple[str, ...] = (apprise_server.TOKEN, apprise_server.PASSWORD)

    def settings(self) -> dict[str, Any]:
        return {"urls": [apprise_server.url_of(self.door.port)], "allow_http": True}

    async def leave(self) -> None:
        await self.door.shut()

    async def refuse(self) -> None:
        self.service.status = 403

    async def hang(self) -> None:
        self.door.open.clear()

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
async def for_apprise() -> AsyncIterator[FarSide]:
    """A receiver behind a door."""
    async with apprise_server.service() as service:
        door = Door("127.0.0.1", service.port)
        await door.listen()
        yield ForApprise(door, service)
        await door.shut()


MEMBERS: dict[str, Callable[[], AbstractAsyncContextManager[FarSide]]] = {
    "mattermost": for_mattermost,
    "apprise": for_apprise,
    "slack": for_slack,
    "teams": for_teams,
}


def test_every_member_of_the_family_is_here() -> None:
    assert set(MEMBERS) == set(plugins.members(platforms))


@pytest.fixture(params=sorted(MEMBERS))
async def far(request: pytest.FixtureRequest) -> AsyncIterator[FarSide]:
    """The far side of each member in turn."""
    async with MEMBERS[request.param]() as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_a_chat(
    case: Case, far: FarSide, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await case(far, tmp_path, caplog)
