"""Whether a sink as a whole may be tried now. Moments are monotonic seconds. No I/O.

While a sink fails, one entry at a time is tried, as a probe. Every other probe is the oldest entry, and every other one
the entry that was tried least: a receiver that answers 500 to one event, and to that one always, holds back no other.
"""

from __future__ import annotations

FAILURE_THRESHOLD = 3
"""So many failed tries in a row, and a sink is failing. Those that were under way together count as one."""
STALL_TIMEOUT = 60.0
"""Seconds in which no try succeeded though there was something to deliver: the sink is failing then, however few tries there were."""


class CircuitBreaker:
    """How one sink fares. ``failures`` counts failed tries in a row."""

    def __init__(self) -> None:
        self.is_failing = False
        """Whether it failed several times in a row or for a minute, or asked us to stop, and has not delivered since."""
        self.failures = 0
        self._failed_at = float("-inf")  # when the last failure came that counted
        self._tried_since: float | None = None  # the first try since the last success
        self._busy_since: float | None = (
            None  # the same, or the first try since nothing was left to deliver
        )
        self._probe_at: float | None = None
        self._turn = False  # of the entry that was tried least
        self._extra = False  # a probe is due that was not foreseen
        self._extra_under_way = False
        self._rest_until = float("-inf")

    @property
    def is_probing(self) -> bool:
        """Whether only one entry may be under way, the probe."""
        return self._probe_at is not None

    @property
    def allowed_at(self) -> float:
        """Before that moment nothing may be tried."""
        return (
            self._rest_until
            if self._probe_at is None or self._extra
            else max(self._rest_until, self._probe_at)
        )

    @property
    def prefers_least_tried(self) -> bool:
        """Whether the entry that was tried least has the turn, rather than the oldest."""
        return self.is_probing and (self._turn or self._extra)

    def record_start(self, now: float) -> None:
        """A try begins."""
        self._tried_since = now if self._tried_since is None else self._tried_since
        self._busy_since = now if self._busy_since is None else self._busy_since
        if not self._extra:
            self._turn = self.is_probing and not self._turn
        self._extra, self._extra_under_way = False, self._extra

    def record_idle(self) -> None:
        """Nothing is left to deliver, or nothing can be."""
        self._busy_since = None

    @property
    def stalls_at(self) -> float | None:
        """When it will be a failing one unless a try succeeds until then; None where it already is, or there is nothing to deliver."""
        return None if self.is_failing or self._busy_since is None else self._busy_since + STALL_TIMEOUT

    def check_stalled(self, now: float) -> bool:
        """Time has passed; returns whether that has just made the sink a failing one."""
        if self.stalls_at is None or now < self.stalls_at:
            return False
        self.is_failing = True
        return True

    def record_failure(self, began: float, now: float) -> bool:
        """A try that began then has failed; returns whether that has just made the sink a failing one."""
        if began > self._failed_at:
            self.failures, self._failed_at = self.failures + 1, now
        return self._has_failed(now, enough=self.failures >= FAILURE_THRESHOLD)

    def record_rejection(self, now: float) -> bool:
        """The far side has refused an entry for good; returns whether that has just made the sink a failing one.

        That is about the entry alone, and does not count as a failed try. But nothing else has got through either.
        """
        return self._has_failed(now, enough=False)

    def _has_failed(self, now: float, *, enough: bool) -> bool:
        fruitless = self._tried_since is not None and now - self._tried_since >= STALL_TIMEOUT
        if self.is_failing or not (enough or fruitless):
            return False
        self.is_failing = True
        return True

    def record_success(self) -> bool:
        """A try succeeded: everything may go; returns whether the sink was a failing one."""
        was, self.is_failing = self.is_failing, False
        self.failures, self._probe_at, self._extra = 0, None, False
        self._tried_since = self._busy_since = None
        return was

    def schedule_probe(self, at: float | None) -> None:
        """From now on only probes, the next one at that moment; None: the far side answers, so each entry fares for itself."""
        if at is not None and self._probe_at is not None and self._extra_under_way:
            at = min(at, self._probe_at)  # however much comes, the oldest keeps its time
        self._probe_at = at

    def probe_now(self) -> None:
        """Something new waits: it is tried at once, by a probe more. Those that were foreseen were fitted to what waited before."""
        self._extra = self.is_probing

    def pause_until(self, until: float) -> None:
        """The far side asked that nothing be sent until then."""
        self._rest_until = max(self._rest_until, until)

    def resume(self, now: float) -> None:
        """An operator wants it tried now."""
        self._busy_since = None
        self._rest_until = float("-inf")
        self._probe_at = now if self.is_failing else None
