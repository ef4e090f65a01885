"""Waits for an event with a timeout by a given clock."""

from __future__ import annotations

import asyncio

from relay.clock import Clock


async def wait_for_event(event: asyncio.Event, clock: Clock, timeout: float | None) -> None:  # noqa: ASYNC109  # by the clock given, not the loop's
    """Return when the event is set, or after ``timeout`` seconds (None: only when it is set)."""
    async with asyncio.TaskGroup() as group:
        waits: list[asyncio.Task[object]] = [group.create_task(event.wait())]
        if timeout is not None:
            waits.append(group.create_task(clock.sleep(timeout)))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
