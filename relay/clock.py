"""Time as an argument, so that a test can replace it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import UTC, datetime
from typing import Protocol

from typing_extensions import override


class Clock(Protocol):
    """The source of time."""

    def now(self) -> datetime:
        """Return the wall-clock time in UTC, with its time zone: for timestamps that others see."""

    def monotonic(self) -> float:
        """Return seconds that never go back, to measure intervals."""

    async def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds."""


class SystemClock(Clock):
    @override
    def now(self) -> datetime:
        return datetime.now(UTC)

    @override
    def monotonic(self) -> float:
        return time.monotonic()

    @override
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def wait_for_event(event: asyncio.Event, clock: Clock, seconds: float | None) -> None:
    """Return when the event is set, or after a number of seconds; None sets no limit."""
    if seconds is None:
        await event.wait()
        return
    if isinstance(clock, SystemClock):  # needs no tasks, which cost several times as much
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await event.wait()
        return
    async with asyncio.TaskGroup() as group:
        waits: list[asyncio.Task[object]] = [
            group.create_task(clock.sleep(max(0.0, seconds))),
            group.create_task(event.wait()),
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
