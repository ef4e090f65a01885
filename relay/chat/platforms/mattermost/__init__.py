"""Mattermost: a bot keeps one message per event current in one channel.

People answer with links or, if configured, with buttons. `settings` is the platform's section of
the configuration, `channel` posts, and `interactions` handles clicks.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from typing_extensions import override

from relay.chat import CallbackRefused, CallbackReply
from relay.chat.context import ChatContext
from relay.chat.live_message import LiveMessageSink
from relay.chat.platforms.mattermost.api import MattermostApi
from relay.chat.platforms.mattermost.channel import Channel
from relay.chat.platforms.mattermost.identity import LOOKUP_TIMEOUT, MemberDirectory
from relay.chat.platforms.mattermost.interactions import Interactions
from relay.chat.platforms.mattermost.settings import Settings
from relay.chat.platforms.mattermost.user_names import UserNames
from relay.clock import Clock
from relay.doctor_findings import Finding, failure, ok
from relay.errors import Deferred
from relay.net.http import open_session

_DOCUMENTATION = "see docs/chat/mattermost.md"


class MattermostSink(LiveMessageSink):
    """The sink of one channel. ``interactions`` is None if nobody decides in the chat."""

    def __init__(
        self,
        settings: Settings,
        context: ChatContext,
        channel: Channel,
        clock: Clock,
        interactions: Interactions | None,
    ) -> None:
        super().__init__(settings, context, channel, clock, in_chat=interactions is not None)
        self._interactions = interactions

    @override
    async def handle_callback(self, headers: Mapping[str, str], body: bytes) -> CallbackReply:
        """Handle a click or the submission of a dialog. Raises CallbackRefused."""
        if self._interactions is None:
            raise CallbackRefused("expected no calls, because approve_in_chat is off")
        return await self._interactions.handle_callback(body)


@asynccontextmanager
async def connect(
    settings: Settings, clock: Clock, context: ChatContext
) -> AsyncIterator[MattermostSink]:
    """Open the sink's HTTP session. Does not wait for Mattermost. Raises ConfigError."""
    async with open_session() as session:
        api = MattermostApi(session, settings, clock)
        interactions = None
        if settings.approve_in_chat:
            members = MemberDirectory(api, settings.channel, clock, lookup_timeout=LOOKUP_TIMEOUT)
            interactions = Interactions(
                settings, context, api, members, clock, lookup_timeout=LOOKUP_TIMEOUT
            )
        user_names = UserNames(api, clock, lookup_timeout=LOOKUP_TIMEOUT)
        channel = Channel(api, user_names, interactions, session_id=secrets.token_hex(8))
        sink = MattermostSink(settings, context, channel, clock, interactions)
        async with sink.refreshing():
            yield sink


async def diagnose(settings: Settings, clock: Clock, scope: str) -> list[Finding]:  # noqa: ARG001  # the signature of all sinks
    """Return whether Mattermost accepts the token and shows the channel to the bot.

    Posts nothing.
    """
    subject = f"sink {settings.name}"
    async with open_session() as session:
        api = MattermostApi(session, settings, clock)
        try:
            response = await api.call("GET", f"channels/{settings.channel}")
        except Deferred as error:
            return [failure(subject, error.reason, _DOCUMENTATION)]
        if not response.ok or response.optional_text_field("id") != settings.channel:
            return [failure(subject, api.delivery_error(response).reason, _DOCUMENTATION)]
        if settings.approve_in_chat and not response.optional_text_field("team_id"):
            problem = "approve_in_chat is on, but the channel belongs to no team"
            return [failure(subject, problem, "use a channel of a team: votes name the team")]
        return [ok(subject, "Mattermost accepts the token and shows the channel to the bot")]
