"""What the tests of the page may ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.api.running_relay import RunningRelay, make_event
from tests.page.scenes import run_page_relay


@pytest_asyncio.fixture(loop_scope="session")
async def quiet(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    """A relay with a broker, a webhook and a chat, whose document is empty."""
    async with run_page_relay(tmp_path) as running_relay:
        yield running_relay


@pytest_asyncio.fixture(loop_scope="session")
async def relay(quiet: RunningRelay) -> RunningRelay:
    """The same, and its document holds `make_event()`."""
    await quiet.observe(make_event())
    return quiet
