"""A clock that stands still until a test turns it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

NOON = datetime(2026, 4, 11, 12, tzinfo=UTC)


class HandClock:
    """Wall clock and monotonic clock go together, unless the wall clock is ``set``."""

    def __init__(self, now: datetime = NOON) -> None:
        self._wall = now
        self._monotonic = 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> datetime:
        """The wall clock."""
        return self._wall

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return self._monotonic

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has been turned so far."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._monotonic + seconds, future))
        await future

    def turn(self, seconds: float) -> None:
        """Let that much time pass at once; who has slept long enough wakes."""
        self._wall += timedelta(seconds=seconds)
        self._monotonic += seconds
        for until, future in self._sleepers:
            if until <= self._monotonic + 1e-9 and not future.done():
                future.set_result(None)
        self._sleepers = [(until, future) for until, future in self._sleepers if not future.done()]

    def set(self, now: datetime) -> None:
        """Set the wall clock, as an operator or NTP would; nobody wakes."""
        self._wall = now

    @property
    def asleep(self) -> list[float]:
        """How many seconds each sleeper has still to wait, the least first."""
        return sorted(
            until - self._monotonic for until, future in self._sleepers if not future.done()
        )

    async def turn_until(
        self, condition: Callable[[], bool], *, step: float = 0.25, within: float = 300.0
    ) -> None:
        """Turn in steps, ``within`` so much time, until it holds. Fails when it does not although everybody had time to work."""
        until = self._monotonic + within
        async with asyncio.timeout(60):
            while not condition():
                if self._monotonic < until:
                    self.turn(step)
                await asyncio.sleep(
                    0.003
                )  # what goes over loopback, or to the disk, takes its time

    @asynccontextmanager
    async def going(self, step: float) -> AsyncIterator[None]:
        """Turn it by ``step`` again and again while the block lasts, each time with a moment for what goes over loopback.

        A machine that stands still for a while stops this clock too, so that intervals can be compared exactly.
        """

        async def go() -> None:
            while True:
                await asyncio.sleep(0.003)
                self.turn(step)

        going = asyncio.create_task(go())
        try:
            yield
        finally:
            going.cancel()


async def eventually(condition: Callable[[], bool], *, within: float = 60.0) -> None:
    """Wait, in real time, until it holds. Fails when it takes so long."""
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.002)
