"""When the relay may try a sink: what counts as a failure, and which entry is the next probe."""

from __future__ import annotations

import pytest

from relay.delivery.sink_health import FAILURE_THRESHOLD, STALL_TIMEOUT, CircuitBreaker


def failing() -> CircuitBreaker:
    """A circuit after three failed tries, at 0, 1 and 2 s."""
    circuit = CircuitBreaker()
    assert [circuit.record_failure(moment, moment) for moment in (0.0, 1.0, 2.0)] == [
        False,
        False,
        True,
    ]
    return circuit


def test_so_many_failures_in_a_row_and_it_is_failing_and_that_is_new_once() -> None:
    circuit = failing()
    assert (circuit.is_failing, circuit.failures) == (True, FAILURE_THRESHOLD)
    assert not circuit.record_failure(3.0, 3.0)


def test_failures_that_were_under_way_together_count_as_one() -> None:
    """A broken connection fails sixteen deliveries. They are one failure: the pause is short."""
    circuit = CircuitBreaker()
    for _ in range(16):
        circuit.record_failure(began=0.0, now=15.0)
    assert (circuit.is_failing, circuit.failures) == (False, 1)


def test_tries_that_always_overlap_count_in_the_end() -> None:
    circuit = CircuitBreaker()
    for began in range(20):
        circuit.record_failure(began=float(began), now=began + 2.5)
    assert circuit.is_failing
    assert circuit.failures < 10


def test_a_success_between_failures_starts_the_count_again() -> None:
    circuit = CircuitBreaker()
    for moment in range(30):
        circuit.record_failure(float(moment), float(moment))
        if moment % 2:
            assert not circuit.record_success()
    assert not circuit.is_failing


def test_the_first_success_opens_it_and_says_that_it_was_failing() -> None:
    circuit = failing()
    circuit.schedule_probe(10.0, 2.0)
    assert (circuit.allows_only_probe, circuit.allowed_at) == (True, 10.0)
    assert circuit.record_success()
    assert (
        circuit.is_failing,
        circuit.allows_only_probe,
        circuit.allowed_at,
        circuit.failures,
    ) == (
        False,
        False,
        float("-inf"),
        0,
    )
    assert not circuit.record_success()


def test_probes_alternate_between_the_oldest_and_the_least_tried() -> None:
    circuit = failing()
    turns = []
    for moment in range(4):
        circuit.schedule_probe(float(moment), float(moment))
        turns.append(circuit.prefers_least_tried)
        circuit.record_try_start(float(moment))
    assert turns == [False, True, False, True]


def test_what_is_new_is_probed_at_once_and_takes_no_others_turn_or_time() -> None:
    circuit = failing()
    circuit.schedule_probe(300.0, 2.0)
    for moment in (5.0, 65.0, 125.0):
        circuit.probe_now()
        assert (circuit.allowed_at, circuit.prefers_least_tried) == (float("-inf"), True)
        circuit.record_try_start(moment)
        assert (circuit.allowed_at, circuit.prefers_least_tried) == (300.0, False)
        circuit.record_failure(moment, moment)
        circuit.schedule_probe(moment + 300.0, moment)
        assert circuit.allowed_at == 300.0


def test_nothing_hastens_what_the_far_side_asked_for() -> None:
    circuit = failing()
    circuit.schedule_probe(10.0, 2.0)
    circuit.pause_until(60.0)
    circuit.pause_until(30.0)
    circuit.probe_now()
    assert circuit.allowed_at == 60.0
    assert circuit.record_success()
    assert circuit.allowed_at == 60.0


@pytest.mark.parametrize("is_failing", [True, False])
def test_an_operator_who_resumes_hastens_everything_but_a_failing_sink_is_probed_first(
    is_failing: bool,
) -> None:
    circuit = failing() if is_failing else CircuitBreaker()
    circuit.schedule_probe(300.0 if is_failing else None, 2.0)
    circuit.pause_until(600.0)
    circuit.try_now(7.0)
    assert circuit.allows_only_probe == is_failing
    assert circuit.allowed_at <= 7.0


def test_a_minute_without_a_success_makes_it_failing_however_few_tries_there_were() -> None:
    circuit = CircuitBreaker()
    circuit.record_try_start(5.0)
    assert not circuit.mark_stalled(5.0 + STALL_TIMEOUT - 0.1)
    assert circuit.mark_stalled(5.0 + STALL_TIMEOUT)
    assert circuit.is_failing
    assert circuit.becomes_failing_at is None
    assert not circuit.mark_stalled(500.0), "that is new once"
    assert circuit.record_success()
    circuit.record_try_start(600.0)
    assert not circuit.mark_stalled(659.0)


def test_time_in_which_there_is_nothing_to_deliver_does_not_count() -> None:
    circuit = CircuitBreaker()
    circuit.record_try_start(0.0)
    circuit.record_idle(0.0)
    assert circuit.becomes_failing_at is None
    assert not circuit.mark_stalled(1000.0)
    circuit.record_try_start(1000.0)
    assert circuit.becomes_failing_at == 1000.0 + STALL_TIMEOUT


@pytest.mark.parametrize("how", ["failed", "refused"])
def test_two_tries_a_minute_apart_are_enough_where_nothing_got_through_between(how: str) -> None:
    """A permanently refused entry leaves an empty queue. The next entry comes much later."""

    def goes_wrong(circuit: CircuitBreaker, now: float) -> bool:
        circuit.record_try_start(now)
        wrong = (
            circuit.record_failure(now, now) if how == "failed" else circuit.record_rejection(now)
        )
        circuit.record_idle(now)
        return wrong

    circuit = CircuitBreaker()
    assert [goes_wrong(circuit, moment) for moment in (0.0, STALL_TIMEOUT - 1, STALL_TIMEOUT)] == [
        False,
        False,
        True,
    ]
    circuit = CircuitBreaker()
    assert not goes_wrong(circuit, 0.0)
    circuit.record_success()
    assert not goes_wrong(circuit, STALL_TIMEOUT)


@pytest.mark.parametrize("event", ["idle", "resumed", "unreadable", "delivered"])
def test_two_failures_do_not_count_together_if_they_belong_to_different_times(event: str) -> None:
    circuit = CircuitBreaker()
    circuit.record_try_start(0.0)
    assert not circuit.record_failure(0.0, 0.0)
    if event == "idle":
        circuit.record_idle(0.0)
    elif event == "resumed":
        circuit.try_now(1.0)
    elif event == "unreadable":
        circuit.restart_time_without_success()
    else:
        circuit.record_success()
    later = STALL_TIMEOUT + 1.0
    circuit.record_try_start(later)
    assert not circuit.record_failure(later, later)
    assert circuit.becomes_failing_at == later + STALL_TIMEOUT


def test_what_is_refused_for_good_is_no_failed_try() -> None:
    """A receiver that finds fault with some events answers, and takes others."""
    circuit = CircuitBreaker()
    circuit.record_try_start(0.0)
    assert not any(circuit.record_rejection(1.0) for _ in range(10))
    assert circuit.failures == 0
