"""What the server remembers between calls: the attached relay, rate limits and counters."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from aiohttp import web

from relay.api import Relay
from relay.api.auth.rejection_log import RejectionLog
from relay.api.schema.responses import Problem
from relay.api.server.connection import connection_of
from relay.api.server.limits import ServerLimits
from relay.clock import Clock
from relay.outbox import RecordedEvent
from relay.rate_limits import CALLER_BURST, CALLER_RATE, TokenBuckets


@dataclass(slots=True, kw_only=True)
class ServerState:
    """The state of one server. Addresses are charged only for calls without valid credentials."""

    clock: Clock
    limits: ServerLimits
    relay: Relay | None = None
    """None while the relay starts or stops."""
    rejections: RejectionLog = field(default_factory=RejectionLog)
    responses_by_status: Counter[int] = field(default_factory=Counter)
    stream_wakeups: dict[asyncio.Event, str] = field(default_factory=dict)
    """The principal of each open stream, by the event that makes the stream look for news."""
    address_buckets: TokenBuckets = field(default_factory=lambda: TokenBuckets(20, 100))
    caller_buckets: TokenBuckets = field(
        default_factory=lambda: TokenBuckets(CALLER_RATE, CALLER_BURST)
    )

    def attach(self, relay: Relay) -> None:
        """Let calls reach this relay."""
        self.relay = relay
        relay.store.listeners.recorded.append(self._wake_streams)

    def detach(self) -> None:
        """Answer calls with 503 and end the streams."""
        if self.relay is not None:
            self.relay.store.listeners.recorded.remove(self._wake_streams)
        self.relay = None
        self._wake_streams()

    def charge_address(self, request: web.Request) -> None:
        """Charge the caller's address until its credentials prove valid. Raises Problem 429."""
        network = connection_of(request).peer.network
        description = "from this address without valid credentials"
        self._charge(self.address_buckets, network, description)

    def charge_caller(self, name: str, description: str) -> None:
        """Charge an identified caller for a call. Raises Problem 429."""
        self._charge(self.caller_buckets, name, description)

    def accept_credentials(self, request: web.Request) -> None:
        """Refund the address: the caller's credentials are valid."""
        network = connection_of(request).peer.network
        self.address_buckets.refund(network, self.clock.monotonic())

    def reject_credentials(self, request: web.Request, reason: str) -> None:
        """Count and log a call without valid credentials. The reason contains no secret."""
        peer = connection_of(request).peer
        self.rejections.unauthenticated_call(peer, reason, self.clock.monotonic())

    def _charge(self, buckets: TokenBuckets, key: str, description: str) -> None:
        wait = math.ceil(buckets.take(key, self.clock.monotonic()))
        if wait:
            raise Problem(
                429,
                f"too many calls {description}; try again in {wait} s",
                headers={"Retry-After": str(wait)},
            )

    def _wake_streams(self, _recorded: Sequence[RecordedEvent] = ()) -> None:
        for wakeup in self.stream_wakeups:
            wakeup.set()
