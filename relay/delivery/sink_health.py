"""The health of one sink: whether it may be tried now, and what follows from a try.

The worker calls `SinkHealth.record_try_start` before each try and the ``record_*`` of its result
after it. What follows is a retry, a pause, a probe or a report. Each fact is recorded once as a
``relay.*`` event, which goes to the other sinks and to the log, and again when it changes.

A sink becomes *failing* after a few failures in a row, or after a minute of tries without a
success. While its receiver does not answer, one entry at a time is then tried, as a probe: in turn
the one with the fewest attempts of all, and that of the most important. So a receiver that always
answers 500 to some events holds back no other, and what is new is tried at once.
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
    RetryAfterDelay,
    RetryDecision,
    plan_retry,
    probe_delay,
)
from relay.errors import Deferred, Rejected
from relay.events.build import RecordRelayEvent
from relay.logs import log_extra
from relay.net.http import describe_skew
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


class SinkHealth:
    """Tracks the state of one sink and reports when it changes. Times are monotonic seconds.

    A *refused* entry failed in a way that a person must correct. When it is tried again, that says
    nothing about the receiver.

    ``waiting`` always means the waiting entries, those in flight included.
    """

    def __init__(
        self, name: str, sink: Sink, waiting: OrderedQueue, clock: Clock, report: RecordRelayEvent
    ) -> None:
        self.state: SinkState = "on"
        self.is_failing = False
        """Whether it failed repeatedly or stalled, or was disabled, with no success since."""
        self.failures = 0
        self.probes_only = False
        """Whether only one entry may be in flight: it is failing, and did not answer last."""
        self.is_skewed = False
        """Whether the clocks of the receiver and of the relay differ too much."""
        self._next_try_at = float("-inf")
        self._paused_until = float("-inf")  # because the receiver asked for it
        self._last_failure_at = float("-inf")  # when it was counted
        # The first try that no success and no long idle time followed:
        self._trying_since: float | None = None
        self._idle_since: float | None = None  # None: there is something to deliver
        self._name = name
        self._sink = sink
        self._waiting = waiting
        self._clock = clock
        self._report = report
        self._stop_reason: str | None = None
        self._last_failure: str | None = None
        self._refused: set[int] = set()  # ids of entries
        self._dead_letters = 0
        self._internal_errors: dict[int, int] = {}  # count by id of the entry
        self._logged_error: str | None = None  # the type of the last internal error

    @property
    def reason(self) -> str | None:
        """Why the sink is paused or disabled, or why the last try failed."""
        return self._last_failure if self.state == "on" else self._stop_reason

    @property
    def circuit(self) -> CircuitState:
        if not self.is_failing:
            return "closed"
        return "open" if self._clock.monotonic() < self.allowed_at else "half-open"

    @property
    def allowed_at(self) -> float:
        """Nothing may be tried before this time."""
        return max(self._paused_until, self._next_try_at)

    @property
    def next_probe(self) -> Literal["of all", "of the most important"] | None:
        """Of which entries the next probe is the one with the fewest attempts; None: it is none."""
        if not self.probes_only:
            return None
        return "of all" if self.failures % 2 else "of the most important"

    @property
    def becomes_failing_at(self) -> float | None:
        """When it becomes failing without a success; None: it is, or nothing waits."""
        if self.is_failing or self._trying_since is None or self._idle_since is not None:
            return None
        return self._trying_since + STALL_TIMEOUT

    def set_state(self, state: SinkState, reason: str | None) -> None:
        """Set the state. A sink that is turned on may be tried at once."""
        self.state, self._stop_reason = state, reason
        if state == "disabled":
            self.is_failing = True
        if state == "on":
            self.restart_time_without_success()
            self.probes_only = self.is_failing
            self._next_try_at = self._paused_until = float("-inf")

    def disable(self, reason: str) -> None:
        """The receiver asked the relay to stop."""
        self.set_state("disabled", reason)
        self._report("relay.sink-disabled", reason, sink=self._name, count=len(self._waiting))

    def restart_time_without_success(self) -> None:
        """Begin the `STALL_TIMEOUT` anew: a success, an operator or the state file came between."""
        self._trying_since = None

    def probe_now(self) -> None:
        """Try at once, as far as the receiver allows it: something is new."""
        self._next_try_at = float("-inf")

    def report_if_no_recent_success(self) -> None:
        """Report the sink as failing if no try has succeeded for too long."""
        now = self._clock.monotonic()
        if not self._waiting and self._idle_since is None:
            self._idle_since = now
        if self.state == "on" and (at := self.becomes_failing_at) is not None and now >= at:
            self._last_failure = self._last_failure or "no try has ended for a minute"
            self._become_failing(self._last_failure)

    def record_try_start(self, entry: Entry) -> None:
        if entry.id in self._refused:
            return
        now = self._clock.monotonic()
        if self._idle_since is not None and now - self._idle_since > STALL_TIMEOUT:
            self._trying_since = None
        self._idle_since = None
        if self._trying_since is None:
            self._trying_since = now

    def record_dead_letter(self, entry: Entry, reason: str) -> None:
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
        reason = f"{describe_skew(skew)}: check both, because signatures contain the time"
        self._report("relay.clock-skewed", reason, sink=self._name)

    def forget_entry(self, entry: Entry) -> None:
        self._internal_errors.pop(entry.id, None)
        self._refused.discard(entry.id)

    def record_success(self, entry: Entry) -> bool:
        """An entry was delivered. Return whether the sink has just recovered."""
        self.forget_entry(entry)
        self._last_failure = None
        if not self._internal_errors:
            self._logged_error = None  # the next internal error is logged again
        if self.state == "disabled":
            return False
        has_recovered, self.is_failing = self.is_failing, False
        self.failures, self.probes_only, self._next_try_at = 0, False, float("-inf")
        self.restart_time_without_success()
        if has_recovered:
            waiting = len(self._waiting)
            self._report(
                "relay.sink-recovered", "it delivers again", sink=self._name, count=waiting
            )
        return has_recovered

    def record_rejection(self, entry: Entry, error: Rejected) -> None:
        """It was rejected for good. That concerns it alone: no failure, but no success."""
        self._last_failure = error.reason
        if entry.id not in self._refused:
            self._note_no_success(error.reason)

    def record_internal_error(self, entry: Entry, error: Exception) -> Deferred:
        """The code of the sink raised an unexpected error. Return it as a failure."""
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
        self._internal_errors[entry.id] = self._internal_errors.get(entry.id, 0) + 1
        return Deferred(f"the sink's own code failed: {error_type}")

    def plan_after_failure(self, entry: Entry, error: Deferred, began: float) -> RetryDecision:
        """A try that began at ``began`` failed. Decide what to do with the entry."""
        now, monotonic = self._clock.now(), self._clock.monotonic()
        self._last_failure = error.reason
        is_refused = error.failure == "slow"
        if not is_refused or entry.id not in self._refused:
            if began > self._last_failure_at:
                self.failures, self._last_failure_at = self.failures + 1, monotonic
            self._note_no_success(error.reason)
        if is_refused:
            self._refused.add(entry.id)
        else:
            self._refused.discard(entry.id)
        jitter = random.random()  # noqa: S311  # it protects nothing
        decision = plan_retry(
            error.failure,
            tries=entry.attempts + 1,
            now=now,
            recorded=entry.recorded,
            not_before=entry.not_before,
            give_up_after=self._sink.give_up_after,
            longest_pause=self._sink.longest_pause,
            retry_after=error.after,
            jitter=jitter,
        )
        if isinstance(decision, RetryAfterDelay):
            self._paused_until = max(self._paused_until, monotonic + decision.sink_pause)
        if self.is_failing:
            # A receiver that refuses one event for now answers, and may accept the others.
            self.probes_only = error.failure == "transient"
            self._next_try_at = monotonic
            if self.probes_only:
                self._next_try_at += probe_delay(
                    entry,
                    next_not_before=self._waiting.earliest_not_before_after(now),
                    failures=self.failures,
                    now=now,
                    longest_pause=self._sink.longest_pause,
                    jitter=jitter,
                )
        internal_errors = self._internal_errors.get(entry.id, 0)
        if internal_errors >= MAX_INTERNAL_ERRORS:
            return DeadLetter(f"the sink's own code failed {internal_errors} times")
        return decision

    def _note_no_success(self, reason: str) -> None:
        """Find out whether the sink becomes failing by a try that did not succeed."""
        since = self._trying_since
        is_stalled = since is not None and self._clock.monotonic() - since >= STALL_TIMEOUT
        if not self.is_failing and (is_stalled or self.failures >= FAILURE_THRESHOLD):
            self._become_failing(reason)

    def _become_failing(self, reason: str) -> None:
        self.is_failing = True
        self._report("relay.sink-failing", reason, sink=self._name, count=len(self._waiting))
