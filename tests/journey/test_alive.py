"""No relay is half alive: what ends one part ends all, and says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typing_extensions import override

from relay.app import run
from relay.clock import SystemClock
from relay.config import Config
from relay.simulator import VM, Setup, Simulator


class _ClockThatBreaks(SystemClock):
    """Works until a test breaks it. Then it raises an error, as a defect in the code would."""

    def __init__(self) -> None:
        self.broken = asyncio.Event()

    @override
    async def sleep(self, seconds: float) -> None:
        """Wait, or fail."""
        waiting, breaking = (
            asyncio.ensure_future(super().sleep(seconds)),
            asyncio.ensure_future(self.broken.wait()),
        )
        await asyncio.wait({waiting, breaking}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        breaking.cancel()
        if self.broken.is_set():
            raise LookupError("a mistake in the code")


async def test_a_part_that_fails_ends_the_relay_with_its_error(tmp_path: Path) -> None:
    """A relay without its poller would be trusted, and hear nothing."""
    async with Simulator(Setup(vms=(VM("vm-0"),))) as sim:
        config = Config.model_validate(
            {
                "source": {"url": sim.url},
                "store": {"path": str(tmp_path / "relay.db")},
                "api": {"listen": "127.0.0.1:0"},
            }
        )
        clock = _ClockThatBreaks()
        running = asyncio.create_task(run(config, clock=clock))
        await sim.until(
            lambda: any(call.path.endswith("scheduledevents") for call in sim.calls), within=60
        )
        clock.broken.set()
        async with asyncio.timeout(60):
            with pytest.raises(ExceptionGroup) as caught:
                await running
        assert caught.value.subgroup(LookupError) is not None
