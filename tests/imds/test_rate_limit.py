"""The budget of calls and the wait after a failed one: laws."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relay.imds.calls import (
    CALL_WINDOW,
    MAX_BACKOFF,
    MAX_CALLS,
    MAX_RETRY_AFTER,
    CallBudget,
    retry_delay,
)
from tests.clocks import ManualClock

INTERVALS = st.floats(0.5, 600)
JITTERS = st.floats(0, 1)
RESTS = st.none() | st.floats(0, 10_000)


async def sent_calls(steps: list[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """When calls asked for a place and were sent; each waits, connects, and may not be sent."""
    clock = ManualClock()
    budget = CallBudget(clock)
    sent: list[tuple[float, float]] = []

    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def call(connect: float | None) -> None:
        asked = clock.monotonic()
        async with budget.place() as mark_sent:
            if connect is None:
                return
            await clock.sleep(connect)
            sent.append((asked, clock.monotonic()))
            mark_sent(clock.monotonic())

    async with asyncio.TaskGroup() as calls:
        for pause, connect in steps:
            await clock.forward(pause, settle)
            calls.create_task(call(connect))
        await clock.forward(100 * CALL_WINDOW, settle)
    return sent


@example([(0.0, 0.0)] * 3)
@given(st.lists(st.tuples(st.floats(0, 3), st.none() | st.floats(0, 2)), max_size=30))
def test_no_window_holds_more_than_two_calls(steps: list[tuple[float, float | None]]) -> None:
    """Whatever waits, is sent late or never sent: any window has at most two sent calls."""
    moments = sorted(moment for _, moment in asyncio.run(sent_calls(steps)))
    assert len(moments) == len([connect for _, connect in steps if connect is not None])
    for earlier, later in zip(moments, moments[MAX_CALLS:], strict=False):
        assert later >= earlier + CALL_WINDOW - 1e-6


@given(st.lists(st.floats(0, 3), min_size=1, max_size=30))
def test_a_call_waits_for_the_second_before_it_and_for_nothing_else(pauses: list[float]) -> None:
    sent = asyncio.run(sent_calls([(pause, 0.0) for pause in pauses]))
    for number, (asked, moment) in enumerate(sent):
        second = sent[number - MAX_CALLS][1] if number >= MAX_CALLS else -CALL_WINDOW
        assert moment == pytest.approx(max(asked, second + CALL_WINDOW), abs=1e-6)


async def test_a_call_that_was_not_sent_keeps_its_place_however_long_it_takes() -> None:
    clock = ManualClock()
    budget = CallBudget(clock)
    async with budget.place(), budget.place() as mark_sent:
        third = asyncio.create_task(_take(budget))
        clock.advance(1_000_000)
        await asyncio.sleep(0)
        assert clock.remaining_sleeps == []
        mark_sent(clock.monotonic())
        await asyncio.sleep(0)
        assert clock.remaining_sleeps == [pytest.approx(CALL_WINDOW)]
        third.cancel()
        await asyncio.wait({third})
    assert await asyncio.wait_for(_take(budget), 60)  # by the one that was never sent


async def _take(budget: CallBudget) -> bool:
    async with budget.place():
        return True


@given(st.integers(0, 100_000), RESTS, INTERVALS, JITTERS)
def test_a_retry_waits_at_least_the_interval_and_never_long(
    failures: int, rest: float | None, interval: float, jitter: float
) -> None:
    delay = retry_delay(failures, rest, interval, jitter)
    longest = max(interval, MAX_BACKOFF)
    assert interval <= delay <= max(MAX_RETRY_AFTER, longest) + longest / 4


def test_the_wait_doubles_from_the_interval_to_five_seconds() -> None:
    """A notice can be as short as ten seconds, so the wait after a failure is short."""
    for failures, seconds in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (50, 5.0)):
        assert retry_delay(failures, None, 1.0, 0.0) == seconds
        assert retry_delay(failures, None, 30.0, 0.0) == 30.0
    assert retry_delay(1, 20.0, 1.0, 0.0) == 20.0
    assert retry_delay(1, None, 1.0, 1.0) == 1.25
