"""The health of one sink: whether it may be tried now, and what follows from a try.

The worker calls `SinkHealth.record_try_start` before each try and the ``record_*`` of its result
after it. What follows is a retry, a pause, a probe or a report. Each fact is recorded once as a
``relay.*`` event, which goes to the other sinks and to the log, and again when it changes. A sink
becomes *failing* after a few failures in a row, or after a minute of tries without a success. Then
its `CircuitBreaker` lets one entry at a time be tried, as a probe.
"""

from __future__ import annotations

import logging
import random
from typing import Literal

from relay.clock import Clock
from relay.delivery.ordered_queue import OrderedQueue
from relay.delivery.result_recording import error_type_name
from relay.delivery.retry import (
    MAX_INTERNAL_ERRORS,
    DeadLetter,
    DisableSink,
    RetryAfterDelay,
    RetryDecision,
    plan_retry,
    probe_delay,
)
from relay.errors import Deferred, Rejected
from relay.events.build import RecordRelayEvent
from relay.log_fields import log_extra
from relay.sinks import Sink
from relay.store import Entry, SinkState

MAX_CLOCK_SKEW = 30.0
"""Seconds between the clocks of receiver and relay from which it is reported.

Receivers refuse signatures with an old timestamp (docs/protocol.md#clocks-that-differ).
"""
FAILURE_THRESHOLD = 3
"""Failures in a row after which a sink is failing. Tries that overlapped count as one."""
STALL_TIMEOUT = 60.0
"""Seconds without a success, although there were entries, after which a sink is failing.

A longer time without an entry ends the memory of earlier failures.
"""
CircuitState = Literal["closed", "open", "half-open"]
"""closed: the sink is not failing. open: it is, and may not be tried now. half-open: it may."""

_log = logging.getLogger(__name__)


class CircuitBreaker:
    """Decides whether a sink as a whole may be tried now. Times are monotonic seconds. No I/O.

    `SinkHealth` tells it how each try went, and the worker asks it before the next one. Probes
    alternate between the first entry of the queue and the entry with the fewest attempts. So a
    receiver that always answers 500 to one event holds back no other.
    """

    def __init__(self) -> None:
        self.is_failing = False
        """Whether the sink failed repeatedly or stalled, or was disabled, with no success since."""
        self.failures = 0
        """Failures in a row."""
        self._last_failure_at = float("-inf")  # when it was counted
        # The first try that no success and no long idle time followed:
        self._trying_since: float | None = None
        self._idle_since: float | None = None  # None: there is something to deliver
        self._paused_until = float("-inf")
        self._probe_at: float | None = None
        self._is_least_tried_turn = False
        # An extra probe for a new entry, which does not change the turn:
        self._has_extra_probe = False

    def state(self, now: float) -> CircuitState:
        """Return the state for the metrics."""
        if not self.is_failing:
            return "closed"
        return "open" if now < self.allowed_at else "half-open"

    @property
    def allows_only_probe(self) -> bool:
        """Whether only one entry, the probe, may be in flight."""
        return self._probe_at is not None

    @property
    def allowed_at(self) -> float:
        """Nothing may be tried before this time."""
        if self._probe_at is None or self._has_extra_probe:
            return self._paused_until
        return max(self._paused_until, self._probe_at)

    @property
    def prefers_least_tried(self) -> bool:
        """Whether the next probe is the entry with the fewest attempts, not the first one."""
        return self.allows_only_probe and (self._is_least_tried_turn or self._has_extra_probe)

    @property
    def becomes_failing_at(self) -> float | None:
        """When the sink becomes failing unless a try succeeds.

        None if it is failing already or there is nothing to deliver.
        """
        if self.is_failing or self._trying_since is None or self._idle_since is not None:
            return None
        return self._trying_since + STALL_TIMEOUT

    def record_try_start(self, now: float, *, is_excused: bool = False) -> None:
        """A try begins.

        ``is_excused``: the receiver refused this entry before, and accepted others since then. So
        the try tells nothing about the receiver.
        """
        if not is_excused:
            if self._idle_since is not None and now - self._idle_since > STALL_TIMEOUT:
                self._trying_since = None
            self._idle_since = None
            if self._trying_since is None:
                self._trying_since = now
        if not self._has_extra_probe:
            self._is_least_tried_turn = self.allows_only_probe and not self._is_least_tried_turn
        self._has_extra_probe = False

    def record_idle(self, now: float) -> None:
        """There is nothing to deliver."""
        if self._idle_since is None:
            self._idle_since = now

    def restart_time_without_success(self) -> None:
        """Begin the `STALL_TIMEOUT` anew: a success, an operator or the state file came between."""
        self._trying_since = None

    def mark_stalled(self, now: float) -> bool:
        """Return whether the sink has just become failing because no try succeeded in time."""
        if self.becomes_failing_at is None or now < self.becomes_failing_at:
            return False
        self.is_failing = True
        return True

    def record_failure(self, began: float, now: float) -> bool:
        """A try that began at ``began`` failed. Return whether the sink has just become failing."""
        if began > self._last_failure_at:
            self.failures, self._last_failure_at = self.failures + 1, now
        return self._update_failing(now, is_repeated=self.failures >= FAILURE_THRESHOLD)

    def record_rejection(self, now: float) -> bool:
        """The receiver rejected an entry for good. Return whether the sink just became failing.

        A rejection concerns the entry alone, so it is not a failure. But it is no success either.
        """
        return self._update_failing(now)

    def _update_failing(self, now: float, *, is_repeated: bool = False) -> bool:
        is_stalled = self._trying_since is not None and now - self._trying_since >= STALL_TIMEOUT
        was_failing, self.is_failing = self.is_failing, self.is_failing or is_repeated or is_stalled
        return self.is_failing and not was_failing

    def record_success(self) -> bool:
        """A try succeeded. Return whether the sink was failing until now."""
        was_failing, self.is_failing = self.is_failing, False
        self.failures, self._probe_at, self._has_extra_probe = 0, None, False
        self.restart_time_without_success()
        return was_failing

    def schedule_probe(self, at: float | None, now: float) -> None:
        """Allow only probes from now on, the next one at this time.

        None: the receiver answers, so each entry is retried for itself.
        """
        if at is not None and self._probe_at is not None and now < self._probe_at:
            at = min(at, self._probe_at)  # extra probes must not postpone the regular one
        self._probe_at = at

    def probe_now(self) -> None:
        """Allow one extra immediate probe: the scheduled one predates a new entry."""
        self._has_extra_probe = self.allows_only_probe

    def pause_until(self, until: float) -> None:
        """Allow nothing before this time, because the receiver asked for it."""
        self._paused_until = max(self._paused_until, until)

    def try_now(self, now: float) -> None:
        """Allow a try now, because an operator asked for it."""
        self.restart_time_without_success()
        self._paused_until = float("-inf")
        self._probe_at = now if self.is_failing else None


