"""What the server remembers between calls: the attached relay, rate limits and counters.

Behind a proxy all callers have one address. So an address is charged for calls without valid
credentials only, and where it has no calls left, credentials are still checked: good ones are let
through, all else is 429 (docs/decisions/0030-who-gives-way.md).
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from aiohttp import web

from relay.api import ConfigurationReloader, Relay
from relay.api.auth.rejection_log import RejectionLog
from relay.api.schema.responses import Problem
from relay.api.server.connection import connection_of
from relay.api.server.limits import ServerLimits
from relay.clock import Clock
from relay.outbox import RecordedEvent
from relay.rate_limits import CALLER_BURST, CALLER_RATE, TokenBuckets
from relay.signature import MAX_AGE, MAX_AHEAD
from relay.telemetry.event_counts import EventCounts

if TYPE_CHECKING:  # a relay without sign-in saves the memory of the token library
    from relay.api.auth.sign_in import SignIn

_WAIT = web.RequestKey("wait", int)
"""Seconds until the address may call again. Only while nothing shows that the call is good."""


class LargeAnswerLimiter:
    """Bounds how many large answers are built or sent at once: slow readers hold few of them.

    Each answer is a page of bounded size. A problem is small, so it holds no slot while it is sent.
    """

    def __init__(self, total: int, per_caller: int, timeout: float) -> None:
        """``timeout``: the seconds that a call waits for a slot."""
        self._free = asyncio.Semaphore(total)
        self._per_caller = per_caller
        self._timeout = timeout
        self._by_caller: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def slot(self, caller: str) -> AsyncIterator[None]:
        """Hold a slot while the context lasts. Raises Problem 429 if none becomes free in time."""
        own = self._by_caller.get(caller)
        if own is None:
            own = self._by_caller[caller] = asyncio.Semaphore(self._per_caller)
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._timeout):
                    await stack.enter_async_context(own)
                    await stack.enter_async_context(self._free)
            except TimeoutError:
                raise Problem(
                    429,
                    "too many answers are being read at once; read them faster, or one by one",
                    headers={"Retry-After": "1"},
                ) from None
            yield


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
    rejections: RejectionLog = field(default_factory=RejectionLog)
    responses_by_status: Counter[int] = field(default_factory=Counter)
    event_counts: EventCounts = field(default_factory=EventCounts)
    stream_wakeups: dict[asyncio.Event, str] = field(default_factory=dict)
    """The principal of each open stream, by the event that makes the stream look for news."""
    address_buckets: TokenBuckets = field(default_factory=lambda: TokenBuckets(20, 100))
    slow_check_buckets: TokenBuckets = field(default_factory=lambda: TokenBuckets(200, 200))
    """For each address without calls left: credentials that take longer to check than a key."""
    caller_buckets: TokenBuckets = field(
        default_factory=lambda: TokenBuckets(CALLER_RATE, CALLER_BURST)
    )
    callback_buckets: TokenBuckets = field(
        default_factory=lambda: TokenBuckets(1 / (MAX_AGE + MAX_AHEAD), 1)
    )
    """Each callback for which its client was charged, while its signature can be valid."""
    large_answers: LargeAnswerLimiter = field(init=False)
    long_reads: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        limits = self.limits
        self.large_answers = LargeAnswerLimiter(
            limits.max_large_answers, limits.max_large_answers_of_caller, limits.send_timeout
        )
        self.long_reads = asyncio.Semaphore(limits.max_long_reads)

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
        """Let calls reach other parts over the same store. Nothing happens if none is attached."""
        if self.relay is not None:
            self.relay = relay

    def end_streams_of(self, is_over: Callable[[str], bool]) -> None:
        """End the streams of the principals for whom this is true. They can connect again."""
        for wakeup, principal in list(self.stream_wakeups.items()):
            if is_over(principal):
                del self.stream_wakeups[wakeup]
                wakeup.set()

    def charge_address_until_authenticated(self, request: web.Request) -> None:
        """Charge the caller's address until its credentials prove valid."""
        network = connection_of(request).peer.network
        wait = self.address_buckets.take(network, self.clock.monotonic())
        if wait:
            request[_WAIT] = math.ceil(wait)

    def charge_slow_check(self, request: web.Request) -> None:
        """Charge the address for credentials that take long to check. Raises Problem 429.

        It is free while the address has calls left, as it was charged for the call.
        """
        network = connection_of(request).peer.network
        if _WAIT in request and self.slow_check_buckets.take(network, self.clock.monotonic()):
            raise _address_limit_problem(request[_WAIT])

    def charge_caller(self, name: str, description: str) -> None:
        """Charge an identified caller for a call. Raises Problem 429."""
        wait = math.ceil(self.caller_buckets.take(name, self.clock.monotonic()))
        if wait:
            raise _rate_limit_problem(description, wait)

    def is_callback_charged(self, callback: str) -> bool:
        """Whether the client was charged for this callback already."""
        return not self.callback_buckets.has_token(callback, self.clock.monotonic())

    def remember_charged_callback(self, callback: str) -> None:
        """Remember that the client was charged for this callback."""
        self.callback_buckets.take(callback, self.clock.monotonic())

    def refund_address_charge(self, request: web.Request) -> None:
        """Refund the address: the caller's credentials are valid."""
        if request.pop(_WAIT, None) is None:
            network = connection_of(request).peer.network
            self.address_buckets.refund(network, self.clock.monotonic())

    def reject_credentials(self, request: web.Request, reason: str) -> None:
        """Count and log a call without valid credentials, unless its address has no calls left.

        The reason contains no secret.
        """
        if _WAIT not in request:
            peer = connection_of(request).peer
            self.rejections.record_unauthenticated_call(peer, reason, self.clock.monotonic())

    def problem_of_refusal(self, request: web.Request, problem: Problem) -> Problem:
        """Return the problem of a refused call: 429 if its address has no calls left."""
        wait = request.get(_WAIT)
        return problem if wait is None else _address_limit_problem(wait)

    def end_session(self, cookie: str) -> None:
        """End the session of this cookie, and the streams of ended sessions."""
        if self.sign_in is not None:
            self.sign_in.sessions.end(cookie)
            self._wake_streams()

    def _wake_streams(self, _recorded: Sequence[RecordedEvent] = ()) -> None:
        for wakeup in self.stream_wakeups:
            wakeup.set()


def _address_limit_problem(wait: int) -> Problem:
    return _rate_limit_problem("from this address without valid credentials", wait)


def _rate_limit_problem(description: str, wait: int) -> Problem:
    return Problem(
        429,
        f"too many calls {description}; try again in {wait} s",
        headers={"Retry-After": str(wait)},
    )
