"""What the tests of the API may ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.running_relay import RunningRelay, make_event, run_relay


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    """A relay with the usual clients and rules, whose document holds `event()`."""
    async with run_relay(tmp_path) as running_relay:
        await running_relay.observe(make_event())
        yield running_relay
