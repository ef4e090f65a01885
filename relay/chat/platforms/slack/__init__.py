"""Slack: one message per event, kept current, that is answered by buttons, by links, or by a slash command.

`settings` is its section of the configuration; `blocks` makes messages of cards (pure), `channel` posts and edits them, `web`
calls Slack; `calls` proves and reads what Slack calls (pure), `people` finds out who it was, `answers` brings it to the board,
`socket_mode` listens without an open port; `sink` puts them together. All but the first need the package that
imds-relay[slack] installs, and are loaded when a channel is connected: a relay without one spares their memory.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from relay.chat import ChatSink
from relay.chat.context import ChatContext
from relay.chat.platforms.slack.settings import Settings
from relay.clock import Clock
from relay.diagnostics import Finding

__all__ = ["Settings", "connect", "diagnose"]


def connect(
    settings: Settings, clock: Clock, context: ChatContext
) -> AbstractAsyncContextManager[ChatSink]:
    """Open the sink's session, and begin to listen where that is asked for. Nothing is waited for."""
    from relay.chat.platforms.slack.sink import connect  # noqa: PLC0415  # see above

    return connect(settings, clock, context)


async def diagnose(settings: Settings, clock: Clock, scope: str) -> list[Finding]:  # noqa: ARG001  # the contract of the family
    """Whether Slack takes the tokens, and has given the rights that answers need. Nothing is posted."""
    from relay.chat.platforms.slack import sink  # noqa: PLC0415  # see above

    return await sink.diagnose(settings, clock)
