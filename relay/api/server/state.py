"""What the server remembers between calls: the attached relay, open streams, and its callers.

`ServerState` is what the request pipeline and the routes find beside the call. The roles of the
relay attach their parts once they run, and detach them before they stop. `CallRates` limits rates.
`RejectionLog` counts calls without valid credentials, and AMQP messages that cannot be used.
Neither becomes an event.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from relay.api import ConfigurationReloader, Relay
from relay.api.schema.responses import Problem
from relay.api.server.connections import Peer, connection_of
from relay.api.server.limits import LargeAnswerLimiter, ServerLimits
from relay.clock import Clock
from relay.rate_limits import CALLER_BURST, CALLER_RATE, TokenBuckets
from relay.signature import MAX_AGE, MAX_AHEAD
from relay.store import RecordedEvent
from relay.telemetry.event_counts import EventCounts

if TYPE_CHECKING:  # a relay without sign-in saves the memory of the token library
    from relay.api.auth.sign_in import SignIn

LOG_INTERVAL = 60.0
"""Seconds between two log lines about one address or RabbitMQ user."""
_MAX_SENDERS = 1024
_MAX_REASON_LENGTH = 300  # characters of a reason that may quote the message
_log = logging.getLogger(__name__)


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
    rates: CallRates = field(init=False)
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
        self.rates = CallRates(clock=self.clock)
        limits = self.limits
        self.large_answers = LargeAnswerLimiter(
            limits.max_large_answers, limits.max_large_answers_of_caller, limits.send_timeout
        )
        self.long_reads = asyncio.Semaphore(limits.max_long_reads)

    @property
    def rejection_log(self) -> RejectionLog:
        """Counts and logs the calls, and the messages over RabbitMQ, that were rejected."""
        return self.rates.rejections

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

    def end_streams_of_principals(self, is_over: Callable[[str], bool]) -> None:
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


@dataclass(slots=True)
class _SenderLogState:
    logged_at: float
    unlogged: int = 0


class RejectionLog:
    """Counts every rejection, and logs them at most once a minute for each sender.

    Senders beyond the memory's limit are counted but not logged.
    """

    def __init__(self) -> None:
        self.count = 0
        self._senders: OrderedDict[str, _SenderLogState] = (
            OrderedDict()
        )  # the longest unlogged first

    def record_unauthenticated_call(self, peer: Peer, reason: str, now: float) -> None:
        """Record a call without valid credentials. `now` is monotonic seconds.

        The reason contains no secret.
        """
        self._record(
            peer.network,
            f"a call from {peer.address} without good credentials was refused: {reason}",
            now,
        )

    def record_unusable_amqp_message(self, user: str | None, reason: str, now: float) -> None:
        """Record an AMQP message that cannot be used. The broker validated the user."""
        self._record(
            f"amqp {user}",
            f"a message from {user or 'nobody'!r} was dead-lettered: "
            f"{reason[:_MAX_REASON_LENGTH]!a}",
            now,
        )

    def _record(self, key: str, description: str, now: float) -> None:
        self.count += 1
        sender = self._senders.get(key)
        if sender is not None and now - sender.logged_at < LOG_INTERVAL:
            sender.unlogged += 1
            return
        self._forget_old_senders(now)
        if len(self._senders) >= _MAX_SENDERS:
            return
        self._senders[key] = _SenderLogState(now)
        repeated = sender.unlogged if sender is not None else 0
        suffix = f" ({repeated} more in the minute before)" if repeated else ""
        _log.warning("%s%s", description, suffix)

    def _forget_old_senders(self, now: float) -> None:
        while self._senders:
            oldest = next(iter(self._senders.values()))
            if now - oldest.logged_at < LOG_INTERVAL:
                return
            self._senders.popitem(last=False)


@dataclass(slots=True, kw_only=True)
class CallRates:
    """How often each address may fail, and each caller may call.

    Behind a proxy all callers have one address. So a call with good credentials costs its address
    nothing, and is let through where strangers have used it up
    (docs/decisions.md#who-gives-way-and-who-is-let-through).
    """

    clock: Clock
    rejections: RejectionLog = field(default_factory=RejectionLog)
    addresses: TokenBuckets = field(default_factory=lambda: TokenBuckets(20, 100))
    callers: TokenBuckets = field(default_factory=lambda: TokenBuckets(CALLER_RATE, CALLER_BURST))

    callbacks: TokenBuckets = field(
        default_factory=lambda: TokenBuckets(1 / (MAX_AGE + MAX_AHEAD), 1)
    )
    """Each callback that was charged to its client, while its signature can be valid."""

    def refuse(self, request: web.Request, reason: str, problem: Problem) -> Problem:
        """Charge the address for a call without valid credentials, and log the reason.

        Return the problem, or a 429 if the address has no calls left. The reason contains no
        secret.
        """
        peer, now = connection_of(request).peer, self.clock.monotonic()
        wait = math.ceil(self.addresses.take(peer.network, now))
        if wait:
            return _too_many_calls("from this address without valid credentials", wait)
        self.rejections.record_unauthenticated_call(peer, reason, now)
        return problem

    def charge(self, principal: str) -> None:
        """Charge an identified caller for a call. Raises Problem 429."""
        wait = math.ceil(self.callers.take(principal, self.clock.monotonic()))
        if wait:
            raise _too_many_calls(f"of {principal}", wait)

    def charge_callback(self, request: web.Request, principal: str, content: bytes) -> None:
        """Charge a client for its callback once, and the address for each copy: it may be stolen.

        Raises Problem 429.
        """
        digest = hashlib.sha256(content).hexdigest()
        callback = f"{principal} {request.headers['webhook-id']} {digest}"
        now = self.clock.monotonic()
        if not self.callbacks.take(callback, now):
            try:
                self.charge(principal)
            except Problem:
                self.callbacks.refund(callback, now)
                raise
        elif wait := math.ceil(self.addresses.take(connection_of(request).peer.network, now)):
            raise _too_many_calls("from this address without valid credentials", wait)


def _too_many_calls(description: str, wait: int) -> Problem:
    return Problem(
        429,
        f"too many calls {description}; try again in {wait} s",
        headers={"Retry-After": str(wait)},
    )
