"""Mattermost: a bot keeps one message per event current in one channel; people answer by links or, if so configured, by buttons.

`settings` is its section of the configuration; `post` makes posts of cards (pure), `channel` posts and edits them, `api` calls
the server; `proof` seals what a button carries (pure), `people` finds out who clicked, `answers` brings it to the board.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from relay.chat import CallbackRefused, CallbackReply
from relay.chat.context import ChatContext
from relay.chat.live_message import LiveMessageSink
from relay.chat.platforms.mattermost.api import Api
from relay.chat.platforms.mattermost.channel import Channel
from relay.chat.platforms.mattermost.identity import MemberDirectory
from relay.chat.platforms.mattermost.interactions import Interactions
from relay.chat.platforms.mattermost.settings import Settings
from relay.clock import Clock
from relay.diagnostics import Finding, failure, ok
from relay.errors import ConfigError, Deferred
from relay.net.http import open_session


class Mattermost(LiveMessageSink):
    """One channel, where people may answer."""

    def __init__(
        self,
        settings: Settings,
        context: ChatContext,
        channel: Channel,
        clock: Clock,
        answers: Interactions | None,
    ) -> None:
        super().__init__(settings, context, channel, clock, in_chat=answers is not None)
        self._answers = answers

    async def handle_callback(self, headers: Mapping[str, str], body: bytes) -> CallbackReply:  # noqa: ARG002  # Mattermost proves nothing in headers
        """Take a click or a dialog's submission. Raises ChatRefused."""
        if self._answers is None:
            raise CallbackRefused("expected no calls, as approve_in_chat is off")
        return await self._answers.handle_callback(body)


@asynccontextmanager
async def connect(
    settings: Settings, clock: Clock, context: ChatContext
) -> AsyncIterator[Mattermost]:
    """Open the sink's own session; nothing is connected until the first event. Raises ConfigError."""
    async with open_session() as session:
        api = Api(
            session,
            settings.base(),
            settings.bearer,
            settings.channel,
            clock,
            timeout=settings.timeout,
        )
        people = MemberDirectory(api, settings.channel, clock)
        answers = None
        if settings.approve_in_chat:
            if context.public_url is None:
                raise ConfigError(
                    f"sink {settings.name}: approve_in_chat needs api.public_url, which Mattermost calls"
                )
            url = f"{context.public_url}/v1/chat/{settings.name}"
            answers = Interactions(
                settings.name, settings.channel, settings.key, url, api, people, context, clock
            )
        mattermost = Mattermost(
            settings, context, Channel(api, people, answers, secrets.token_hex(8)), clock, answers
        )
        async with mattermost.refreshing():
            yield mattermost


async def diagnose(settings: Settings, clock: Clock, scope: str) -> list[Finding]:  # noqa: ARG001  # the contract of the family
    """Whether the server takes the token and shows the channel to the bot. Nothing is posted."""
    about = f"sink {settings.name}"
    async with open_session() as session:
        api = Api(
            session,
            settings.base(),
            settings.bearer,
            settings.channel,
            clock,
            timeout=settings.timeout,
        )
        try:
            said = await api.ask("GET", f"channels/{settings.channel}")
        except Deferred as error:
            return [failure(about, error.reason, "see docs/chat/mattermost.md")]
        if not said.ok or said.text("id") != settings.channel:
            return [failure(about, api.delivery_error(said).reason, "see docs/chat/mattermost.md")]
        if settings.approve_in_chat and not said.text("team_id"):
            return [
                failure(
                    about,
                    "approve_in_chat is on, and the channel belongs to no team",
                    "use a channel of a team: votes name it",
                )
            ]
        return [ok(about, "Mattermost takes the token, and shows the channel to the bot")]
