"""Runs every case of `conformance` with every chat platform."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from relay.chat import platforms
from tests.chat import apprise_server, mattermost_server, slack_server, teams_server
from tests.chat.conformance import CASES, Case, ReceiverControl, Trial
from tests.counting_proxy import CountingProxy, counting_proxy
from tests.sinks.test_conformance import BehindProxy


@asynccontextmanager
async def proxy_at(port: int) -> AsyncIterator[CountingProxy]:
    async with counting_proxy(f"http://127.0.0.1:{port}") as (proxy, _):
        yield proxy


@dataclass(slots=True)
class TeamsReceiver(BehindProxy):
    workflow: teams_server.TeamsWorkflow
    kind: str = "teams"
    edits: bool = False
    secrets_in_settings: tuple[str, ...] = (teams_server.SIGNATURE, teams_server.PATH)
    secret_key: str = "url"

    def settings(self) -> dict[str, Any]:
        return {
            "url": f"http://127.0.0.1:{self.proxy.near_port}{teams_server.PATH}{teams_server.QUERY}",
            "allow_http": True,
        }

    async def refuse(self) -> None:
        self.workflow.state = "forbidding"

    @override
    async def reconnect(self) -> None:
        self.workflow.state = "on"
        await BehindProxy.reconnect(self)

    def messages(self) -> list[str]:
        assert self.workflow.failed_runs == []
        return self.workflow.card_texts

    def replies(self) -> list[str]:
        return []

    def active_markup(self) -> list[str]:
        return [one for card in self.workflow.cards for one in teams_server.active_markup(card)]


@asynccontextmanager
async def teams_receiver() -> AsyncIterator[ReceiverControl]:
    async with teams_server.running_workflow() as workflow, proxy_at(workflow.port) as proxy:
        yield TeamsReceiver(proxy, workflow)


@dataclass(slots=True)
class MattermostReceiver:
    server: mattermost_server.MattermostServer
    kind: str = "mattermost"
    edits: bool = True
    secrets_in_settings: tuple[str, ...] = (mattermost_server.TOKEN,)
    secret_key: str = "token"

    def settings(self) -> dict[str, Any]:
        return self.server.sink_section()

    async def disconnect(self) -> None:
        await self.server.stop()

    async def refuse(self) -> None:
        self.server.rejects_tokens = True

    async def hang(self) -> None:
        self.server.hanging_prefix = ""

    async def reconnect(self) -> None:
        await self.server.start()

    def messages(self) -> list[str]:
        return [mattermost_server.post_text(post) for post in self.server.channel_posts]

    def replies(self) -> list[str]:
        return [mattermost_server.post_text(post) for post in self.server.replies]

    def active_markup(self) -> list[str]:
        return [
            markup
            for post in self.server.posts.values()
            for markup in mattermost_server.active_markup(post)
        ]


@asynccontextmanager
async def mattermost_receiver() -> AsyncIterator[ReceiverControl]:
    """A server, and the bot in its channel."""
    async with mattermost_server.running_mattermost() as server:
        yield MattermostReceiver(server)


@dataclass(slots=True)
class SlackReceiver(BehindProxy):
    server: slack_server.SlackServer
    kind: str = "slack"
    edits: bool = True
    secrets_in_settings: tuple[str, ...] = (slack_server.TOKEN, slack_server.APP_TOKEN)
    secret_key: str = "token"

    def settings(self) -> dict[str, Any]:
        return self.server.settings(api_url=f"http://127.0.0.1:{self.proxy.near_port}/api/")

    async def refuse(self) -> None:
        self.server.failures["*"] = slack_server.api_error("channel_not_found")

    @override
    async def reconnect(self) -> None:
        self.server.failures.clear()
        await BehindProxy.reconnect(self)

    def messages(self) -> list[str]:
        return [post.text_of_blocks() for post in self.server.channel_messages()]

    def replies(self) -> list[str]:
        return [
            post.text_of_blocks()
            for post in self.server.messages.values()
            if post.thread_ts is not None
        ]

    def active_markup(self) -> list[str]:
        """Only the text beside the blocks, for notifications, is read for markup."""
        return [
            markup
            for post in self.server.messages.values()
            for markup in re.findall(r"<(?!!date\^)[^>]*>", post.text)
        ]


@asynccontextmanager
async def slack_receiver() -> AsyncIterator[ReceiverControl]:
    async with slack_server.running_slack() as server, proxy_at(server.port) as proxy:
        yield SlackReceiver(proxy, server)


@dataclass(slots=True)
class AppriseReceiver(BehindProxy):
    """A receiver of Apprise's json://."""

    service: apprise_server.AppriseService
    kind: str = "apprise"
    edits: bool = False
    secrets_in_settings: tuple[str, ...] = (apprise_server.TOKEN, apprise_server.PASSWORD)
    secret_key: str = "urls"

    def settings(self) -> dict[str, Any]:
        return {"urls": [apprise_server.apprise_url(self.proxy.near_port)], "allow_http": True}

    async def refuse(self) -> None:
        self.service.status = 403

    @override
    async def reconnect(self) -> None:
        self.service.status = 200
        await BehindProxy.reconnect(self)

    def messages(self) -> list[str]:
        return [text.replace("\N{ZERO WIDTH SPACE}", "") for text in self.service.messages]

    def replies(self) -> list[str]:
        return []

    def active_markup(self) -> list[str]:
        return re.findall(r"\w+://\S+|@\w+|<[\w!/@]\S*|\]\(", "\n".join(self.service.messages))


@asynccontextmanager
async def apprise_receiver() -> AsyncIterator[ReceiverControl]:
    async with apprise_server.running_service() as service, proxy_at(service.port) as proxy:
        yield AppriseReceiver(proxy, service)


RECEIVERS: dict[str, Callable[[], AbstractAsyncContextManager[ReceiverControl]]] = {
    "mattermost": mattermost_receiver,
    "apprise": apprise_receiver,
    "slack": slack_receiver,
    "teams": teams_receiver,
}


def test_every_platform_has_a_receiver() -> None:
    assert set(RECEIVERS) == {module.name for module in pkgutil.iter_modules(platforms.__path__)}


@pytest.fixture(params=sorted(RECEIVERS))
async def receiver(request: pytest.FixtureRequest) -> AsyncIterator[ReceiverControl]:
    async with RECEIVERS[request.param]() as control:
        yield control


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_a_chat_platform(
    case: Case, receiver: ReceiverControl, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await case(Trial(receiver, tmp_path, caplog))
