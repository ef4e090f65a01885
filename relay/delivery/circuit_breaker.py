"""Decides whether a sink as a whole may be tried now. Times are monotonic seconds. No I/O.

`sink_health` tells it how each try went, and the worker asks it before the next one. A sink becomes
*failing* after a few failures in a row, or after a minute of tries without a success.

While a sink is failing, one entry at a time is tried, as a probe. Probes alternate between the
first entry of the queue and the entry with the fewest attempts. So a receiver that always answers
500 to one event holds back no other.
"""

from __future__ import annotations

from typing import Literal

FAILURE_THRESHOLD = 3
"""Failures in a row after which a sink is failing. Tries that overlapped count as one."""
STALL_TIMEOUT = 60.0
"""Seconds without a success, although there were entries, after which a sink is failing.

A longer time without an entry ends the memory of earlier failures.
"""
CircuitState = Literal["closed", "open", "half-open"]
"""closed: the sink is not failing. open: it is, and may not be tried now. half-open: it may."""


class CircuitBreaker:
    """The circuit breaker of one sink."""

    def __init__(self) -> None:
        self.is_failing = False
        """Whether the sink failed repeatedly or stalled, or was disabled, with no success since."""
        self.failures = 0
        """Failures in a row."""
        self._last_failure_at = float("-inf")  # when it was counted
        # The first try since there is something to deliver, and since the last success:
        self._busy_since: float | None = None
        self._idle_since: float | None = None
        # The first failure or rejection that no success and no long idle time followed:
        self._first_failure_at: float | None = None
        self._paused_until = float("-inf")
        self._probe_at: float | None = None
        self._is_least_tried_turn = False
        # An extra probe for a new entry, which does not change the turn:
        self._has_extra_probe = False
        self._is_extra_probe_running = False

    def state(self, now: float) -> CircuitState:
        """Return the state for the metrics."""
        if not self.is_failing:
            return "closed"
        return "open" if now < self.allowed_at else "half-open"

    @property
    def is_probing(self) -> bool:
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
        return self.is_probing and (self._is_least_tried_turn or self._has_extra_probe)

    @property
    def becomes_failing_at(self) -> float | None:
        """When the sink becomes failing unless a try succeeds.

        None if it is failing already or there is nothing to deliver.
        """
        if self.is_failing or self._busy_since is None:
            return None
        return self._busy_since + STALL_TIMEOUT

    def record_start(self, now: float, *, is_excused: bool = False) -> None:
        """A try begins.

        ``is_excused``: the receiver refused this entry before, and accepted others since then. So
        the try tells nothing about the receiver.
        """
        if not is_excused:
            if self._idle_since is not None and now - self._idle_since > STALL_TIMEOUT:
                self._first_failure_at = None
            self._idle_since = None
            if self._busy_since is None:
                self._busy_since = now
        if not self._has_extra_probe:
            self._is_least_tried_turn = self.is_probing and not self._is_least_tried_turn
        self._is_extra_probe_running, self._has_extra_probe = self._has_extra_probe, False

    def record_idle(self, now: float) -> None:
        """There is nothing to deliver."""
        self._busy_since = None
        if self._idle_since is None:
            self._idle_since = now

    def forget_earlier_tries(self) -> None:
        """Begin the `STALL_TIMEOUT` anew: a success, an operator or the state file came between."""
        self._busy_since = self._first_failure_at = None

    def mark_failing_if_stalled(self, now: float) -> bool:
        """Return whether the sink has just become failing because no try succeeded in time."""
        if self.becomes_failing_at is None or now < self.becomes_failing_at:
            return False
        self.is_failing = True
        return True

    def record_failure(self, began: float, now: float) -> bool:
        """A try that began at ``began`` failed. Return whether the sink has just become failing."""
        if began > self._last_failure_at:
            self.failures, self._last_failure_at = self.failures + 1, now
        return self._update_failing(now, has_enough_failures=self.failures >= FAILURE_THRESHOLD)

    def record_rejection(self, now: float) -> bool:
        """The receiver rejected an entry for good. Return whether the sink just became failing.

        A rejection concerns the entry alone, so it is not a failure. But it is no success either.
        """
        return self._update_failing(now, has_enough_failures=False)

    def _update_failing(self, now: float, *, has_enough_failures: bool) -> bool:
        if self._first_failure_at is None:
            self._first_failure_at = now
        is_stalled = now - self._first_failure_at >= STALL_TIMEOUT
        if self.is_failing or not (has_enough_failures or is_stalled):
            return False
        self.is_failing = True
        return True

    def record_success(self) -> bool:
        """A try succeeded. Return whether the sink was failing until now."""
        was_failing, self.is_failing = self.is_failing, False
        self.failures, self._probe_at, self._has_extra_probe = 0, None, False
        self.forget_earlier_tries()
        return was_failing

    def schedule_probe(self, at: float | None) -> None:
        """Allow only probes from now on, the next one at this time.

        None: the receiver answers, so each entry is retried for itself.
        """
        if at is not None and self._probe_at is not None and self._is_extra_probe_running:
            at = min(at, self._probe_at)  # extra probes must not postpone the regular one
        self._probe_at = at

    def probe_now(self) -> None:
        """Allow one extra immediate probe: the scheduled one predates a new entry."""
        self._has_extra_probe = self.is_probing

    def pause_until(self, until: float) -> None:
        """Allow nothing before this time, because the receiver asked for it."""
        self._paused_until = max(self._paused_until, until)

    def resume(self, now: float) -> None:
        """Allow a try now, because an operator asked for it."""
        self.forget_earlier_tries()
        self._paused_until = float("-inf")
        self._probe_at = now if self.is_failing else None
