"""The health of one sink, and what follows from a try: retry, pause, probe or report.

The worker calls `SinkHealth.record_start` before each try and the ``record_*`` of its result after
it. Each fact is recorded once as a ``relay.*`` event, and again when it changes. The event goes to
the other sinks, and to the log. A *refused* entry failed in a way that a person must correct. While
the receiver accepts others, such a failure says nothing about it: the entry is *excused*.
"""

from __future__ import annotations

import logging
import random

from relay.clock import Clock
from relay.delivery.circuit_breaker import CircuitBreaker
from relay.delivery.ordered_queue import OrderedQueue
from relay.delivery.retry import (
    MAX_INTERNAL_ERRORS,
    DeadLetter,
    DisableSink,
    RetryAfter,
    RetryDecision,
    plan_retry,
    probe_delay,
)
from relay.delivery.sink_call import error_name
from relay.errors import Deferred, Rejected
from relay.events.build import RecordRelayEvent
from relay.log_fields import log_extra
from relay.outbox import Entry, SinkState
from relay.sinks import Sink

MAX_CLOCK_SKEW = 30.0
"""Seconds between the clocks of receiver and relay from which it is reported.

Receivers refuse signatures with an old timestamp (docs/protocol.md#clocks-that-differ).
"""

_log = logging.getLogger(__name__)


