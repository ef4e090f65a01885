"""What others hear of a sink: the log, and the other sinks as ``relay.*``. Each thing once, and again when it changes."""

from __future__ import annotations

import logging
from collections.abc import Callable

from relay.outbox import Entry

MAX_CLOCK_SKEW = 30.0
"""Seconds that a receiver's clock may differ from ours before it is told of: signatures bear the time, and are refused for it."""

_log = logging.getLogger(__name__)

ReportRelayEvent = Callable[[str, str | None, str, int], None]
"""Tells a ``relay.*`` event: its name, the sink it is about, the reason, how many it stands for."""


class SinkHealthReporter:
    """Of one sink."""

    def __init__(self, sink: str, say: ReportRelayEvent) -> None:
        self._sink = sink
        self._say = say
        self._dead = 0
        self._skewed = False
        self._own_errors: dict[int, int] = {}  # by entry
        self._own_error: str | None = None  # what was logged last

    def report_failing(self, reason: str, waiting: int) -> None:
        """It failed several times in a row."""
        _log.warning("sink %s is failing: %s", self._sink, reason)
        self._say("relay.sink-failing", self._sink, reason, waiting)

    def report_recovered(self, waiting: int) -> None:
        """It delivers again."""
        _log.info("sink %s delivers again; %d entries waited", self._sink, waiting)
        self._say("relay.sink-recovered", self._sink, "it delivers again", waiting)

    def report_disabled(self, reason: str, waiting: int) -> None:
        """The far side asked us to stop."""
        _log.error(
            "sink %s asked us to stop, it is disabled and keeps its entries: %s", self._sink, reason
        )
        self._say("relay.sink-disabled", self._sink, reason, waiting)

    def report_dead_letter(self, entry: Entry, reason: str) -> None:
        """An entry was given up."""
        _log.warning(
            "sink %s: %s (entry %d) became a dead letter: %s",
            self._sink,
            entry.type,
            entry.id,
            reason,
        )
        self._dead += 1
        self._say(
            "relay.dead-lettered",
            self._sink,
            f"{entry.type} (entry {entry.id}): {reason}",
            self._dead,
        )

    def report_clock_skew(self, skew: float | None) -> None:
        """The far side's clock is so many seconds ahead of ours, if that is known."""
        if skew is None or (abs(skew) > MAX_CLOCK_SKEW) is self._skewed:
            return
        self._skewed = not self._skewed
        if not self._skewed:
            _log.info("sink %s: its clock and ours agree again", self._sink)
            return
        reason = f"its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} ours: check both, as signatures bear the time"
        _log.warning("sink %s: %s", self._sink, reason)
        self._say("relay.clock-skewed", self._sink, reason, 1)

    def report_internal_error(self, entry: Entry, error: Exception) -> int:
        """The sink's own code failed on an entry; returns how often it has on that one."""
        named = type(error).__name__
        if named != self._own_error:
            self._own_error = named
            _log.error(
                "sink %s failed in its own code on %s", self._sink, entry.type, exc_info=error
            )
        count = self._own_errors[entry.id] = self._own_errors.get(entry.id, 0) + 1
        return count

    def forget_entry(self, entry: Entry) -> None:
        """An entry is over, one way or the other."""
        self._own_errors.pop(entry.id, None)

    def record_success(self) -> None:
        """Something got through: where its own code has failed on none that waits, the next such error is news again."""
        if not self._own_errors:
            self._own_error = None
