"""The health of one sink, and what follows from a try: retry, pause, probe or report."""

from __future__ import annotations

import random

from relay.clock import Clock
from relay.delivery.attempt import error_name
from relay.delivery.circuit_breaker import CircuitBreaker
from relay.delivery.ordered_queue import OrderedQueue
from relay.delivery.retry import (
    MAX_INTERNAL_ERRORS,
    DeadLetter,
    DisableSink,
    RetryAfter,
    RetryDecision,
    RetryPolicy,
)
from relay.delivery.sink_health_reports import SinkHealthReporter
from relay.errors import Deferred, Rejected
from relay.events.build import ReportRelayEvent
from relay.outbox import Entry, SinkState
from relay.sinks import Sink


class SinkHealth:
    """Tracks the state of one sink and reports when it changes.

    ``waiting`` always means the waiting entries, those in flight included.
    """

    def __init__(self, name: str, sink: Sink, clock: Clock, report: ReportRelayEvent) -> None:
        self.state: SinkState = "on"
        self.circuit = CircuitBreaker()
        self.reporter = SinkHealthReporter(name, report)
        self._policy = RetryPolicy(sink, random.random)
        self._clock = clock
        self._stop_reason: str | None = None
        self._last_failure: str | None = None
        # Ids of the entries that the receiver refused until a person corrects something:
        self._refused: set[int] = set()
        # Those of them that it refused before it accepted another entry. They say nothing about the
        # receiver, until it does not accept another entry:
        self._excused: set[int] = set()

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

    def report_if_stalled(self, waiting: OrderedQueue) -> None:
        """Report the sink as failing if no try has succeeded for too long."""
        if not waiting:
            self.circuit.record_idle(self._clock.monotonic())
        if self.state == "on" and self.circuit.check_stalled(self._clock.monotonic()):
            self._last_failure = self._last_failure or "no try has ended for a minute"
            self.reporter.report_failing(self._last_failure, len(waiting))

    def record_start(self, entry: Entry) -> None:
        """A try begins."""
        self.circuit.record_start(self._clock.monotonic(), is_excused=entry.id in self._excused)

    def forget_entry(self, entry: Entry) -> None:
        """An entry is not tried again."""
        self.reporter.forget_entry(entry)
        self._refused.discard(entry.id)
        self._excused.discard(entry.id)

    def record_success(self, entry: Entry) -> bool:
        """An entry was delivered. Return whether the sink has just recovered."""
        self.forget_entry(entry)
        self._excused = set(self._refused)
        self.reporter.record_success()
        self._last_failure = None
        return self.state != "disabled" and self.circuit.record_success()

    def record_rejection(self, entry: Entry, error: Rejected, waiting: OrderedQueue) -> None:
        """The receiver rejected an entry for good."""
        self._last_failure = error.reason
        if entry.id in self._excused:
            return
        self._excused.clear()
        if self.circuit.record_rejection(self._clock.monotonic()):
            self.reporter.report_failing(error.reason, len(waiting))

    def record_internal_error(
        self, entry: Entry, error: Exception, began: float, waiting: OrderedQueue
    ) -> tuple[Deferred, RetryDecision]:
        """The code of the sink raised an unexpected error. Return it as a failure; then decide."""
        count = self.reporter.report_internal_error(entry, error)
        failure = Deferred(f"the sink's own code failed: {error_name(error)}")
        decision = self.record_failure(entry, failure, began, waiting)
        if count >= MAX_INTERNAL_ERRORS:
            decision = DeadLetter(f"the sink's own code failed {count} times")
        return failure, decision

    def record_failure(
        self, entry: Entry, error: Deferred, began: float, waiting: OrderedQueue
    ) -> RetryDecision:
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
                self.reporter.report_failing(error.reason, len(waiting))
        decision = self._policy.decide(entry, error, now)
        if isinstance(decision, DisableSink):
            self.circuit.is_failing = True
        if isinstance(decision, RetryAfter):
            self.circuit.pause_until(monotonic + decision.sink_pause)
        if self.circuit.is_failing:
            self._schedule_probe(entry, error, waiting)
        return decision

    def _schedule_probe(self, entry: Entry, error: Deferred, waiting: OrderedQueue) -> None:
        if error.failure != "transient":
            # A receiver that refuses one event for now answers, and may accept the others.
            self.circuit.schedule_probe(None)
            return
        delay = self._policy.probe_delay(entry, waiting, self.circuit.failures, self._clock.now())
        self.circuit.schedule_probe(self._clock.monotonic() + delay)
