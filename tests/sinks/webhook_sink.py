"""A webhook sink for tests: settings with secrets, and failures that are searched for them."""

from __future__ import annotations

import asyncio
import ssl
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver

from relay.errors import Deferred
from relay.net.http import open_session
from relay.sinks import Receipt
from relay.sinks.webhook import Settings, Webhook
from tests.builders import cloudevent
from tests.clocks import ManualClock
from tests.sinks.http_receiver import Received, good, listening

SECRET = "whsec_" + "c2VjcmV0" * 4
OTHER_SECRET = "whsec_" + "b3RoZXIh" * 4
TELLTALES = ("t0ken", SECRET[6:], OTHER_SECRET[6:])
"""What may be in no text that a failure shows; URLs of tests have a t0ken in them."""

NOW = datetime(2026, 4, 11, 22, 26, 58, 900_000, UTC)


def settings(**fields: Any) -> Settings:
    """The sink's section, as YAML would give it."""
    usual = {"kind": "webhook", "name": "drain", "secrets": [SECRET], "allow_http": True}
    return Settings.model_validate({**usual, "timeout": "30s", **fields})


@asynccontextmanager
async def sink(
    resolver: AbstractResolver | None = None, tls: ssl.SSLContext | None = None, **fields: Any
) -> AsyncIterator[Webhook]:
    """The sink with its session, and a resolver or trusted certificates of the test's own."""
    async with open_session(resolver=resolver, tls=tls) as session:
        yield Webhook(settings(**fields), ManualClock(NOW), session)


async def received_request(**fields: Any) -> Received:
    """The request of one delivery, as the receiver got it."""
    async with listening(good) as receiver, sink(url=receiver.url, **fields) as webhook:
        await webhook.deliver(cloudevent())
    return receiver.requests[0]


async def deliver(url: str, **fields: Any) -> Receipt:
    async with sink(url=url, **fields) as webhook:
        return await webhook.deliver(cloudevent())


async def failure(url: str, **fields: Any) -> Deferred:
    """The Deferred of one delivery, after a look that no text of it shows a secret or the URL."""
    with pytest.raises(Deferred) as caught:
        await deliver(url, **fields)
    shown = "".join(traceback.format_exception(caught.value)) + str(caught.value.answer)
    assert not [telltale for telltale in TELLTALES if telltale in shown]
    assert caught.value.reason.startswith(("expected ", "the url, secrets or credentials"))
    return caught.value


@asynccontextmanager
async def within(seconds: float, *, at_least: float = 0.0) -> AsyncIterator[None]:
    """What is done here takes no longer than that, and not less than the other."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    yield
    assert at_least <= loop.time() - started < seconds