class SinkHealth:
    """Tracks the state of one sink and reports when it changes.

    ``waiting`` always means the waiting entries, those in flight included.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        waiting: OrderedQueue,
        clock: Clock,
        report: RecordRelayEvent,
    ) -> None:
        self.state: SinkState = "on"
        self.circuit = CircuitBreaker()
        self._name = name
        self._sink = sink
        self._waiting = waiting
        self._clock = clock
        self._report = report
        self._stop_reason: str | None = None
        self._last_failure: str | None = None
        self._refused: set[int] = set()  # ids of entries
        # Those of them that it refused before it accepted another entry. Any other failure makes
        # them count again:
        self._excused: set[int] = set()
        self._dead_letters = 0
        self.is_skewed = False
        """Whether the clocks of the receiver and of the relay differ too much."""
        self._internal_errors: dict[int, int] = {}  # count by id of the entry
        self._logged_error: str | None = None  # the type of the last internal error

    @property
    def reason(self) -> str | None:
        """Why the sink is paused or disabled, or why the last try failed."""
        return self._last_failure if self.state == "on" else self._stop_reason

    def set_state(self, state: SinkState, reason: str | None) -> None:
        """Set the state. A sink that is turned on may be tried at once."""
        self.state, self._stop_reason = state, reason
        if state == "disabled":
            self.circuit.is_failing = True
        if state == "on":
            self.circuit.resume(self._clock.monotonic())

    def disable(self, reason: str) -> None:
        """The receiver asked the relay to stop."""
        self.set_state("disabled", reason)
        self._report("relay.sink-disabled", reason, sink=self._name, count=len(self._waiting))

    def report_if_stalled(self) -> None:
        """Report the sink as failing if no try has succeeded for too long."""
        if not self._waiting:
            self.circuit.record_idle(self._clock.monotonic())
        if self.state == "on" and self.circuit.mark_failing_if_stalled(self._clock.monotonic()):
            self._last_failure = self._last_failure or "no try has ended for a minute"
            self._report_failing(self._last_failure)

    def record_start(self, entry: Entry) -> None:
        """A try begins."""
        self.circuit.record_start(self._clock.monotonic(), is_excused=entry.id in self._excused)

    def record_dead_letter(self, entry: Entry, reason: str) -> None:
        """An entry became a dead letter."""
        self._dead_letters += 1
        self._report(
            "relay.dead-lettered",
            f"{entry.type} (entry {entry.id}): {reason}",
            sink=self._name,
            count=self._dead_letters,
        )

    def record_clock_skew(self, skew: float | None) -> None:
        """The receiver's clock is this many seconds ahead of ours; None if that is not known."""
        if skew is None or (abs(skew) > MAX_CLOCK_SKEW) is self.is_skewed:
            return
        self.is_skewed = not self.is_skewed
        if not self.is_skewed:
            _log.info(
                "sink %s: its clock and ours agree again",
                self._name,
                extra=log_extra(sink=self._name),
            )
            return
        direction = "ahead of" if skew > 0 else "behind"
        reason = (
            f"its clock is {abs(skew):.0f} s {direction} ours: "
            "check both, because signatures contain the time"
        )
        self._report("relay.clock-skewed", reason, sink=self._name)

    def forget_entry(self, entry: Entry) -> None:
        """An entry is not tried again."""
        self._internal_errors.pop(entry.id, None)
        self._refused.discard(entry.id)
        self._excused.discard(entry.id)

    def record_success(self, entry: Entry) -> bool:
        """An entry was delivered. Return whether the sink has just recovered."""
        self.forget_entry(entry)
        self._excused = set(self._refused)
        self._last_failure = None
        if not self._internal_errors:
            self._logged_error = None  # the next internal error is logged again
        has_recovered = self.state != "disabled" and self.circuit.record_success()
        if has_recovered:
            waiting = len(self._waiting)
            self._report(
                "relay.sink-recovered", "it delivers again", sink=self._name, count=waiting
            )
        return has_recovered

    def record_rejection(self, entry: Entry, error: Rejected) -> None:
        """The receiver rejected an entry for good."""
        self._last_failure = error.reason
        if entry.id in self._excused:
            return
        self._excused.clear()
        if self.circuit.record_rejection(self._clock.monotonic()):
            self._report_failing(error.reason)

    def record_internal_error(
        self, entry: Entry, error: Exception, began: float
    ) -> tuple[Deferred, RetryDecision]:
        """The code of the sink raised an unexpected error. Return it as a failure; then decide."""
        error_type = error_name(error)
        if error_type != self._logged_error:
            self._logged_error = error_type
            _log.error(
                "sink %s failed in its own code on %s",
                self._name,
                entry.type,
                exc_info=error,
                extra=log_extra(sink=self._name, type=entry.type, entry=entry.id),
            )
        count = self._internal_errors.get(entry.id, 0) + 1
        self._internal_errors[entry.id] = count
        failure = Deferred(f"the sink's own code failed: {error_type}")
        decision = self.record_failure(entry, failure, began)
        if count >= MAX_INTERNAL_ERRORS:
            decision = DeadLetter(f"the sink's own code failed {count} times")
        return failure, decision

    def record_failure(self, entry: Entry, error: Deferred, began: float) -> RetryDecision:
        """A try that began at ``began`` (monotonic seconds) failed. Decide what to do with it."""
        now, monotonic = self._clock.now(), self._clock.monotonic()
        self._last_failure = error.reason
        if error.failure == "slow":
            self._refused.add(entry.id)
        else:
            self._refused.discard(entry.id)
        if error.failure != "slow" or entry.id not in self._excused:
            self._excused.clear()
            if self.circuit.record_failure(began, monotonic):
                self._report_failing(error.reason)
        decision = plan_retry(
            error.failure,
            tries=entry.attempts + 1,
            now=now,
            recorded=entry.recorded,
            not_before=entry.not_before,
            give_up_after=self._sink.give_up_after,
            longest_pause=self._sink.longest_pause,
            retry_after=error.after,
            jitter=random.random(),  # noqa: S311  # it protects nothing
        )
        if isinstance(decision, DisableSink):
            self.circuit.is_failing = True
        if isinstance(decision, RetryAfter):
            self.circuit.pause_until(monotonic + decision.sink_pause)
        if self.circuit.is_failing:
            self._schedule_probe(entry, error)
        return decision

    def _schedule_probe(self, entry: Entry, error: Deferred) -> None:
        if error.failure != "transient":
            # A receiver that refuses one event for now answers, and may accept the others.
            self.circuit.schedule_probe(None)
            return
        now = self._clock.now()
        delay = probe_delay(
            entry,
            next_not_before=self._waiting.next_not_before(now),
            failures=self.circuit.failures,
            now=now,
            longest_pause=self._sink.longest_pause,
            jitter=random.random(),  # noqa: S311  # it protects nothing
        )
        self.circuit.schedule_probe(self._clock.monotonic() + delay)

    def _report_failing(self, reason: str) -> None:
        self._report("relay.sink-failing", reason, sink=self._name, count=len(self._waiting))
