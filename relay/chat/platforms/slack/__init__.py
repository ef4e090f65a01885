"""Slack: one message per event, kept current; people answer with buttons or links.

`api` has the platform's section of the configuration and calls Slack, `messages` renders and posts
cards, `socket_mode` receives clicks and commands, `clicks` does what they ask for, and `members`
knows who may.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from relay.chat import ChatSink
from relay.chat.context import ChatContext
from relay.chat.live_message import LiveMessageSink, background_task_until_exit
from relay.chat.platforms.slack.api import Settings, WebApi
from relay.chat.platforms.slack.clicks import Answers
from relay.chat.platforms.slack.members import Members
from relay.chat.platforms.slack.messages import Channel
from relay.chat.platforms.slack.socket_mode import SocketMode
from relay.clock import Clock
from relay.doctor_findings import Finding, failure, ok
from relay.errors import DeliveryError
from relay.net.http import open_session

__all__ = ["Settings", "connect", "diagnose"]


@asynccontextmanager
async def connect(
    settings: Settings, clock: Clock, context: ChatContext
) -> AsyncIterator[ChatSink]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        api = WebApi(session, settings, clock)
        members = Members(api)
        channel = Channel(api, settings, members)
        sink = LiveMessageSink(settings, context, channel, clock, in_chat=settings.approve_in_chat)
        await stack.enter_async_context(sink.refreshing())
        if settings.uses_socket_mode:
            answers = Answers(settings, context, members, clock)
            socket_mode = SocketMode(session, api, answers, clock, sink_name=settings.name)
            task_name = f"{settings.name}: Socket Mode"
            await stack.enter_async_context(
                background_task_until_exit(socket_mode.run(), task_name)
            )
        yield sink


async def diagnose(settings: Settings, clock: Clock, scope: str) -> list[Finding]:  # noqa: ARG001  # the signature of all sinks
    """Return whether Slack accepts the tokens and grants the scopes. Posts nothing."""
    subject = f"sink {settings.name}"
    async with open_session() as session:
        api = WebApi(session, settings, clock)
        try:
            workspace = await Members(api).workspace()
            if settings.uses_socket_mode:
                await api.call("users.info", {"user": workspace.bot_user_id})  # needs users:read
                await api.open_socket_url()
        except DeliveryError as error:
            return [failure(subject, error.reason, "see docs/chat/slack.md")]
        return [ok(subject, f"Slack accepts the tokens, for the workspace {workspace.team_id}")]
