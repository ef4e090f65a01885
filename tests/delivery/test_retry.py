"""The retry plan, as laws: what a receiver that was down may count on, and what one that asked for rest gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from relay.delivery.retry import (
    MAX_JITTER,
    MAX_RETRY_AFTER,
    URGENT_WINDOW,
    DeadLetter,
    DisableSink,
    RetryAfter,
    RetryDecision,
    plan_retry,
    retry_time,
)
from relay.errors import Failure

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


def after(
    failure: Failure = "transient",
    *,
    left: float | None = None,
    age: float = 0.0,
    tries: int = 1,
    **given_: Any,
) -> RetryDecision:
    """What the plan says with so many seconds to NotBefore, of an event that is so old."""
    return plan_retry(
        failure,
        tries=tries,
        now=NOW,
        recorded=NOW - timedelta(seconds=age),
        not_before=None if left is None else NOW + timedelta(seconds=left),
        **{"give_up_after": DAY, **given_},
    )


def pause(*given_: Any, **named: Any) -> float:
    """Seconds until the next try, of which there must be one."""
    verdict = after(*given_, **named)
    assert isinstance(verdict, RetryAfter)
    return verdict.delay


@given(left=LEFT, age=AGES, tries=TRIES, asked=ASKED, chance=CHANCES)
def test_a_far_side_that_asks_us_to_stop_is_disabled_whatever_else_holds(
    left: float | None, age: float, tries: int, asked: float | None, chance: float
) -> None:
    assert (
        after("disabled", left=left, age=age, tries=tries, asked=asked, chance=chance)
        == DisableSink()
    )


@given(left=st.none() | st.floats(-DAY, 0), age=AGES, tries=TRIES, asked=ASKED)
def test_what_was_refused_is_parked_at_once_with_no_notbefore_ahead(
    left: float | None, age: float, tries: int, asked: float | None
) -> None:
    assert isinstance(after("slow", left=left, age=age, tries=tries, asked=asked), DeadLetter)


@given(left=AHEAD, age=AGES, tries=TRIES, chance=CHANCES)
def test_what_was_refused_is_tried_slowly_while_notbefore_is_ahead(
    left: float, age: float, tries: int, chance: float
) -> None:
    """A person must correct something, and often does within minutes.

    See docs/protocol.md#which-statuses-pass-by-themselves.
    """
    seconds = pause("slow", left=left, age=age, tries=tries, chance=chance)
    assert seconds <= 60
    assert seconds >= 50 or seconds >= left - 2


@given(left=st.none() | st.floats(-DAY, 0), age=st.floats(DAY, 10 * DAY), tries=TRIES, asked=ASKED)
def test_what_is_too_old_is_parked(
    left: float | None, age: float, tries: int, asked: float | None
) -> None:
    verdict = after(left=left, age=age, tries=tries, asked=asked)
    assert verdict == DeadLetter("given up after 86400 s")


@given(left=AHEAD, age=AGES, tries=TRIES)
def test_nothing_is_given_up_for_its_age_before_its_notbefore(
    left: float, age: float, tries: int
) -> None:
    """Notice of degraded hardware comes days ahead."""
    assert isinstance(after(left=left, age=age, tries=tries), RetryAfter)


@given(left=AHEAD, age=st.floats(60, DAY), tries=TRIES)
def test_a_limit_under_a_day_holds_before_notbefore_too(
    left: float, age: float, tries: int
) -> None:
    """Who sets it wants to hear of the failure."""
    assert after(left=left, age=age, tries=tries, give_up_after=60.0) == DeadLetter(
        "given up after 60 s"
    )


@given(left=st.none() | st.floats(-DAY, 0), age=st.floats(0, DAY - 1), tries=TRIES)
def test_what_is_young_is_tried_again(left: float | None, age: float, tries: int) -> None:
    assert isinstance(after(left=left, age=age, tries=tries), RetryAfter)
    assert isinstance(
        after(left=left, age=age * 1000, tries=tries, give_up_after=math.inf), RetryAfter
    )


@given(left=LEFT, tries=TRIES, asked=ASKED, chance=CHANCES)
def test_jitter_only_adds_and_little(
    left: float | None, tries: int, asked: float | None, chance: float
) -> None:
    """But for the last call, which it makes later by less than a second."""
    plain, shaken = (
        pause(left=left, tries=tries, asked=asked, chance=one) for one in (0.0, chance)
    )
    assert plain <= shaken
    assert shaken <= plain * MOST or (left is not None and shaken <= left - 1)


@given(left=LEFT, tries=TRIES, asked=st.floats(0.001, 1e9) | st.just(math.inf), chance=CHANCES)
def test_retry_after_only_lengthens_is_cut_and_rests_the_whole_sink(
    left: float | None, tries: int, asked: float, chance: float
) -> None:
    """Also where the entry itself would have waited longer: its neighbours would not."""
    verdict = after(left=left, tries=tries, asked=asked, chance=chance)
    assert isinstance(verdict, RetryAfter)
    wanted = min(asked, MAX_RETRY_AFTER)
    assert wanted <= verdict.sink_pause <= wanted * MOST
    assert verdict.delay == max(verdict.sink_pause, pause(left=left, tries=tries, chance=chance))


@given(left=LEFT, tries=TRIES, asked=st.none() | st.floats(-1e9, 0), chance=CHANCES)
def test_without_a_retry_after_nobody_else_rests(
    left: float | None, tries: int, asked: float | None, chance: float
) -> None:
    assert after(left=left, tries=tries, asked=asked, chance=chance) == RetryAfter(
        pause(left=left, tries=tries, chance=chance), sink_pause=0.0
    )


@given(left=LEFT, chance=CHANCES)
def test_the_first_try_again_comes_within_two_seconds(left: float | None, chance: float) -> None:
    assert 0 < pause(left=left, chance=chance) <= 2


@given(left=st.floats(0.001, URGENT_WINDOW), tries=TRIES, chance=CHANCES)
def test_in_the_last_quarter_of_an_hour_a_try_comes_at_least_every_8_s(
    left: float, tries: int, chance: float
) -> None:
    assert 0 < pause(left=left, tries=tries, chance=chance) <= 8


@given(
    left=st.floats(URGENT_WINDOW, URGENT_WINDOW + 120) | st.floats(URGENT_WINDOW, 10 * DAY), tries=TRIES, chance=CHANCES
)
def test_before_that_a_try_comes_at_least_every_60_s_and_one_at_the_right_time(
    left: float, tries: int, chance: float
) -> None:
    """The window is entered within 8 s: no pause of a minute reaches far into it."""
    seconds = pause(left=left, tries=tries, chance=chance)
    assert seconds <= 60
    assert left - seconds >= URGENT_WINDOW - 8


@given(left=st.none() | st.floats(-DAY, 0), tries=TRIES, chance=CHANCES)
def test_with_no_notbefore_ahead_the_pauses_double_up_to_five_minutes(
    left: float | None, tries: int, chance: float
) -> None:
    expected = min(0.5 * 2.0 ** min(tries - 1, 20), 300.0)
    assert expected <= pause(left=left, tries=tries, chance=chance) <= expected * MOST


@given(
    failure=st.sampled_from(["transient", "slow"]),
    left=LEFT,
    tries=TRIES,
    longest=st.floats(0.1, 1000),
    chance=CHANCES,
)
def test_no_pause_is_longer_than_the_sinks_longest(
    failure: Failure, left: float | None, tries: int, longest: float, chance: float
) -> None:
    verdict = after(failure, left=left, tries=tries, longest_pause=longest, chance=chance)
    assume(isinstance(verdict, RetryAfter))
    assert isinstance(verdict, RetryAfter)
    assert verdict.delay <= longest * MOST


@dataclass(frozen=True, slots=True)
class Call:
    """When a try began, in seconds before NotBefore, and how long after the one before it ended."""

    left: float
    waited: float


def calls(
    left: float, *, took: float, chances: st.DataObject, failure: Failure = "transient"
) -> list[Call]:
    """Every try up to the first after NotBefore, by a receiver that is down and fails each after so many seconds."""
    made, tries = [Call(left, 0.0)], 1
    while made[-1].left > 0 and made[-1].left - took > 0:
        left = made[-1].left - took
        seconds = pause(failure, left=left, tries=tries, chance=chances.draw(CHANCES))
        made.append(Call(left - seconds, seconds))
        tries += 1
    return made


@given(left=st.floats(0.5, 3000), took=st.floats(0, 1), data=st.data())
def test_a_receiver_that_is_down_is_called_all_the_way_to_a_last_call(
    left: float, took: float, data: st.DataObject
) -> None:
    """The whole run: within two seconds, never a gap over 8 s in the window or 60 s before it, and a call in the last 2 s + a try."""
    made = [call for call in calls(left, took=took, chances=data) if call.left > 0]
    for before, call in pairwise(made):
        assert call.waited <= (8 if before.left <= URGENT_WINDOW else 60)
    if len(made) > 1:
        assert made[1].waited <= 2
    assert made[-1].left <= 2.0 + took + 1e-6


@given(left=st.floats(10, 600), data=st.data())
def test_what_was_refused_gets_a_last_call_too(left: float, data: st.DataObject) -> None:
    made = [call for call in calls(left, took=0.05, chances=data, failure="slow") if call.left > 0]
    assert made[-1].left <= 2.0 + 0.05 + 1e-6


@pytest.mark.parametrize("seconds", [0.0, 0.5, 3600.0])
def test_the_moment_is_the_pause_from_now(seconds: float) -> None:
    assert retry_time(RetryAfter(seconds), NOW) == NOW + timedelta(seconds=seconds)


def undelivered_pauses(failure: Failure, seconds_left: float | None) -> tuple[list[float], object]:
    """Fail every try of a new event at once; return the pauses, and the decision that ended it."""
    now = NOW
    pauses: list[float] = []
    not_before = None if seconds_left is None else NOW + timedelta(seconds=seconds_left)
    while True:
        decision = plan_retry(
            failure,
            tries=len(pauses) + 1,
            now=now,
            recorded=NOW,
            not_before=not_before,
            give_up_after=DAY,
        )
        if not isinstance(decision, RetryAfter):
            return pauses, decision
        pauses.append(decision.delay)
        now = retry_time(decision, now)


def test_ten_minutes_of_notice_are_used_as_the_guarantee_says() -> None:
    """See docs/guarantees.md: quick tries first, then one every few seconds up to NotBefore."""
    pauses, end = undelivered_pauses("transient", 600.0)
    assert pauses[:5] == [0.5, 1.0, 2.0, 4.0, 7.0]
    moments = list(accumulate(pauses))
    last_before_start = max(moment for moment in moments if moment < 600)
    assert last_before_start == pytest.approx(600 - 2.0)
    assert end == DeadLetter("given up after 86400 s")


def test_a_slow_or_disabled_failure_without_a_deadline_is_not_tried_again() -> None:
    dead_letter = DeadLetter("refused, and no NotBefore ahead to keep trying for")
    assert undelivered_pauses("slow", None) == ([], dead_letter)
    assert undelivered_pauses("disabled", None) == ([], DisableSink())
