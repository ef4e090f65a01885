"""An error in one part of the relay ends the whole relay with this error."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from relay.app import run
from relay.config import Config, LoadedConfig
from relay.delivery.dispatcher import Dispatcher
from tests.relay_in_process import document_of, simulated


async def test_a_part_that_fails_ends_the_relay_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay without its dispatcher would look healthy and tell nobody."""
    broken = asyncio.Event()

    async def fail(_: Dispatcher) -> None:
        await broken.wait()
        raise LookupError("a fault in the code")

    monkeypatch.setattr(Dispatcher, "run", fail)
    async with simulated() as sim:
        config = Config.model_validate(document_of(tmp_path, sim, api={"listen": "127.0.0.1:0"}))
        loaded = LoadedConfig(config, None)
        running = asyncio.create_task(run(loaded, lambda: loaded))
        await sim.wait_until(
            lambda: any(call.path.endswith("scheduledevents") for call in sim.calls), within=60
        )
        broken.set()
        async with asyncio.timeout(60):
            with pytest.raises(ExceptionGroup) as caught:
                await running
        assert caught.value.subgroup(LookupError) is not None
