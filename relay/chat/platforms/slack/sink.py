"""A channel as a sink: what it is made of, and Slack's own calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from relay.chat import ChatRefused, Reply
from relay.chat.board import Board
from relay.chat.live_message import Current, Platform
from relay.chat.platforms.slack.channel import Channel
from relay.chat.platforms.slack.identity import People
from relay.chat.platforms.slack.interactions import Answers
from relay.chat.platforms.slack.payloads import read, verify
from relay.chat.platforms.slack.private_replies import Responses
from relay.chat.platforms.slack.settings import Settings
from relay.chat.platforms.slack.socket_mode import SocketMode
from relay.chat.platforms.slack.web import WebApi
from relay.clock import Clock
from relay.diagnostics import Finding, failure, ok
from relay.errors import DeliveryError
from relay.net.http import open_session


class Slack(Current):
    """One channel."""

    def __init__(self, settings: Settings, board: Board, platform: Platform, clock: Clock, answers: Answers) -> None:
        super().__init__(settings, board, platform, clock, in_chat=settings.approve_in_chat)
        self._slack = settings
        self._now = clock.now
        self._answers = answers

    async def hear(self, headers: Mapping[str, str], body: bytes) -> Reply:
        """Take a call of Slack; its decision is on disk when this returns. Raises ChatRefused."""
        if not self._slack.is_called:
            raise ChatRefused(f"sink {self._slack.name} has no signing_secret: nobody calls it")
        try:
            secret = self._slack.secret()
        except ValueError as error:
            raise ChatRefused(f"signing_secret cannot be used any more: {error}") from None
        verify(headers, body, secret, self._now())
        return await self._answers.take(read(body))


@asynccontextmanager
async def opened(settings: Settings, clock: Clock, board: Board) -> AsyncIterator[Slack]:
    """Open the sink's session, and begin to listen where that is asked for. Nothing is waited for."""
    async with AsyncExitStack() as stack:
        session, base = await stack.enter_async_context(open_session()), settings.base()
        api = WebApi(session, base, settings.bot_token, settings.timeout)
        people = People(api, clock)
        responses = Responses(session, base, allow_http=settings.allow_http)
        await stack.enter_async_context(responses.ended())
        answers = Answers(settings, board, people, clock, responses.send)
        channel = Channel(api, settings.channel, people.team, heard=settings.is_called or settings.has_socket)
        slack = Slack(settings, board, channel, clock, answers)
        await stack.enter_async_context(slack.kept())
        if settings.has_socket:
            socket = SocketMode(
                api, settings.socket_token, session, clock, answers.take, name=settings.name, allow_http=settings.allow_http
            )
            await stack.enter_async_context(_beside(socket.run(), f"{settings.name}: Socket Mode"))
        yield slack


async def examined(settings: Settings, clock: Clock) -> list[Finding]:
    """Whether Slack takes the tokens, and has given the rights that answers need. Nothing is posted."""
    about = f"sink {settings.name}"
    async with open_session() as session:
        api = WebApi(session, settings.base(), settings.bot_token, settings.timeout)
        people = People(api, clock)
        try:
            team = await people.team()
            if settings.is_called or settings.has_socket:
                await people.app()
            if settings.has_socket:
                await api.call(api.methods.apps_connections_open, app_token=settings.socket_token())
        except DeliveryError as error:
            return [failure(about, error.reason, "see docs/chat/slack.md")]
        return [ok(about, f"Slack takes what it was given, for the workspace {team}")]


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
