"""What the tests of the page may ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.api.running_relay import RunningRelay, make_event
from tests.page.scenes import run_page_relay


@pytest_asyncio.fixture(loop_scope="session")
async def relay(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    """A relay with a broker, a webhook and a chat, whose document holds `make_event()`."""
    async with run_page_relay(tmp_path) as running_relay:
        await running_relay.observe(make_event())
        yield running_relay
