"""Whether a sink as a whole may be tried now. Moments are monotonic seconds. No I/O.

While a sink fails, one entry at a time is tried, as a probe. Every other probe is the oldest entry, and every other one
the entry that was tried least: a receiver that answers 500 to one event, and to that one always, holds back no other.
"""

from __future__ import annotations

FAILING = 3
"""So many failed tries in a row, and a sink is failing. Those that were under way together count as one."""


class Circuit:
    """How one sink fares. ``failures`` counts failed tries in a row."""

    def __init__(self) -> None:
        self.failing = False
        """Whether it failed several times in a row, or asked us to stop, and has not delivered since."""
        self.failures = 0
        self._failed_at = float("-inf")  # when the last failure came that counted
        self._probe_at: float | None = None
        self._turn = False  # of the entry that was tried least
        self._extra = False  # a probe is due that was not foreseen
        self._extra_under_way = False
        self._rest_until = float("-inf")

    @property
    def probing(self) -> bool:
        """Whether only one entry may be under way, the probe."""
        return self._probe_at is not None

    @property
    def opens(self) -> float:
        """Before that moment nothing may be tried."""
        return self._rest_until if self._probe_at is None or self._extra else max(self._rest_until, self._probe_at)

    @property
    def least_tried(self) -> bool:
        """Whether the entry that was tried least has the turn, rather than the oldest."""
        return self.probing and (self._turn or self._extra)

    def begun(self) -> None:
        """A try begins."""
        if not self._extra:
            self._turn = self.probing and not self._turn
        self._extra, self._extra_under_way = False, self._extra

    def failed(self, began: float, now: float) -> bool:
        """A try that began then has failed; returns whether that has just made the sink a failing one."""
        if began > self._failed_at:
            self.failures, self._failed_at = self.failures + 1, now
        if self.failing or self.failures < FAILING:
            return False
        self.failing = True
        return True

    def delivered(self) -> bool:
        """A try succeeded: everything may go; returns whether the sink was a failing one."""
        was, self.failing = self.failing, False
        self.failures, self._probe_at, self._extra = 0, None, False
        return was

    def probe(self, at: float | None) -> None:
        """From now on only probes, the next one at that moment; None: the far side answers, so each entry fares for itself."""
        if at is not None and self._probe_at is not None and self._extra_under_way:
            at = min(at, self._probe_at)  # however much comes, the oldest keeps its time
        self._probe_at = at

    def hasten(self) -> None:
        """Something new waits: it is tried at once, by a probe more. Those that were foreseen were fitted to what waited before."""
        self._extra = self.probing

    def rest(self, until: float) -> None:
        """The far side asked that nothing be sent until then."""
        self._rest_until = max(self._rest_until, until)

    def resume(self, now: float) -> None:
        """An operator wants it tried now."""
        self._rest_until = float("-inf")
        self._probe_at = now if self.failing else None
