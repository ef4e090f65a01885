"""A channel as a sink: what it is made of, and Slack's own calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from relay.chat import CallbackRefused, CallbackReply
from relay.chat.context import ChatContext
from relay.chat.live_message import LiveMessageSink, Platform
from relay.chat.platforms.slack.channel import Channel
from relay.chat.platforms.slack.identity import MemberDirectory
from relay.chat.platforms.slack.interactions import Interactions
from relay.chat.platforms.slack.payloads import parse_payload, verify_signature
from relay.chat.platforms.slack.private_replies import PrivateReplies
from relay.chat.platforms.slack.settings import Settings
from relay.chat.platforms.slack.socket_mode import SocketMode
from relay.chat.platforms.slack.web import WebApi
from relay.clock import Clock
from relay.diagnostics import Finding, failure, ok
from relay.errors import DeliveryError
from relay.net.http import open_session


class Slack(LiveMessageSink):
    """One channel."""

    def __init__(
        self,
        settings: Settings,
        context: ChatContext,
        platform: Platform,
        clock: Clock,
        answers: Interactions,
    ) -> None:
        super().__init__(settings, context, platform, clock, in_chat=settings.approve_in_chat)
        self._slack = settings
        self._now = clock.now
        self._answers = answers

    async def handle_callback(self, headers: Mapping[str, str], body: bytes) -> CallbackReply:
        """Take a call of Slack; its decision is on disk when this returns. Raises ChatRefused."""
        if not self._slack.accepts_callbacks:
            raise CallbackRefused(f"sink {self._slack.name} has no signing_secret: nobody calls it")
        try:
            secret = self._slack.secret()
        except ValueError as error:
            raise CallbackRefused(f"signing_secret cannot be used any more: {error}") from None
        verify_signature(headers, body, secret, self._now())
        return await self._answers.handle(parse_payload(body))


@asynccontextmanager
async def connect(settings: Settings, clock: Clock, context: ChatContext) -> AsyncIterator[Slack]:
    """Open the sink's session, and begin to listen where that is asked for. Nothing is waited for."""
    async with AsyncExitStack() as stack:
        session, base = await stack.enter_async_context(open_session()), settings.base()
        api = WebApi(session, base, settings.bot_token, settings.timeout)
        people = MemberDirectory(api, clock)
        responses = PrivateReplies(session, base, allow_http=settings.allow_http)
        await stack.enter_async_context(responses.ended())
        answers = Interactions(settings, context, people, clock, responses.send)
        channel = Channel(
            api,
            settings.channel,
            people.team,
            heard=settings.accepts_callbacks or settings.has_socket,
        )
        slack = Slack(settings, context, channel, clock, answers)
        await stack.enter_async_context(slack.refreshing())
        if settings.has_socket:
            socket = SocketMode(
                api,
                settings.socket_token,
                session,
                clock,
                answers.handle,
                name=settings.name,
                allow_http=settings.allow_http,
            )
            await stack.enter_async_context(_beside(socket.run(), f"{settings.name}: Socket Mode"))
        yield slack


async def diagnose(settings: Settings, clock: Clock) -> list[Finding]:
    """Whether Slack takes the tokens, and has given the rights that answers need. Nothing is posted."""
    about = f"sink {settings.name}"
    async with open_session() as session:
        api = WebApi(session, settings.base(), settings.bot_token, settings.timeout)
        people = MemberDirectory(api, clock)
        try:
            team = await people.team()
            if settings.accepts_callbacks or settings.has_socket:
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
