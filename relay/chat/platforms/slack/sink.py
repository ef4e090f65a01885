"""The Slack sink: connects the modules of this package and handles Slack's HTTP requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from typing_extensions import override

from relay.chat import CallbackRefused, CallbackReply
from relay.chat.context import ChatContext
from relay.chat.live_message import ChatPlatform, LiveMessageSink, background_task_until_exit
from relay.chat.platforms.slack.channel import Channel
from relay.chat.platforms.slack.identity import LOOKUP_TIMEOUT, MemberVerifier
from relay.chat.platforms.slack.interactions import Interactions
from relay.chat.platforms.slack.private_reply import ResponseUrlSender
from relay.chat.platforms.slack.requests import parse_click_or_command_http_body, verify_signature
from relay.chat.platforms.slack.settings import Settings
from relay.chat.platforms.slack.socket_mode import SocketConnector, SocketMode
from relay.chat.platforms.slack.web import WebApi
from relay.clock import Clock
from relay.doctor_findings import Finding, failure, ok
from relay.errors import DeliveryError
from relay.net.http import open_session


class SlackSink(LiveMessageSink):
    """The sink of one channel."""

    def __init__(
        self,
        settings: Settings,
        context: ChatContext,
        platform: ChatPlatform,
        clock: Clock,
        interactions: Interactions,
    ) -> None:
        super().__init__(settings, context, platform, clock, in_chat=settings.approve_in_chat)
        self._slack_settings = settings
        self._interactions = interactions

    @override
    async def handle_callback(self, headers: Mapping[str, str], body: bytes) -> CallbackReply:
        """Handle a request of Slack. Its decision is on disk when this returns.

        Raises CallbackRefused.
        """
        settings = self._slack_settings
        if not settings.uses_http_callbacks:
            raise CallbackRefused(
                f"sink {settings.name} has no signing_secret: Slack must not call it"
            )
        try:
            signing_secret = settings.current_signing_secret()
        except ValueError as error:
            raise CallbackRefused(f"signing_secret is no longer usable: {error}") from None
        verify_signature(headers, body, signing_secret, self._clock.now())
        return await self._interactions.handle(parse_click_or_command_http_body(body))


@asynccontextmanager
async def connect(
    settings: Settings, clock: Clock, context: ChatContext
) -> AsyncIterator[SlackSink]:
    """Open the sink's HTTP session and, if configured, Socket Mode. Does not wait for Slack."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        api = WebApi(session, settings, clock)
        members = MemberVerifier(api, clock, lookup_timeout=LOOKUP_TIMEOUT)
        replies = ResponseUrlSender(session, settings)
        await stack.enter_async_context(replies.cancel_at_end())
        interactions = Interactions(settings, context, members, clock, replies)
        channel = Channel(
            api, settings.channel, members.team_id, has_interactions=settings.has_interactions
        )
        sink = SlackSink(settings, context, channel, clock, interactions)
        await stack.enter_async_context(sink.refreshing())
        if settings.uses_socket_mode:
            connector = SocketConnector(api, session, settings)
            socket_mode = SocketMode(connector, clock, interactions.handle, sink_name=settings.name)
            task_name = f"{settings.name}: Socket Mode"
            await stack.enter_async_context(
                background_task_until_exit(socket_mode.run(), task_name)
            )
        yield sink


async def diagnose(settings: Settings, clock: Clock) -> list[Finding]:
    """Return whether Slack accepts the tokens and grants the scopes. Posts nothing."""
    subject = f"sink {settings.name}"
    async with open_session() as session:
        api = WebApi(session, settings, clock)
        members = MemberVerifier(api, clock, lookup_timeout=LOOKUP_TIMEOUT)
        try:
            team_id = await members.team_id()
            if settings.has_interactions:
                await members.app_id()
            if settings.uses_socket_mode:
                await api.call(
                    api.methods.apps_connections_open, app_token=settings.app_level_token()
                )
        except DeliveryError as error:
            return [failure(subject, error.reason, "see docs/chat/slack.md")]
        return [ok(subject, f"Slack accepts the tokens, for the workspace {team_id}")]
