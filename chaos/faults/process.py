"""The process of the relay ends: at any time, at each sync, and as a service manager ends it."""

from __future__ import annotations

from chaos.faults import Fault, under_load
from chaos.trial import Trial
from tests.programs import killed_at_sync

LONGEST_PAUSE = 1.5
"""Seconds between the start of a relay and the next kill, at most. A start takes less than one."""
MOST_SYNCS = 120
"""The syncs of a start are fewer. Later ones are those of the load."""


async def _kill(running: Trial) -> None:
    await running.pause(LONGEST_PAUSE)
    await running.process.kill()
    await running.process.start(ready=False)


async def _stop(running: Trial) -> None:
    await running.pause(LONGEST_PAUSE)
    if await running.process.stop() != 0:
        raise AssertionError("expected the relay to end with 0 after SIGTERM")
    await running.process.start()


async def _kill_at_sync(running: Trial) -> None:
    await running.process.kill()
    running.process.prefix = killed_at_sync(running.chance.randrange(1, MOST_SYNCS))
    await running.process.start(ready=False)
    assert running.process.process is not None
    await running.process.process.wait()


FAULTS = (
    Fault(
        name="kill",
        text="the relay is killed at a random moment and started again",
        quick=20,
        full=500,
        run=under_load(_kill),
    ),
    Fault(
        name="kill-at-sync",
        text="the relay is killed as it syncs its state file, as a machine without power would be",
        quick=15,
        full=200,
        run=under_load(_kill_at_sync),
        needs="strace",
    ),
    Fault(
        name="stop",
        text="SIGTERM during delivery; the relay sends what it can, ends, and is started again",
        quick=10,
        full=100,
        run=under_load(_stop),
    ),
)
