"""What the server remembers between calls: the attached relay, open streams and counters.

The roles of the relay attach their parts once they run, and detach them before they stop. The
request pipeline and the routes find here what they need beside the call.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from relay.api import ConfigurationReloader, Relay
from relay.api.auth.rejection_log import RejectionLog
from relay.api.server.call_charges import CallCharges
from relay.api.server.limits import LargeAnswerLimiter, ServerLimits
from relay.clock import Clock
from relay.outbox import RecordedEvent
from relay.telemetry.event_counts import EventCounts

if TYPE_CHECKING:  # a relay without sign-in saves the memory of the token library
    from relay.api.auth.sign_in import SignIn


@dataclass(slots=True, kw_only=True)
class ServerState:
    """The state of one server."""

    clock: Clock
    limits: ServerLimits
    relay: Relay | None = None
    """None while the relay starts or stops."""
    sign_in: SignIn | None = None
    """None if nobody can sign in on the pages."""
    reloader: ConfigurationReloader | None = None
    """None if this process was not started to reload."""
    tls_context: Callable[[], ssl.SSLContext] | None = None
    """Returns the context for new connections; None without TLS."""
    charges: CallCharges = field(init=False)
    """The rate limits of addresses and callers, from which each call is charged."""
    responses_by_status: Counter[int] = field(default_factory=Counter)
    event_counts: EventCounts = field(default_factory=EventCounts)
    stream_wakeups: dict[asyncio.Event, str] = field(default_factory=dict)
    """The principal of each open stream, by the event that wakes the stream.

    A stream that wakes sends what is new. It ends if it has no entry here any more, if no relay is
    attached, or if its session has ended (`relay.api.routes.stream`).
    """
    large_answers: LargeAnswerLimiter = field(init=False)
    """Bounds the large answers that are sent at a time."""
    long_reads: asyncio.Semaphore = field(init=False)
    """Bounds the reads of the state file that can take long, such as pages of a long history."""

    def __post_init__(self) -> None:
        self.charges = CallCharges(clock=self.clock)
        limits = self.limits
        self.large_answers = LargeAnswerLimiter(
            limits.max_large_answers, limits.max_large_answers_of_caller, limits.send_timeout
        )
        self.long_reads = asyncio.Semaphore(limits.max_long_reads)

    @property
    def rejections(self) -> RejectionLog:
        """Counts and logs the calls, and the messages over RabbitMQ, that were rejected."""
        return self.charges.rejections

    def attach(self, relay: Relay) -> None:
        """Let calls reach this relay."""
        self.relay = relay
        relay.store.listeners.recorded += [self._wake_streams, self.event_counts.count]

    def detach(self) -> None:
        """Answer calls with 503 and end the streams."""
        if self.relay is not None:
            self.relay.store.listeners.recorded.remove(self._wake_streams)
            self.relay.store.listeners.recorded.remove(self.event_counts.count)
        self.relay = None
        self._wake_streams()

    def replace_relay(self, relay: Relay) -> None:
        """Let calls reach the parts that a reload has made, over the same store.

        Nothing happens if no relay is attached.
        """
        if self.relay is not None:
            self.relay = relay

    def end_streams_of(self, is_over: Callable[[str], bool]) -> None:
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
