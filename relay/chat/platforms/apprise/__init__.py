"""Apprise: a short text to any of the services that this library speaks to. To tell, never to approve.

Nothing of it is edited and nothing comes back. Its messages hold no links: who they reach is not known, and a link is half of
an approval. They name the command that answers.

`settings` is its section of the configuration; `text` makes texts of cards (pure), `services` sends them, `service` knows one
URL, `thread` runs what blocks.
"""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from relay.chat import CallbackRefused, CallbackReply
from relay.chat.context import ChatContext
from relay.chat.live_message import LiveMessageSink
from relay.chat.platforms.apprise.fanout import ServiceFanout
from relay.chat.platforms.apprise.settings import Settings
from relay.clock import Clock

_log = logging.getLogger(__name__)


class Apprise(LiveMessageSink):
    """Services that are told."""

    async def handle_callback(self, headers: Mapping[str, str], body: bytes) -> CallbackReply:  # noqa: ARG002  # whatever they are
        """Refuse: nobody answers there. Raises ChatRefused."""
        raise CallbackRefused("nobody answers through Apprise")


@asynccontextmanager
async def connect(settings: Settings, clock: Clock, context: ChatContext) -> AsyncIterator[Apprise]:
    """Nothing is connected until the first event. Threads that hang at the end are left behind; nobody waits for them."""
    if proxies := sorted({"http", "https", "all"} & urllib.request.getproxies().keys()):
        _log.warning(
            "sink %s: Apprise goes through the proxies of the environment (%s), past the guard of addresses",
            settings.name,
            ", ".join(proxies),
        )
    # Answered "in the chat": no links are made, and buttons only say what can be decided.
    apprise = Apprise(settings, context, ServiceFanout(settings), clock, in_chat=True)
    async with apprise.refreshing():
        yield apprise
