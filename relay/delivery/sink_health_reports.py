"""Reports the health of a sink to the log, and to the other sinks as ``relay.*`` events.

Each fact is reported once, and again when it changes.
"""

from __future__ import annotations

import logging

from relay.events.build import ReportRelayEvent
from relay.outbox import Entry

MAX_CLOCK_SKEW = 30.0
"""Seconds between the clocks of receiver and relay from which it is reported.

Receivers refuse signatures with an old timestamp (docs/protocol.md#clocks-that-differ).
"""

_log = logging.getLogger(__name__)


class SinkHealthReporter:
    """Reports the health of one sink. ``waiting`` is the number of waiting entries."""

    def __init__(self, sink: str, report: ReportRelayEvent) -> None:
        self._sink = sink
        self._report = report
        self._dead_letters = 0
        self._is_skewed = False
        self._internal_errors: dict[int, int] = {}  # count by entry
        self._logged_error: str | None = None  # the type of the last internal error

    def report_failing(self, reason: str, waiting: int) -> None:
        """The sink is failing."""
        _log.warning("sink %s is failing: %s", self._sink, reason)
        self._report("relay.sink-failing", self._sink, reason, waiting)

    def report_recovered(self, waiting: int) -> None:
        """The sink delivers again."""
        _log.info("sink %s delivers again; %d entries waited", self._sink, waiting)
        self._report("relay.sink-recovered", self._sink, "it delivers again", waiting)

    def report_disabled(self, reason: str, waiting: int) -> None:
        """The receiver asked the relay to stop."""
        _log.error(
            "sink %s asked us to stop, it is disabled and keeps its entries: %s", self._sink, reason
        )
        self._report("relay.sink-disabled", self._sink, reason, waiting)

    def report_dead_letter(self, entry: Entry, reason: str) -> None:
        """An entry became a dead letter."""
        _log.warning(
            "sink %s: %s (entry %d) became a dead letter: %s",
            self._sink,
            entry.type,
            entry.id,
            reason,
        )
        self._dead_letters += 1
        self._report(
            "relay.dead-lettered",
            self._sink,
            f"{entry.type} (entry {entry.id}): {reason}",
            self._dead_letters,
        )

    def report_clock_skew(self, skew: float | None) -> None:
        """The receiver's clock is this many seconds ahead of ours; None if that is not known."""
        if skew is None or (abs(skew) > MAX_CLOCK_SKEW) is self._is_skewed:
            return
        self._is_skewed = not self._is_skewed
        if not self._is_skewed:
            _log.info("sink %s: its clock and ours agree again", self._sink)
            return
        direction = "ahead of" if skew > 0 else "behind"
        reason = (
            f"its clock is {abs(skew):.0f} s {direction} ours: "
            "check both, because signatures contain the time"
        )
        _log.warning("sink %s: %s", self._sink, reason)
        self._report("relay.clock-skewed", self._sink, reason, 1)

    def report_internal_error(self, entry: Entry, error: Exception) -> int:
        """The code of the sink raised an unexpected error. Return how often, for this entry."""
        error_type = type(error).__name__
        if error_type != self._logged_error:
            self._logged_error = error_type
            _log.error(
                "sink %s failed in its own code on %s", self._sink, entry.type, exc_info=error
            )
        count = self._internal_errors.get(entry.id, 0) + 1
        self._internal_errors[entry.id] = count
        return count

    def forget_entry(self, entry: Entry) -> None:
        """An entry is settled."""
        self._internal_errors.pop(entry.id, None)

    def record_success(self) -> None:
        """An entry was delivered.

        Once no waiting entry has had an internal error, the next one is logged again.
        """
        if not self._internal_errors:
            self._logged_error = None
