"""Teams: a card for each event through a Workflows webhook, follow-ups where others edit, links to the page where people answer.

Workflows ("Send webhook alerts to a channel", the trigger "When a Teams webhook request is received") take cards and give nothing
back: no name of the message, so nothing can be edited, and no click but ``Action.OpenUrl``.

`settings` is its section of the configuration; `card` makes cards (pure), `workflow` posts them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from relay.chat import CallbackRefused, CallbackReply
from relay.chat.context import ChatContext
from relay.chat.live_message import LiveMessageSink
from relay.chat.platforms.teams.settings import Settings
from relay.chat.platforms.teams.workflow import Workflow
from relay.clock import Clock
from relay.diagnostics import Finding
from relay.net.connectivity import check_connectivity
from relay.net.http import open_session


class Teams(LiveMessageSink):
    """A channel of Teams."""

    async def handle_callback(self, headers: Mapping[str, str], body: bytes) -> CallbackReply:  # noqa: ARG002  # whatever they are
        """Refuse: a workflow never calls. Raises ChatRefused."""
        raise CallbackRefused(
            "a workflow of Teams never calls: people answer on the page behind the links"
        )


@asynccontextmanager
async def connect(settings: Settings, clock: Clock, context: ChatContext) -> AsyncIterator[Teams]:
    """Open the sink's own session; nothing is connected until the first event."""
    async with open_session() as session:
        teams = Teams(settings, context, Workflow(settings, clock, session), clock)
        async with teams.refreshing():
            yield teams


async def diagnose(settings: Settings, clock: Clock, scope: str) -> list[Finding]:  # noqa: ARG001  # the contract of the family
    """Whether Microsoft's door is reached. Nothing is posted."""
    return [
        await check_connectivity(
            f"sink {settings.name}", settings.target(), tls=None, now=clock.now()
        )
    ]
