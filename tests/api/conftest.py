"""What the tests of the API may ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.running_relay import Running, event, running


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Running]:
    """A relay with the usual clients and rules, whose document holds `event()`."""
    async with running(tmp_path) as one:
        await one.see(event())
        yield one
