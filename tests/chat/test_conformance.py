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


@dataclass(slots=True, kw_only=True)
class ChatReceiver(BehindProxy):
    """A stand-in behind a proxy. ``set_refusing`` has it refuse every message, or none."""

    kind: str
    secrets_in_settings: tuple[str, ...]
    secret_key: str
    section: dict[str, Any]
    set_refusing: Callable[[bool], None]
    messages: Callable[[], list[str]]
    active_markup: Callable[[], list[str]]
    replies: Callable[[], list[str]] = list
    edits: bool = False

    def settings(self) -> dict[str, Any]:
        return dict(self.section)

    async def refuse(self) -> None:
        self.set_refusing(True)

    @override
    async def reconnect(self) -> None:
        self.set_refusing(False)
        await BehindProxy.reconnect(self)


@asynccontextmanager
async def proxy_at(port: int) -> AsyncIterator[tuple[CountingProxy, str]]:
    """Yield a proxy to the port, and the URL at which it listens."""
    async with counting_proxy(f"http://127.0.0.1:{port}") as (proxy, _):
        yield proxy, f"http://127.0.0.1:{proxy.near_port}"


@asynccontextmanager
async def teams() -> AsyncIterator[ReceiverControl]:
    path = teams_server.PATH
    async with teams_server.running_workflow() as workflow, proxy_at(workflow.port) as (proxy, url):

        def set_refusing(refusing: bool) -> None:
            workflow.state = "forbidding" if refusing else "on"

        def messages() -> list[str]:
            assert workflow.failed_runs == []
            return workflow.card_texts

        yield ChatReceiver(
            proxy=proxy,
            kind="teams",
            secrets_in_settings=(teams_server.SIGNATURE, path),
            secret_key="url",
            section={"url": f"{url}{path}{teams_server.QUERY}", "allow_http": True},
            set_refusing=set_refusing,
            messages=messages,
            active_markup=lambda: [
                markup for card in workflow.cards for markup in teams_server.active_markup(card)
            ],
        )


@asynccontextmanager
async def mattermost() -> AsyncIterator[ReceiverControl]:
    """A server, and the bot in its channel."""
    post_text = mattermost_server.post_text
    async with (
        mattermost_server.running_mattermost() as server,
        proxy_at(server.port) as (proxy, url),
    ):

        def set_refusing(refusing: bool) -> None:
            server.rejects_tokens = refusing

        yield ChatReceiver(
            proxy=proxy,
            kind="mattermost",
            edits=True,
            secrets_in_settings=(mattermost_server.TOKEN,),
            secret_key="token",
            section=server.sink_section(api_url=url),
            set_refusing=set_refusing,
            messages=lambda: [post_text(post) for post in server.channel_posts],
            replies=lambda: [post_text(post) for post in server.replies],
            active_markup=lambda: [
                markup
                for post in server.posts.values()
                for markup in mattermost_server.active_markup(post)
            ],
        )


@asynccontextmanager
async def slack() -> AsyncIterator[ReceiverControl]:
    async with slack_server.running_slack() as server, proxy_at(server.port) as (proxy, url):

        def set_refusing(refusing: bool) -> None:
            refusal = {"*": slack_server.api_error("channel_not_found")}
            server.failures = refusal if refusing else {}

        yield ChatReceiver(
            proxy=proxy,
            kind="slack",
            edits=True,
            secrets_in_settings=(slack_server.TOKEN, slack_server.APP_TOKEN),
            secret_key="token",
            section=server.settings(api_url=f"{url}/api/"),
            set_refusing=set_refusing,
            messages=lambda: [post.text_of_blocks() for post in server.channel_messages()],
            replies=lambda: [
                post.text_of_blocks()
                for post in server.messages.values()
                if post.thread_ts is not None
            ],
            # Only the text beside the blocks, for notifications, is read for markup.
            active_markup=lambda: [
                markup
                for post in server.messages.values()
                for markup in re.findall(r"<(?!!date\^)[^>]*>", post.text)
            ],
        )


@asynccontextmanager
async def apprise() -> AsyncIterator[ReceiverControl]:
    """A receiver of Apprise's json://."""
    markup = r"\w+://\S+|@\w+|<[\w!/@]\S*|\]\("
    async with apprise_server.running_service() as service, proxy_at(service.port) as (proxy, _):

        def set_refusing(refusing: bool) -> None:
            service.status = 403 if refusing else 200

        yield ChatReceiver(
            proxy=proxy,
            kind="apprise",
            secrets_in_settings=(apprise_server.TOKEN, apprise_server.PASSWORD),
            secret_key="urls",
            section={"urls": [apprise_server.apprise_url(proxy.near_port)], "allow_http": True},
            set_refusing=set_refusing,
            messages=lambda: [
                text.replace("\N{ZERO WIDTH SPACE}", "") for text in service.messages
            ],
            active_markup=lambda: re.findall(markup, "\n".join(service.messages)),
        )


RECEIVERS: dict[str, Callable[[], AbstractAsyncContextManager[ReceiverControl]]] = {
    "mattermost": mattermost,
    "apprise": apprise,
    "slack": slack,
    "teams": teams,
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
