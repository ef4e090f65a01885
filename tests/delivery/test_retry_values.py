"""Exact values of the retry plan, at the moments where it changes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from relay.delivery.retry import (
    MAX_INTERNAL_ERRORS,
    DeadLetter,
    DisableSink,
    RetryAfterDelay,
    RetryDecision,
    backoff,
    probe_delay,
)
from tests.delivery.test_retry import DAY, NOW, _entry, decide

GIVEN_UP = DeadLetter("given up after 60 s")
REFUSED = DeadLetter("refused, and no NotBefore ahead to keep trying for")


@pytest.mark.parametrize(
    ("tries", "seconds_left", "expected"),
    [
        (1, 0, 0.5),
        (2, 0, 1.0),
        (10, 0, 256.0),
        (11, 0, 300.0),
        (10_000, -1, 300.0),
        (1, 0.1, 0.5),
        (4, 0.1, 4.0),
        (5, 0.1, 7.0),
        (9, 900, 7.0),
        (9, 900.5, 7.0),
        (9, 920, 20.0),
        (9, 960, 54.0),
        (9, DAY, 54.0),
        (2, DAY, 1.0),
    ],
)
def test_pauses_double_up_to_what_the_time_left_allows(
    tries: int, seconds_left: float, expected: float
) -> None:
    assert backoff(tries, seconds_left) == expected


@pytest.mark.parametrize(
    ("failure", "options", "expected"),
    [
        ("disabled", {}, DisableSink()),
        ("slow", {}, REFUSED),
        ("slow", {"seconds_left": 0.0}, REFUSED),
        ("slow", {"seconds_left": 1000.0}, RetryAfterDelay(54.0)),
        ("slow", {"seconds_left": 1000.0, "longest_pause": 10.0}, RetryAfterDelay(10.0)),
        ("slow", {"seconds_left": 10.0}, RetryAfterDelay(8.0)),
        ("transient", {"age": 60.0, "give_up_after": 60.0}, GIVEN_UP),
        ("transient", {"age": 59.9, "give_up_after": 60.0}, RetryAfterDelay(0.5)),
        ("transient", {"age": 60.0, "give_up_after": 60.0, "seconds_left": 100.0}, GIVEN_UP),
        ("transient", {"age": DAY, "seconds_left": 100.0}, RetryAfterDelay(0.5)),
        ("transient", {"age": DAY, "seconds_left": 0.0}, DeadLetter("given up after 86400 s")),
        ("transient", {"tries": 99}, RetryAfterDelay(300.0)),
        ("transient", {"tries": 99, "longest_pause": 400.0}, RetryAfterDelay(300.0)),
    ],
)
def test_what_follows_a_failed_try(
    failure: Any, options: dict[str, Any], expected: RetryDecision
) -> None:
    assert decide(failure, **options) == expected


@pytest.mark.parametrize(
    ("options", "delay"),
    [
        ({"tries": 9, "seconds_left": 2.0}, 7.0),
        ({"tries": 9, "seconds_left": 2.5}, 0.5),
        ({"tries": 9, "seconds_left": 8.0}, 6.0),
        ({"tries": 9, "seconds_left": 5.0, "jitter": 0.5}, 3.5),
        ({"tries": 2, "jitter": 0.5}, 1.05),
    ],
)
def test_the_last_try_is_2_s_before_not_before_and_jitter_makes_it_later(
    options: dict[str, Any], delay: float
) -> None:
    decision = decide(**options)
    assert isinstance(decision, RetryAfterDelay)
    assert decision.delay == pytest.approx(delay)
    assert decision.sink_pause == 0.0


@pytest.mark.parametrize(
    ("asked", "sink_pause"),
    [(None, 0.0), (-5.0, 0.0), (0.5, 0.525), (100.0, 105.0), (9999.0, 3780.0)],
)
def test_a_receiver_rests_for_as_long_as_it_asks_up_to_an_hour(
    asked: float | None, sink_pause: float
) -> None:
    decision = decide(retry_after=asked, jitter=0.5)
    assert isinstance(decision, RetryAfterDelay)
    assert decision.sink_pause == pytest.approx(sink_pause)
    assert decision.delay == pytest.approx(max(0.525, sink_pause))


@pytest.mark.parametrize(
    ("failed_seconds_left", "next_seconds_left", "failures", "expected"),
    [
        (None, None, 4, 4.0),
        (0.0, None, 4, 4.0),
        (100.0, 100.0, 4, 2.0),
        (100.0, 100.0, 1, 0.5),
        (None, 100.0, 4, 4.0),
        (0.5, 0.5, 9, 2.0),
    ],
)
def test_an_urgent_entry_is_probed_as_often_as_its_own_tries_say(
    failed_seconds_left: float | None,
    next_seconds_left: float | None,
    failures: int,
    expected: float,
) -> None:
    delay = probe_delay(
        _entry(0, failed_seconds_left, attempts=2),
        next_not_before=(
            None if next_seconds_left is None else NOW + timedelta(seconds=next_seconds_left)
        ),
        failures=failures,
        now=NOW,
        longest_pause=300.0,
        jitter=0.0,
    )
    assert delay == expected


def test_five_errors_of_the_code_of_a_sink_are_enough() -> None:
    assert MAX_INTERNAL_ERRORS == 5


def test_a_receiver_that_asks_for_nothing_is_not_paused() -> None:
    assert RetryAfterDelay(1.0).sink_pause == 0.0
