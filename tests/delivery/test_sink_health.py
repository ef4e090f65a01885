"""When the relay may try a sink, and what makes it failing."""

from __future__ import annotations

import pytest

from relay.delivery.ordered_queue import OrderedQueue
from relay.delivery.sink_health import FAILURE_THRESHOLD, STALL_TIMEOUT, SinkHealth
from relay.errors import Deferred, Failure, Rejected
from relay.store import Entry
from tests.clocks import ManualClock
from tests.delivery.running_dispatcher import ScriptedSink
from tests.delivery.test_ordered_queue import entry


class Sink:
    """The health of a sink for which one entry waits, and what was reported of it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.reports: list[str] = []
        self.queue = OrderedQueue()
        self.queue.push(entry(1))
        self.health = SinkHealth(
            "bus", ScriptedSink(), self.queue, self.clock, lambda name, *_, **__: self._told(name)
        )

    @property
    def may_try_now(self) -> bool:
        return self.health.allowed_at <= self.clock.monotonic()

    def _told(self, name: str) -> None:
        self.reports.append(name.removeprefix("relay.sink-"))

    def fail(
        self,
        failure: Failure = "transient",
        *,
        of: Entry | None = None,
        began: float | None = None,
        after: float | None = None,
    ) -> None:
        """Fail one try, which begins a second later unless it ``began`` earlier."""
        tried = of or entry(1)
        if began is None:
            self.clock.advance(1.0)
        self.health.record_try_start(tried)
        began = self.clock.monotonic() if began is None else began
        error = Deferred("down", failure=failure, after=after)
        self.health.plan_after_failure(tried, error, began)

    def succeed(self) -> None:
        self.health.record_success(entry(2, "b"))


def failing() -> Sink:
    """A sink with three failures in a row, one in a second."""
    sink = Sink()
    for _ in range(FAILURE_THRESHOLD):
        assert not sink.health.is_failing
        sink.fail()
    return sink


def test_so_many_failures_in_a_row_and_it_is_failing_and_that_is_told_once() -> None:
    sink = failing()
    sink.fail()
    assert (sink.health.is_failing, sink.reports) == (True, ["failing"])
    states = [sink.health.circuit]
    assert sink.health.probes_only
    sink.clock.advance(400.0)
    states.append(sink.health.circuit)
    sink.succeed()
    sink.succeed()
    states.append(sink.health.circuit)
    assert sink.reports == ["failing", "recovered"]
    assert states == ["open", "half-open", "closed"]
    assert (sink.health.probes_only, sink.may_try_now) == (False, True)


def test_failures_that_were_under_way_together_count_as_one() -> None:
    """A broken connection fails sixteen deliveries. They are one failure: the pause is short."""
    sink = Sink()
    sink.clock.advance(15.0)
    for _ in range(16):
        sink.fail(began=0.0)
    assert (sink.health.is_failing, sink.health.failures) == (False, 1)
    for began in range(15, 35):  # those that always overlap count in the end
        sink.clock.advance(1.0)
        sink.fail(began=began - 1.5)
    assert sink.health.is_failing
    assert sink.health.failures < 12


def test_a_success_between_failures_starts_the_count_again() -> None:
    sink = Sink()
    for number in range(30):
        sink.fail()
        if number % 2:
            sink.succeed()
    assert sink.reports == []


def test_what_is_new_is_tried_at_once_but_not_before_the_far_side_allows_it() -> None:
    sink = failing()
    assert not sink.may_try_now
    sink.health.probe_now()
    assert (sink.may_try_now, sink.health.probes_only) == (True, True)
    sink.fail(after=60.0)
    asked_for = sink.health.allowed_at
    assert asked_for >= sink.clock.monotonic() + 60.0
    sink.fail(after=30.0)
    sink.health.probe_now()
    assert sink.health.allowed_at == asked_for
    sink.succeed()
    assert sink.health.allowed_at == asked_for


@pytest.mark.parametrize("is_failing", [True, False])
def test_to_resume_hastens_all_but_a_failing_sink_is_probed_first(is_failing: bool) -> None:
    sink = failing() if is_failing else Sink()
    sink.fail(after=600.0)
    sink.health.set_state("on", None)
    assert (sink.health.probes_only, sink.may_try_now) == (is_failing, True)


def test_a_failing_sink_that_refuses_an_entry_answers_so_the_others_are_tried() -> None:
    sink = failing()
    sink.fail("slow", of=entry(3, "c"))
    assert (sink.health.is_failing, sink.health.probes_only) == (True, False)
    assert sink.may_try_now


@pytest.mark.parametrize("how", ["failed", "rejected"])
@pytest.mark.parametrize("between", ["nothing", "resumed", "unreadable", "delivered", "long idle"])
def test_two_tries_a_minute_apart_are_enough_with_no_success(how: str, between: str) -> None:
    """An entry that is rejected for good leaves an empty queue. The next one can come later."""
    sink = Sink()
    sink.queue.mark_next_entry_in_flight()
    sink.queue.remove_head(entry(1))

    def go_wrong(number: int) -> None:
        if how == "failed":
            sink.fail(of=entry(number))
        else:
            sink.health.record_try_start(entry(number))
            sink.health.record_rejection(entry(number), Rejected("not this one"))
        sink.health.report_if_no_recent_success()

    go_wrong(1)
    match between:
        case "resumed":
            sink.health.set_state("on", None)
        case "unreadable":
            sink.health.restart_time_without_success()
        case "delivered":
            sink.succeed()
        case "long idle":
            sink.clock.advance(1.0)
    sink.clock.advance(STALL_TIMEOUT - (how == "failed"))
    go_wrong(2)
    assert sink.health.is_failing == (between == "nothing")
    assert sink.health.failures <= 2


def test_what_is_rejected_for_good_is_no_failed_try() -> None:
    """A receiver that finds fault with some events answers, and takes others."""
    sink = Sink()
    for number in range(10):
        sink.health.record_try_start(entry(number))
        sink.health.record_rejection(entry(number), Rejected("not this one"))
    assert (sink.health.is_failing, sink.health.failures) == (False, 0)


def test_an_entry_that_is_refused_again_and_again_makes_no_sink_failing_that_took_another() -> None:
    sink = Sink()
    sink.fail("slow", of=entry(3))
    sink.succeed()
    for _ in range(10):
        sink.clock.advance(STALL_TIMEOUT)
        sink.fail("slow", of=entry(3))
        sink.health.report_if_no_recent_success()
    assert (sink.health.is_failing, sink.health.failures) == (False, 0)


def test_while_a_sink_is_paused_no_time_passes_for_it() -> None:
    sink = Sink()
    sink.health.record_try_start(entry(1))
    sink.health.set_state("paused", "by an operator")
    sink.clock.advance(STALL_TIMEOUT)
    sink.health.report_if_no_recent_success()
    assert not sink.health.is_failing
