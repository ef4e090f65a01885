"""Microsoft Teams: one card per event through a Workflows webhook, and short cards that follow.

A webhook ("Send webhook alerts to a channel", trigger "When a Teams webhook request is received")
returns no id of what it posted, so no message can be edited. A card's buttons can only open pages,
so people answer on the relay's page. `settings` is the platform's section of the configuration,
`card` renders cards, and `workflow` posts them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from relay.chat.context import ChatContext
from relay.chat.live_message import LiveMessageSink
from relay.chat.platforms.teams.settings import Settings
from relay.chat.platforms.teams.workflow import WorkflowWebhook
from relay.clock import Clock
from relay.doctor_findings import Finding
from relay.net.connectivity import check_connectivity
from relay.net.http import open_session


@asynccontextmanager
async def connect(
    settings: Settings, clock: Clock, context: ChatContext
) -> AsyncIterator[LiveMessageSink]:
    """Open the sink's HTTP session. It connects when the first event is delivered."""
    async with open_session() as session:
        webhook = WorkflowWebhook(settings, clock, session)
        sink = LiveMessageSink(settings, context, webhook, clock)
        async with sink.refreshing():
            yield sink


async def diagnose(settings: Settings, clock: Clock, scope: str) -> list[Finding]:  # noqa: ARG001  # the signature of all sinks
    """Return whether the workflow's host can be reached. Posts nothing."""
    subject, url = f"sink {settings.name}", settings.webhook_url()
    return [await check_connectivity(subject, url, tls=None, now=clock.now())]
