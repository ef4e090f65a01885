"""Waiting for an event or for time to pass."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from relay.clock import SystemClock


@pytest.mark.parametrize("seconds", [None, 3600.0])
async def test_the_wait_ends_when_the_event_is_set(seconds: float | None) -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, event.set)
    async with asyncio.timeout(10):
        await SystemClock().wait(event, seconds)
    assert event.is_set()


@pytest.mark.parametrize("seconds", [0.01, 0.0, -5.0])
async def test_the_wait_ends_after_the_seconds(seconds: float) -> None:
    event = asyncio.Event()
    async with asyncio.timeout(10):
        await SystemClock().wait(event, seconds)
    assert not event.is_set()


async def test_a_cancelled_wait_leaves_no_task_behind() -> None:
    waiting = asyncio.create_task(SystemClock().wait(asyncio.Event(), 3600.0))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert waiting.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}
