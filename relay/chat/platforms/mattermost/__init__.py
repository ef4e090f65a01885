"""Mattermost: a bot keeps one message per event current in one channel.

People answer with links or, if configured, with buttons. `api` has the section of the configuration
and calls the server, `posts` renders and posts cards, and `clicks` takes decisions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from typing_extensions import override

from relay.chat import CallbackRefused, Reply
from relay.chat.context import ChatContext
from relay.chat.live_message import LiveMessageSink
from relay.chat.platforms.mattermost.api import NO_API, MattermostApi, Settings
from relay.chat.platforms.mattermost.clicks import Clicks
from relay.chat.platforms.mattermost.posts import Channel
from relay.clock import Clock
from relay.errors import Deferred
from relay.logs import Finding, failure, ok
from relay.net.http import open_session


class MattermostSink(LiveMessageSink):
    """The sink of one channel. ``clicks`` is None if nobody decides in the chat."""

    clicks: Clicks | None = None

    @override
    async def handle_callback(self, headers: Mapping[str, str], body: bytes) -> Reply:
        if self.clicks is None:
            raise CallbackRefused("expected no calls, because approve_in_chat is off")
        return await self.clicks.handle(body)


@asynccontextmanager
async def connect(
    settings: Settings, clock: Clock, context: ChatContext
) -> AsyncIterator[MattermostSink]:
    async with open_session() as session:
        api = MattermostApi(session, settings, clock)
        clicks = Clicks(settings, context, api, clock) if settings.approve_in_chat else None
        channel = Channel(api, clicks.integration if clicks is not None else None)
        sink = MattermostSink(settings, context, channel, clock, in_chat=clicks is not None)
        sink.clicks = clicks
        async with sink.refreshing():
            yield sink


async def diagnose(settings: Settings, clock: Clock, scope: str) -> list[Finding]:  # noqa: ARG001  # the signature of all sinks
    """Return whether Mattermost takes the token and shows the channel. Posts nothing."""
    subject = f"sink {settings.name}"
    async with open_session() as session:
        api = MattermostApi(session, settings, clock)
        try:
            channel = await api.call("GET", f"channels/{settings.channel}")
        except Deferred as error:
            return [failure(subject, error.reason, "see docs/chat/mattermost.md")]
    if channel.get("id") != settings.channel:
        return [failure(subject, NO_API, "see docs/chat/mattermost.md")]
    if settings.approve_in_chat and not channel.get("team_id"):
        problem = "approve_in_chat is on, but the channel belongs to no team"
        return [failure(subject, problem, "use a channel of a team: votes name the team")]
    return [ok(subject, "Mattermost accepts the token and shows the channel to the bot")]
