"""Events that are read from the journal together do not suffer from each other."""

from __future__ import annotations

from pathlib import Path

from relay.errors import StoreUnavailable
from relay.store.sqlite import Work
from tests.clocks import ManualClock
from tests.delivery.running_dispatcher import (
    ScriptedSink,
    hangs,
    running_dispatcher,
)
from tests.eventually import eventually


async def record_events(folder: Path, count: int = 10) -> None:
    async with running_dispatcher(folder, {"bus": ScriptedSink(hangs)}, run=False) as relay:
        for number in range(count):
            await relay.record_event(f"E-{number}")
        await relay.dispatcher.set_state("bus", "paused", None)


async def test_an_event_is_read_by_itself_if_others_cannot_be_read_with_it(tmp_path: Path) -> None:
    """No entry waits for a later try: time does not pass."""
    await record_events(tmp_path)
    sink = ScriptedSink(concurrency=1)
    async with running_dispatcher(tmp_path, {"bus": sink}, clock=ManualClock()) as relay:
        read, together = relay.store.read, 0

        async def reads_one(work: Work[object]) -> object:
            nonlocal together
            result = await read(work)
            if isinstance(result, dict) and len(result) > 1:
                together += 1
                raise StoreUnavailable("one of these pages cannot be read")
            return result

        relay.store.read = reads_one  # type: ignore[method-assign,assignment]  # a bad page
        await relay.dispatcher.set_state("bus", "on", None)
        await eventually(lambda: len(sink.delivered) == 10)
        assert together
