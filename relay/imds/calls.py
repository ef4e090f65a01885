"""When a call to the metadata service may be made: the budget of calls, and the wait for a retry.

`relay.imds.client` makes each call in a place of one `CallBudget`. It repeats nothing: the poller
and the reader of instance metadata call again after `retry_delay`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from relay.clock import Clock
from relay.net import exponential_backoff

MAX_CALLS = 2
"""Calls in one window. Azure allows five a second for each VM, shared by all its programs.

See docs/protocol.md#five-calls-a-second.
"""
CALL_WINDOW = 1.05
"""Seconds: one second, and a margin for the clock of the service and for the network."""
MAX_BACKOFF = 5.0
"""Seconds before jitter. It is short because a Preempt can give ten seconds of notice.

See docs/protocol.md#notice.
"""
MAX_RETRY_AFTER = 60.0
"""Seconds: a longer Retry-After is cut to this."""


class CallBudget:
    """Allows at most `MAX_CALLS` calls in any `CALL_WINDOW`. A call counts from when it was sent.

    Each of so many places is a moment from which on it may be used. Who has the place of a call
    keeps it until the call is sent, which can take long, or until it is certain that it is not.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._places: asyncio.PriorityQueue[float] = asyncio.PriorityQueue()
        for _ in range(MAX_CALLS):
            self._places.put_nowait(-math.inf)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Callable[[float], None]]:
        """Wait for a place, in order of arrival. Tell the result when the call was sent."""
        free_at = await self._places.get()
        sent_at: float | None = None

        def mark_sent(moment: float) -> None:
            nonlocal sent_at
            sent_at = moment
            self._places.put_nowait(moment + CALL_WINDOW)

        try:
            while (delay := free_at - self._clock.monotonic()) > 0:
                await self._clock.sleep(delay)
            yield mark_sent
        finally:
            if sent_at is None:
                self._places.put_nowait(free_at)


def retry_delay(failures: int, retry_after: float | None, interval: float, jitter: float) -> float:
    """Return the seconds to wait after this many failed calls in a row.

    The pause starts at ``interval`` and doubles up to `MAX_BACKOFF`, or stays at a longer interval.
    ``jitter`` (0 to 1) adds up to a quarter. ``retry_after`` (seconds, from the service) can only
    lengthen the pause, up to `MAX_RETRY_AFTER`.
    """
    backoff = exponential_backoff(failures, first=interval, maximum=max(interval, MAX_BACKOFF))
    return max(backoff, min(retry_after or 0.0, MAX_RETRY_AFTER)) + jitter * backoff / 4
