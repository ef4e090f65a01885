"""Slack: one message per event, kept current, that is answered by buttons, by links, or by a slash command.

`settings` is its section of the configuration; `blocks` makes messages of cards (pure), `channel` posts and edits them, `web`
calls Slack; `calls` proves and reads what Slack calls (pure), `people` finds out who it was, `answers` brings it to the board,
`socket_mode` listens without an open port. All but the first need the package that imds-relay[slack] installs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec

from relay.chatops import ChatRefused, Reply
from relay.chatops._current import Current
from relay.chatops.slack.settings import Settings
from relay.clock import Clock
from relay.notices.board import Board
from relay.sinks._http import open_session

if find_spec("slack_sdk") is not None:
    from relay.chatops.slack.channel import Channel
    from relay.chatops.slack.people import People
    from relay.chatops.slack.web import WebApi


class Slack(Current):
    """One channel."""

    async def hear(self, headers: Mapping[str, str], body: bytes) -> Reply:  # noqa: ARG002  # it is not answered yet
        """Take a call of Slack. Raises ChatRefused."""
        raise ChatRefused("nobody calls this sink")


@asynccontextmanager
async def connect(settings: Settings, clock: Clock, board: Board) -> AsyncIterator[Slack]:
    """Open the sink's session. Nothing is waited for."""
    async with open_session() as session:
        api = WebApi(session, settings.base(), settings.bot_token, settings.timeout)
        people = People(api, clock)
        slack = Slack(settings, board, Channel(api, settings.channel, people.team), clock, in_chat=settings.approve_in_chat)
        async with slack.kept():
            yield slack
