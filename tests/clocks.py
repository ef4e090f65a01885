"""A clock that stands still until a test advances it, and one that is ahead of the machine's."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

from typing_extensions import override  # in typing from Python 3.12

from relay.clock import SystemClock

_IO_PAUSE = 0.003
"""Real seconds for calls over loopback and writes to disk between two steps."""
NOON = datetime(2026, 4, 11, 12, tzinfo=UTC)


class ManualClock:
    """A wall clock and a monotonic clock that advance together; only the wall clock can be set."""

    def __init__(self, now: datetime = NOON) -> None:
        self._wall = now
        self._monotonic = 0.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> datetime:
        return self._wall

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return self._monotonic

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has advanced so far."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._monotonic + seconds, future))
        await future

    async def wait(self, event: asyncio.Event, seconds: float | None) -> None:
        """Return when the event is set, or when the clock has advanced so far."""
        if seconds is None:
            await event.wait()
            return
        async with asyncio.TaskGroup() as group:
            waits: list[asyncio.Task[object]] = [
                group.create_task(self.sleep(max(0.0, seconds))),
                group.create_task(event.wait()),
            ]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    def advance(self, seconds: float) -> None:
        """Advance both clocks at once, and wake the sleepers whose time has come."""
        self._wall += timedelta(seconds=seconds)
        self._monotonic += seconds
        for until, future in self._sleepers:
            if until <= self._monotonic + 1e-9 and not future.done():
                future.set_result(None)
        self._sleepers = [(until, future) for until, future in self._sleepers if not future.done()]

    def set_wall_clock(self, now: datetime) -> None:
        """Set the wall clock, as an operator or NTP does; this wakes nobody."""
        self._wall = now

    @property
    def remaining_sleeps(self) -> list[float]:
        """The seconds that each sleeper has left, the fewest first."""
        return sorted(
            until - self._monotonic for until, future in self._sleepers if not future.done()
        )

    async def advance_until(
        self, condition: Callable[[], bool], *, step: float = 0.25, within: float = 300.0
    ) -> None:
        """Advance in steps until the condition holds, by ``within`` seconds at most.

        Raises TimeoutError if it does not hold after a minute of real time.
        """
        deadline = self._monotonic + within
        async with asyncio.timeout(60):
            while not condition():
                if self._monotonic < deadline:
                    self.advance(step)
                await asyncio.sleep(_IO_PAUSE)

    async def forward(self, seconds: float, settled: Callable[[], Awaitable[None]]) -> None:
        """Advance from alarm to alarm; after each, wait until nothing more happens by itself."""
        end = self._monotonic + seconds
        await settled()
        while due := [left for left in self.remaining_sleeps if self._monotonic + left <= end]:
            self.advance(max(0.0, due[0]))
            await settled()
        self.advance(end - self._monotonic)
        await settled()

    @asynccontextmanager
    async def ticking(self, step: float) -> AsyncIterator[None]:
        """Advance by ``step`` again and again while the context lasts.

        If the machine stands still, so does this clock: tests can compare intervals exactly.
        """

        async def advance_forever() -> None:
            while True:
                await asyncio.sleep(_IO_PAUSE)
                self.advance(step)

        task = asyncio.create_task(advance_forever())
        try:
            yield
        finally:
            task.cancel()


class ShiftedClock(SystemClock):
    """The machine's clocks, set ahead in seconds: both, the wall clock or the monotonic one."""

    def __init__(self) -> None:
        self.offset = self.wall_ahead = self.monotonic_ahead = 0.0
        self._stopped: float | None = None

    @override
    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.offset + self.wall_ahead)

    @override
    def monotonic(self) -> float:
        elapsed = super().monotonic() if self._stopped is None else self._stopped
        return elapsed + self.offset + self.monotonic_ahead

    def freeze_monotonic(self) -> None:
        """Let no interval pass unless a test changes `offset`.

        The clock stops at a whole second: with fractions, rounding can make `(now + 300.0) - now`
        less than 300.0.
        """
        self._stopped = float(math.ceil(super().monotonic()))
