"""What the server remembers between calls: the attached relay, open streams, and its limits.

The roles of the relay attach their parts once they run, and detach them before they stop. Until
then a call that needs the relay is answered 503.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from relay.api import ConfigurationReloader, Relay
from relay.api.connections import ServerLimits
from relay.api.rates import CallRates, RejectionLog
from relay.api.responses import Problem
from relay.clock import Clock
from relay.store import RecordedEvent
from relay.telemetry.event_counts import EventCounts

if TYPE_CHECKING:  # a relay without sign-in saves the memory of the token library
    from relay.api.callers import Callers
    from relay.api.sign_in import SignIn


@dataclass(slots=True, kw_only=True)
class ServerState:
    """The state of one server."""

    clock: Clock
    limits: ServerLimits
    callers: Callers
    """Says who calls. A reload replaces it."""
    relay: Relay | None = None
    """None while the relay starts or stops."""
    sign_in: SignIn | None = None
    """None if nobody can sign in on the pages."""
    reloader: ConfigurationReloader | None = None
    """None if this process was not started to reload."""
    rates: CallRates = field(init=False)
    responses_by_status: Counter[int] = field(default_factory=Counter)
    event_counts: EventCounts = field(default_factory=EventCounts)
    stream_wakeups: dict[asyncio.Event, str] = field(default_factory=dict)
    """The principal of each open stream, by the event that wakes the stream.

    A stream that wakes sends what is new. It ends if it has no entry here any more, if no relay is
    attached, or if its session has ended (`relay.api.routes.stream`).
    """
    long_reads: asyncio.Semaphore = field(init=False)
    """Bounds the reads of the state file that can take long, such as pages of a long history."""
    _large_answers: WeakValueDictionary[str, asyncio.Semaphore] = field(
        default_factory=WeakValueDictionary
    )

    def __post_init__(self) -> None:
        self.rates = CallRates(clock=self.clock)
        self.long_reads = asyncio.Semaphore(self.limits.max_long_reads)

    @property
    def rejection_log(self) -> RejectionLog:
        """Counts and logs the calls, and the messages over RabbitMQ, that were rejected."""
        return self.rates.rejections

    @asynccontextmanager
    async def large_answer(self, caller: str) -> AsyncIterator[None]:
        """Let a caller have a page while the context lasts. Raises Problem 429 if it has many."""
        free = self._large_answers.get(caller)
        if free is None:
            free = asyncio.Semaphore(self.limits.max_large_answers)
            self._large_answers[caller] = free
        try:
            async with asyncio.timeout(self.limits.send_timeout):
                await free.acquire()
        except TimeoutError:
            raise Problem(
                429,
                "too many answers are being read at once; read them faster, or one by one",
                headers={"Retry-After": "1"},
            ) from None
        try:
            yield
        finally:
            free.release()

    def attach_relay(self, relay: Relay) -> None:
        """Let calls reach this relay."""
        self.relay = relay
        relay.store.listeners.recorded += [
            self._wake_streams,
            self.event_counts.count_recorded_events,
        ]

    def detach_relay(self) -> None:
        """Answer calls with 503 and end the streams."""
        if self.relay is not None:
            self.relay.store.listeners.recorded.remove(self._wake_streams)
            self.relay.store.listeners.recorded.remove(self.event_counts.count_recorded_events)
        self.relay = None
        self._wake_streams()

    def replace_relay(self, relay: Relay) -> None:
        """Let calls reach the parts that a reload has made, over the same store.

        Nothing happens if no relay is attached.
        """
        if self.relay is not None:
            self.relay = relay

    def end_streams(self, is_over: Callable[[str], bool]) -> None:
        """End the streams of the principals for whom this is true. They can connect again."""
        for wakeup, principal in list(self.stream_wakeups.items()):
            if is_over(principal):
                del self.stream_wakeups[wakeup]
                wakeup.set()

    def end_session(self, cookie: str) -> None:
        """End the session of this cookie, and the streams of ended sessions."""
        if self.sign_in is not None:
            self.sign_in.sessions.end(cookie)
            self._wake_streams()

    def _wake_streams(self, _recorded: Sequence[RecordedEvent] = ()) -> None:
        for wakeup in self.stream_wakeups:
            wakeup.set()
