"""An error in one part of the relay ends the whole relay with this error."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typing_extensions import override

from relay.app import run
from relay.clock import SystemClock
from relay.config import Config, LoadedConfig
from tests.relay_in_process import document_of, simulated


class _BreakableClock(SystemClock):
    """A clock whose waits raise an error once `broken` is set, as a fault in the code does."""

    def __init__(self) -> None:
        self.broken = asyncio.Event()

    @override
    async def sleep(self, seconds: float) -> None:
        """Wait. Raises LookupError if the clock breaks."""
        waiting = asyncio.ensure_future(super().sleep(seconds))
        breaking = asyncio.ensure_future(self.broken.wait())
        await asyncio.wait({waiting, breaking}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        breaking.cancel()
        if self.broken.is_set():
            raise LookupError("a fault in the code")


async def test_a_part_that_fails_ends_the_relay_with_its_error(tmp_path: Path) -> None:
    """A relay without its poller would look healthy and see no events."""
    async with simulated() as sim:
        config = Config.model_validate(document_of(tmp_path, sim, api={"listen": "127.0.0.1:0"}))
        clock = _BreakableClock()
        loaded = LoadedConfig(config, None)
        running = asyncio.create_task(run(loaded, lambda: loaded, clock=clock))
        await sim.wait_until(
            lambda: any(call.path.endswith("scheduledevents") for call in sim.calls), within=60
        )
        clock.broken.set()
        async with asyncio.timeout(60):
            with pytest.raises(ExceptionGroup) as caught:
                await running
        assert caught.value.subgroup(LookupError) is not None