class SinkHealth:
    """Tracks the state of one sink and reports when it changes.

    A *refused* entry failed in a way that a person must correct. While the receiver accepts others,
    such a failure says nothing about it: the entry is *excused*.

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
    def stop_or_failure_reason(self) -> str | None:
        """Why the sink is paused or disabled, or why the last try failed."""
        return self._last_failure if self.state == "on" else self._stop_reason

    def set_state(self, state: SinkState, reason: str | None) -> None:
        """Set the state. A sink that is turned on may be tried at once."""
        self.state, self._stop_reason = state, reason
        if state == "disabled":
            self.circuit.is_failing = True
        if state == "on":
            self.circuit.try_now(self._clock.monotonic())

    def disable(self, reason: str) -> None:
        """The receiver asked the relay to stop."""
        self.set_state("disabled", reason)
        self._report("relay.sink-disabled", reason, sink=self._name, count=len(self._waiting))

    def report_if_no_recent_success(self) -> None:
        """Report the sink as failing if no try has succeeded for too long."""
        if not self._waiting:
            self.circuit.record_idle(self._clock.monotonic())
        if self.state == "on" and self.circuit.mark_stalled(self._clock.monotonic()):
            self._last_failure = self._last_failure or "no try has ended for a minute"
            self._report_failing(self._last_failure)

    def record_try_start(self, entry: Entry) -> None:
        """A try begins."""
        self.circuit.record_try_start(self._clock.monotonic(), is_excused=entry.id in self._excused)

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
        error_type = error_type_name(error)
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
        decision = self.plan_after_failure(entry, failure, began)
        if count >= MAX_INTERNAL_ERRORS:
            decision = DeadLetter(f"the sink's own code failed {count} times")
        return failure, decision

    def plan_after_failure(self, entry: Entry, error: Deferred, began: float) -> RetryDecision:
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
        if isinstance(decision, RetryAfterDelay):
            self.circuit.pause_until(monotonic + decision.sink_pause)
        if self.circuit.is_failing:
            self._schedule_probe(entry, error)
        return decision

    def _schedule_probe(self, entry: Entry, error: Deferred) -> None:
        monotonic = self._clock.monotonic()
        if error.failure != "transient":
            # A receiver that refuses one event for now answers, and may accept the others.
            self.circuit.schedule_probe(None, monotonic)
            return
        now = self._clock.now()
        delay = probe_delay(
            entry,
            next_not_before=self._waiting.earliest_not_before_after(now),
            failures=self.circuit.failures,
            now=now,
            longest_pause=self._sink.longest_pause,
            jitter=random.random(),  # noqa: S311  # it protects nothing
        )
        self.circuit.schedule_probe(monotonic + delay, monotonic)

    def _report_failing(self, reason: str) -> None:
        self._report("relay.sink-failing", reason, sink=self._name, count=len(self._waiting))
