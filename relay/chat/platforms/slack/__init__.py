"""Slack: one message per event, kept current; people answer with buttons or links.

`api` has the platform's section of the configuration and calls Slack, `messages` renders and posts
cards, `socket_mode` receives clicks and commands, and `clicks` does what they ask for and knows who
may. `manifest` is that of the Slack app that the relay needs, with no scope that it does
not use: ``imds-relay schema slack-manifest`` prints it for whoever makes the app at Slack
(https://docs.slack.dev/reference/app-manifest). A running relay does not use it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from relay.chat import ChatSink
from relay.chat.context import ChatContext
from relay.chat.live_message import LiveMessageSink, background_task_until_exit
from relay.chat.platforms.slack.api import Settings, WebApi
from relay.chat.platforms.slack.clicks import Answers
from relay.chat.platforms.slack.messages import Channel
from relay.chat.platforms.slack.socket_mode import SocketMode
from relay.clock import Clock
from relay.errors import DeliveryError
from relay.logs import Finding, failure, ok
from relay.net.http import open_session

__all__ = ["Settings", "connect", "diagnose"]


@asynccontextmanager
async def connect(
    settings: Settings, clock: Clock, context: ChatContext
) -> AsyncIterator[ChatSink]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        api = WebApi(session, settings, clock)
        channel = Channel(api, settings)
        sink = LiveMessageSink(settings, context, channel, clock, in_chat=settings.approve_in_chat)
        await stack.enter_async_context(sink.refreshing())
        if settings.uses_socket_mode:
            answers = Answers(settings, context, api, clock)
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
            workspace = await api.workspace()
            if settings.uses_socket_mode:
                await api.call("users.info", {"user": workspace.bot_user_id})  # needs users:read
                await api.open_socket_url()
        except DeliveryError as error:
            return [failure(subject, error.reason, "see docs/chat/slack.md")]
        return [ok(subject, f"Slack accepts the tokens, for the workspace {workspace.team_id}")]


COMMAND = "/azmaint"
SCOPES = {
    "chat:write": "post messages and edit the app's own messages",
    "commands": f"receive {COMMAND}",
    "users:read": "check that a person who answers is a full member, and of which workspace",
}
"""The bot's scopes and their use. An app that takes no answers needs only the first scope."""


def manifest(answers: str) -> dict[str, Any]:
    """Return the manifest as JSON values.

    ``answers`` says how clicks and commands reach the relay: ``none``, or ``socket`` (Socket Mode).
    """
    takes_answers = answers == "socket"
    features: dict[str, Any] = {
        "bot_user": {"display_name": "azure-maintenance", "always_online": False}
    }
    settings: dict[str, Any] = {}
    if takes_answers:
        features["slash_commands"] = [
            {
                "command": COMMAND,
                "description": "Maintenance that Azure has announced",
                "usage_hint": "list | EVENT",
                "should_escape": False,
            }
        ]
        settings["interactivity"] = {"is_enabled": True}
    return {
        "display_information": {
            "name": "Azure maintenance",
            "description": "Shows maintenance that Azure has announced for virtual machines, "
            "and takes approvals.",
            "background_color": "#1f3a5f",
        },
        "features": features,
        "oauth_config": {"scopes": {"bot": list(SCOPES) if takes_answers else ["chat:write"]}},
        "settings": {
            **settings,
            "org_deploy_enabled": False,
            "socket_mode_enabled": takes_answers,
            "token_rotation_enabled": False,
        },
    }
