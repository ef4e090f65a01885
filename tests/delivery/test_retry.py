"""Properties of the retry plan: when a receiver that was down, or asked for a pause, is tried."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from relay.delivery.retry import (
    MAX_JITTER,
    MAX_RETRY_AFTER,
    URGENT_WINDOW,
    DeadLetter,
    RetryAfterDelay,
    RetryDecision,
    plan_retry,
    probe_delay,
)
from relay.errors import Failure
from tests.delivery.test_ordered_queue import entry

NOW = datetime(2026, 4, 11, 22, 0, tzinfo=UTC)
DAY = 86400.0
MOST = 1 + MAX_JITTER

TRIES = st.integers(1, 10_000)
CHANCES = st.floats(0, 1, exclude_max=True)
AHEAD = st.floats(0.001, 10 * DAY)
"""Seconds to a NotBefore that is ahead."""
LEFT = st.none() | AHEAD | st.floats(-DAY, 0)
AGES = st.floats(0, 2 * DAY)
ASKED = st.none() | st.floats(0, 1e9) | st.just(math.inf)


def decide(
    failure: Failure = "transient",
    *,
    seconds_left: float | None = None,
    age: float = 0.0,
    tries: int = 1,
    **options: Any,
) -> RetryDecision:
    """What the plan says with so many seconds to NotBefore, of an event that is so old."""
    return plan_retry(
        failure,
        tries=tries,
        now=NOW,
        recorded=NOW - timedelta(seconds=age),
        not_before=None if seconds_left is None else NOW + timedelta(seconds=seconds_left),
        **{"give_up_after": DAY, **options},
    )


def pause(*options: Any, **named: Any) -> float:
    """Seconds until the next try, of which there must be one."""
    decision = decide(*options, **named)
    assert isinstance(decision, RetryAfterDelay)
    return decision.delay


REFUSED = DeadLetter("refused, and no NotBefore ahead to keep trying for")
TOO_OLD = DeadLetter("given up after 86400 s")


@pytest.mark.parametrize(
    ("failure", "seconds_left", "age", "expected"),
    [
        ("slow", None, 0.0, REFUSED),
        ("slow", 0.0, 2 * DAY, REFUSED),
        ("transient", None, DAY, TOO_OLD),
        ("transient", -DAY, DAY, TOO_OLD),
    ],
)
def test_a_try_can_be_the_last(
    failure: Failure, seconds_left: float | None, age: float, expected: RetryDecision
) -> None:
    for tries in (1, 10_000):
        assert decide(failure, seconds_left=seconds_left, age=age, tries=tries) == expected


def test_what_a_disabled_sink_keeps_waits_for_nothing_else() -> None:
    for seconds_left, age in ((None, 0.0), (-1.0, 2 * DAY)):
        assert decide("disabled", seconds_left=seconds_left, age=age) == RetryAfterDelay(0.0)


@pytest.mark.parametrize("seconds_left", [0.001, 10 * DAY])
def test_nothing_is_given_up_before_notbefore_with_a_limit_of_a_day(seconds_left: float) -> None:
    """Notice of degraded hardware comes days ahead. Who sets less wants to hear of the failure."""
    assert isinstance(decide(seconds_left=seconds_left, age=2 * DAY), RetryAfterDelay)
    decision = decide(seconds_left=seconds_left, age=60.0, give_up_after=60.0)
    assert decision == DeadLetter("given up after 60 s")


def test_ten_minutes_of_notice_begin_with_quick_tries() -> None:
    """See docs/guarantees.md."""
    pauses = [pause(seconds_left=600.0, tries=tries) for tries in range(1, 6)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 7.0]


@given(seconds_left=AHEAD, age=AGES, tries=TRIES, jitter=CHANCES)
def test_what_was_refused_is_tried_slowly_while_notbefore_is_ahead(
    seconds_left: float, age: float, tries: int, jitter: float
) -> None:
    """A person must correct something (docs/protocol.md#which-statuses-pass-by-themselves)."""
    seconds = pause("slow", seconds_left=seconds_left, age=age, tries=tries, jitter=jitter)
    assert seconds <= 60
    assert seconds >= 50 or seconds >= seconds_left - 2


@given(seconds_left=LEFT, tries=TRIES, retry_after=ASKED, jitter=CHANCES)
def test_jitter_only_adds_and_little(
    seconds_left: float | None, tries: int, retry_after: float | None, jitter: float
) -> None:
    """But for the last call, which it makes later by less than a second."""
    plain, shaken = (
        pause(seconds_left=seconds_left, tries=tries, retry_after=retry_after, jitter=jitter_)
        for jitter_ in (0.0, jitter)
    )
    assert plain <= shaken
    assert shaken <= plain * MOST or (seconds_left is not None and shaken <= seconds_left - 1)


@given(
    seconds_left=LEFT,
    tries=TRIES,
    retry_after=st.floats(0.001, 1e9) | st.just(math.inf),
    jitter=CHANCES,
)
def test_retry_after_only_lengthens_is_cut_and_rests_the_whole_sink(
    seconds_left: float | None, tries: int, retry_after: float, jitter: float
) -> None:
    """Also where the entry itself would have waited longer: its neighbours would not."""
    decision = decide(
        seconds_left=seconds_left, tries=tries, retry_after=retry_after, jitter=jitter
    )
    assert isinstance(decision, RetryAfterDelay)
    wanted = min(retry_after, MAX_RETRY_AFTER)
    assert wanted <= decision.sink_pause <= wanted * MOST
    own = pause(seconds_left=seconds_left, tries=tries, jitter=jitter)
    assert decision.delay == max(decision.sink_pause, own)


@given(
    seconds_left=st.floats(URGENT_WINDOW, URGENT_WINDOW + 120) | st.floats(URGENT_WINDOW, 10 * DAY),
    tries=TRIES,
    jitter=CHANCES,
)
def test_before_that_a_try_comes_at_least_every_60_s_and_one_at_the_right_time(
    seconds_left: float, tries: int, jitter: float
) -> None:
    """The window is entered within 8 s: no pause of a minute reaches far into it."""
    seconds = pause(seconds_left=seconds_left, tries=tries, jitter=jitter)
    assert seconds <= 60
    assert seconds_left - seconds >= URGENT_WINDOW - 8


@given(seconds_left=st.none() | st.floats(-DAY, 0), tries=TRIES, jitter=CHANCES)
def test_with_no_notbefore_ahead_the_pauses_double_up_to_five_minutes(
    seconds_left: float | None, tries: int, jitter: float
) -> None:
    expected = min(0.5 * 2.0 ** min(tries - 1, 20), 300.0)
    seconds = pause(seconds_left=seconds_left, tries=tries, jitter=jitter)
    assert expected <= seconds <= expected * MOST


@given(
    failure=st.sampled_from(["transient", "slow"]),
    seconds_left=LEFT,
    tries=TRIES,
    longest=st.floats(0.1, 1000),
    jitter=CHANCES,
)
def test_no_pause_is_longer_than_the_sinks_longest(
    failure: Failure, seconds_left: float | None, tries: int, longest: float, jitter: float
) -> None:
    decision = decide(
        failure, seconds_left=seconds_left, tries=tries, longest_pause=longest, jitter=jitter
    )
    assume(isinstance(decision, RetryAfterDelay))
    assert isinstance(decision, RetryAfterDelay)
    assert decision.delay <= longest * MOST


@pytest.mark.parametrize(
    ("failed", "next_one", "seconds"),
    [(None, None, 128.0), (None, 100, 7.0), (-1, 100, 7.0), (100, 100, 0.5)],
)
def test_the_most_urgent_entry_determines_the_next_probe(
    failed: float | None, next_one: float | None, seconds: float
) -> None:
    """In seconds before NotBefore. What is urgent itself and new is tried as often as it was."""

    def moment(seconds_left: float | None) -> datetime | None:
        return None if seconds_left is None else NOW + timedelta(seconds=seconds_left)

    delay = probe_delay(
        entry(1, not_before=moment(failed)),
        next_not_before=moment(next_one),
        failures=9,
        now=NOW,
        longest_pause=300.0,
        jitter=0.0,
    )
    assert delay == seconds


@dataclass(frozen=True, slots=True)
class Call:
    """When a try began, in seconds before NotBefore, and how long after the one before it ended."""

    seconds_left: float
    waited: float


def calls(
    seconds_left: float, *, elapsed: float, jitters: st.DataObject, failure: Failure = "transient"
) -> list[Call]:
    """Return the times of the tries up to the first after NotBefore. Each try fails."""
    made, tries = [Call(seconds_left, 0.0)], 1
    while made[-1].seconds_left > 0 and made[-1].seconds_left - elapsed > 0:
        seconds_left = made[-1].seconds_left - elapsed
        jitter = jitters.draw(CHANCES)
        seconds = pause(failure, seconds_left=seconds_left, tries=tries, jitter=jitter)
        made.append(Call(seconds_left - seconds, seconds))
        tries += 1
    return made


@given(seconds_left=st.floats(0.5, 3000), elapsed=st.floats(0, 1), data=st.data())
def test_a_receiver_that_is_down_is_called_all_the_way_to_a_last_call(
    seconds_left: float, elapsed: float, data: st.DataObject
) -> None:
    """The first retry comes within 2 s. Gaps are at most 8 s in the window and 60 s before it.

    The last try begins in the last 2 s plus the time of a try.
    """
    made = calls(seconds_left, elapsed=elapsed, jitters=data)
    made = [call for call in made if call.seconds_left > 0]
    for before, call in pairwise(made):
        assert call.waited <= (8 if before.seconds_left <= URGENT_WINDOW else 60)
    if len(made) > 1:
        assert made[1].waited <= 2
    assert made[-1].seconds_left <= 2.0 + elapsed + 1e-6
