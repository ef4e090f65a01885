"""Apprise: short texts to the many services that this library supports. Nobody can answer.

Messages cannot be edited. They contain no links, because their readers are not known and a link is
half of an approval; they name the command that decides. `settings` is the platform's section of the
configuration, `text` renders cards, `fanout` sends texts to every service, `service` sends to one
of them, and `guarded_thread` runs the blocking library.
"""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from relay.chat.context import ChatContext
from relay.chat.live_message import LiveMessageSink
from relay.chat.platforms.apprise.fanout import ServiceFanout
from relay.chat.platforms.apprise.settings import Settings
from relay.clock import Clock

_log = logging.getLogger(__name__)


@asynccontextmanager
async def connect(
    settings: Settings, clock: Clock, context: ChatContext
) -> AsyncIterator[LiveMessageSink]:
    """Yield the sink. It connects for each message.

    Nobody waits at the end for threads that hang.
    """
    proxies = sorted({"http", "https", "all"} & urllib.request.getproxies().keys())
    if proxies:
        _log.warning(
            "sink %s: Apprise uses the proxies of the environment (%s), so the relay cannot check "
            "the addresses of services",
            settings.name,
            ", ".join(proxies),
        )
    # in_chat=True: cards get no links, and their buttons only say which decisions are possible.
    sink = LiveMessageSink(settings, context, ServiceFanout(settings), clock, in_chat=True)
    async with sink.refreshing():
        yield sink
