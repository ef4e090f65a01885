"""Slack: one message per event, kept current; people answer with buttons, links or a slash command.

`settings` is the platform's section of the configuration. `sink` connects the other modules. They
need the package that the extra `slack` installs, so they are imported only when a channel
is connected: a relay without Slack saves their memory.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from relay.chat import ChatSink
from relay.chat.context import ChatContext
from relay.chat.platforms.slack.settings import Settings
from relay.clock import Clock
from relay.doctor_findings import Finding

__all__ = ["Settings", "connect", "diagnose"]


def connect(
    settings: Settings, clock: Clock, context: ChatContext
) -> AbstractAsyncContextManager[ChatSink]:
    """Open the sink's HTTP session and, if configured, Socket Mode. Does not wait for Slack."""
    from relay.chat.platforms.slack import sink  # noqa: PLC0415  # see the module's docstring

    return sink.connect(settings, clock, context)


async def diagnose(settings: Settings, clock: Clock, scope: str) -> list[Finding]:  # noqa: ARG001  # the signature of all sinks
    """Return whether Slack accepts the tokens and grants the scopes. Posts nothing."""
    from relay.chat.platforms.slack import sink  # noqa: PLC0415  # see the module's docstring

    return await sink.diagnose(settings, clock)
