"""The retry plan as it holds for one sink, by its clock and with chance."""

from __future__ import annotations

import random
from collections.abc import Iterable
from datetime import datetime

from relay.clock import Clock
from relay.delivery.retry import (
    DeadLetter,
    DisableSink,
    RetryAfter,
    RetryDecision,
    plan_retry,
)
from relay.errors import Deferred
from relay.outbox import Entry
from relay.sinks import Sink


class RetryPolicy:
    """What becomes of entries that a sink could not deliver."""

    def __init__(self, sink: Sink, clock: Clock) -> None:
        self._sink = sink
        self._clock = clock

    def of(self, entry: Entry, error: Deferred, now: datetime) -> RetryDecision:
        """What becomes of an entry after a try that has just failed."""
        return plan_retry(
            error.failure,
            tries=entry.attempts + 1,
            now=now,
            recorded=entry.recorded,
            not_before=entry.not_before,
            give_up_after=self._sink.give_up_after,
            longest_pause=self._sink.longest_pause,
            asked=error.after,
            chance=random.random(),  # noqa: S311  # jitter
        )

    def next_probe(
        self, entry: Entry, waiting: Iterable[Entry], failures: int, now: datetime
    ) -> float:
        """Seconds until the sink as a whole is tried again: as the most pressing of what waits demands.

        ``entry`` has just failed, as the last of so many ``failures`` in a row.
        """
        ahead = [
            one.not_before for one in waiting if one.not_before is not None and one.not_before > now
        ]
        pressing = entry.not_before is not None and entry.not_before > now
        verdict = plan_retry(
            "transient",
            tries=min(failures, entry.attempts + 1) if pressing else failures,
            now=now,
            recorded=now,
            not_before=min(ahead, default=None),
            give_up_after=float("inf"),
            longest_pause=self._sink.longest_pause,
            chance=random.random(),  # noqa: S311  # jitter
        )
        return verdict.delay if isinstance(verdict, RetryAfter) else 0.0
