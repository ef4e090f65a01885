"""The wall clock of the VM is stepped by an hour, either way."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from chaos.faults import Fault, Place, under_load
from chaos.trial import Trial, Wiring

STEP = 3600
"""Seconds."""
WRONG_FOR = 3.0
"""Seconds until the clock is set right."""
_FILE = "clock-offset"


@asynccontextmanager
async def _with_clock(place: Place) -> AsyncIterator[Wiring]:
    file = place.folder / _FILE
    _set(file, 0)
    yield Wiring(prefix=(sys.executable, "-m", "chaos.with_offset_clock", str(file)))


def _set(file: Path, seconds: int) -> None:
    """Replace the file at once: the relay reads it at any time."""
    new = file.with_suffix(".new")
    new.write_text(str(seconds), "ascii")
    new.replace(file)


async def _step(running: Trial) -> None:
    file = running.process.directory / _FILE
    await asyncio.to_thread(_set, file, running.chance.choice((STEP, -STEP)))
    await asyncio.sleep(WRONG_FOR)
    await asyncio.to_thread(_set, file, 0)
    await running.load.wait_until_busy(1)


FAULTS = (
    Fault(
        name="clock-stepped",
        text=f"the clock is stepped by an hour, forward or back, and set right after "
        f"{WRONG_FOR:g} s",
        quick=3,
        full=30,
        run=under_load(_step, _with_clock),
    ),
)
