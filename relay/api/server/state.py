"""What the server remembers between calls: the attached relay, rate limits and counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from aiohttp import web

from relay.api import Relay
from relay.api.auth.rate_limits import TokenBuckets
from relay.api.auth.rejection_log import RejectionLog
from relay.api.schema.responses import too_many_calls
from relay.api.server.connection import mark_authenticated, request_peer
from relay.api.server.limits import ServerLimits
from relay.api.server.open_streams import OpenStreams
from relay.clock import Clock


@dataclass(slots=True, kw_only=True)
class ServerState:
    """The state of one server. Addresses are charged only for calls without valid credentials."""

    clock: Clock
    limits: ServerLimits
    relay: Relay | None = None
    """None while the relay starts or stops."""
    rejections: RejectionLog = field(default_factory=RejectionLog)
    responses_by_status: Counter[int] = field(default_factory=Counter)
    streams: OpenStreams = field(default_factory=OpenStreams)
    address_buckets: TokenBuckets = field(default_factory=lambda: TokenBuckets(20, 100))
    caller_buckets: TokenBuckets = field(default_factory=lambda: TokenBuckets(10, 50))

    def attach(self, relay: Relay) -> None:
        """Let calls reach this relay."""
        self.relay = relay
        self.streams.attach(relay.store)

    def detach(self) -> None:
        """Answer calls with 503 and end the streams."""
        self.relay = None
        self.streams.detach()

    def charge_address(self, request: web.Request) -> None:
        """Charge the caller's address until its credentials prove valid. Raises Problem 429."""
        wait = self.address_buckets.take(request_peer(request).network, self.clock.monotonic())
        if wait:
            raise too_many_calls("from this address without valid credentials", wait)

    def charge_caller(self, name: str, description: str) -> None:
        """Charge an identified caller for a call. Raises Problem 429."""
        wait = self.caller_buckets.take(name, self.clock.monotonic())
        if wait:
            raise too_many_calls(description, wait)

    def accept_credentials(self, request: web.Request) -> None:
        """Refund the address and protect the connection: the caller's credentials are valid."""
        self.address_buckets.refund(request_peer(request).network, self.clock.monotonic())
        mark_authenticated(request)

    def reject_credentials(self, request: web.Request, reason: str) -> None:
        """Count and log a call without valid credentials. The reason contains no secret."""
        self.rejections.unauthenticated_call(request_peer(request), reason, self.clock.monotonic())
