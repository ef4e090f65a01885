"""The budget of calls and the wait after a failed one: laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.imds.calls import (
    CALL_WINDOW,
    MAX_BACKOFF,
    MAX_CALLS,
    MAX_RETRY_AFTER,
    CallRateLimiter,
    retry_delay,
)

INTERVALS = st.floats(0.5, 600)
JITTERS = st.floats(0, 1)
RESTS = st.none() | st.floats(0, 10_000)


@given(
    st.lists(
        st.tuples(st.floats(0, 0.5), st.sampled_from(["take", "send", "give back"])), max_size=200
    )
)
def test_no_window_holds_more_than_two_calls_however_they_come(
    steps: list[tuple[float, str]],
) -> None:
    """Whatever is taken, sent late or never sent: any window has at most two sent calls."""
    budget, now, unsent = CallRateLimiter(), 0.0, 0
    sent: list[float] = []
    for pause, step in steps:
        now += pause
        if step == "take" and budget.delay(now) == 0:
            budget.reserve()
            unsent += 1
        elif step == "send" and unsent:
            budget.mark_sent(now)
            unsent -= 1
            sent.append(now)
        elif step == "give back" and unsent:
            budget.release_unsent_call()
            unsent -= 1
    assert all(
        later >= earlier + CALL_WINDOW
        for earlier, later in zip(sent, sent[MAX_CALLS:], strict=False)
    )


@given(st.lists(st.floats(0, 3), min_size=1, max_size=50))
def test_who_waits_as_long_as_told_gets_a_place_and_nobody_waits_for_nothing(
    pauses: list[float],
) -> None:
    budget, now = CallRateLimiter(), 0.0
    sent: list[float] = []
    for pause in pauses:
        now += pause
        delay = budget.delay(now)
        assert delay is not None
        assert (delay == 0) == (
            len([moment for moment in sent if now < moment + CALL_WINDOW]) < MAX_CALLS
        )
        assert delay == pytest.approx(
            max(0.0, sent[-MAX_CALLS] + CALL_WINDOW - now) if len(sent) >= MAX_CALLS else 0.0,
            abs=1e-9,
        )
        while delay:  # rounding may ask for one more tiny wait
            now += max(delay, 1e-9)
            delay = budget.delay(now)
        budget.reserve()
        budget.mark_sent(now)
        sent.append(now)


def test_a_call_that_was_not_sent_holds_its_place_however_long_it_takes() -> None:
    budget = CallRateLimiter()
    for _ in range(MAX_CALLS):
        assert budget.delay(0.0) == 0
        budget.reserve()
    assert budget.delay(1_000_000.0) is None
    budget.mark_sent(1_000_000.0)
    assert budget.delay(1_000_000.5) == pytest.approx(CALL_WINDOW - 0.5)
    budget.release_unsent_call()
    assert budget.delay(1_000_000.5) == 0


@given(st.integers(0, 100_000), RESTS, INTERVALS, JITTERS)
def test_a_retry_waits_at_least_the_interval_and_never_long(
    failures: int, rest: float | None, interval: float, jitter: float
) -> None:
    delay = retry_delay(failures, rest, interval, jitter)
    assert (
        interval
        <= delay
        <= max(MAX_RETRY_AFTER, interval, MAX_BACKOFF) + max(interval, MAX_BACKOFF) / 4
    )


@given(st.integers(1, 100), st.floats(0, 10_000), INTERVALS, JITTERS)
def test_retry_after_only_lengthens_and_is_capped(
    failures: int, rest: float, interval: float, jitter: float
) -> None:
    without, with_it = (
        retry_delay(failures, None, interval, jitter),
        retry_delay(failures, rest, interval, jitter),
    )
    assert with_it >= without
    assert with_it >= min(rest, MAX_RETRY_AFTER)
    assert with_it <= max(without, MAX_RETRY_AFTER + without / 4)


def test_the_wait_doubles_from_the_interval_to_five_seconds() -> None:
    """A notice can be as short as ten seconds, so the wait after a failure is short."""
    assert [retry_delay(failures, None, 1.0, 0.0) for failures in (1, 2, 3, 4, 50)] == [
        1.0,
        2.0,
        4.0,
        5.0,
        5.0,
    ]
    assert [retry_delay(failures, None, 30.0, 0.0) for failures in (1, 2, 50)] == [30.0, 30.0, 30.0]
    assert retry_delay(1, 20.0, 1.0, 0.0) == 20.0
    assert retry_delay(1, None, 1.0, 1.0) == 1.25
