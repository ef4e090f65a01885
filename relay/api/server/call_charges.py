"""Limits the rates of calls: says who is charged for a call, and refuses who has no calls left.

Behind a proxy all callers have one address. So an address is charged for calls without valid
credentials only, and where it has no calls left, credentials are still checked: good ones are let
through, all else is 429 (docs/decisions/0030-who-gives-way.md). A call goes through these steps:

1. `charge_address_until_authenticated`, before its credentials are checked.
2. `charge_slow_check`, before a check that takes longer than comparing a key.
3. Bad credentials: `reject_credentials` logs them, `problem_of_refusal` returns 401 or 429.
4. Good credentials: `refund_address_charge`, then `charge_caller` with the principal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from aiohttp import web

from relay.api.auth.rejection_log import RejectionLog
from relay.api.schema.responses import Problem
from relay.api.server.connection import connection_of
from relay.clock import Clock
from relay.rate_limits import CALLER_BURST, CALLER_RATE, TokenBuckets
from relay.signature import MAX_AGE, MAX_AHEAD

_WAIT = web.RequestKey("wait", int)
"""Seconds until the address may call again. Only while nothing shows that the call is good."""


@dataclass(slots=True, kw_only=True)
class CallCharges:
    """The calls that each address and each caller has left."""

    clock: Clock
    rejections: RejectionLog = field(default_factory=RejectionLog)
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

    def charge_address_until_authenticated(self, request: web.Request) -> None:
        """Charge the caller's address until its credentials prove valid."""
        wait = self.address_buckets.take(_network(request), self.clock.monotonic())
        if wait:
            request[_WAIT] = math.ceil(wait)

    def charge_slow_check(self, request: web.Request) -> None:
        """Charge the address for credentials that take long to check. Raises Problem 429.

        It is free while the address has calls left, as it was charged for the call.
        """
        now = self.clock.monotonic()
        if _WAIT in request and self.slow_check_buckets.take(_network(request), now):
            raise _address_limit_problem(request[_WAIT])

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

    def refund_address_charge(self, request: web.Request) -> None:
        """Refund the address: the caller's credentials are valid."""
        if request.pop(_WAIT, None) is None:
            self.address_buckets.refund(_network(request), self.clock.monotonic())

    def charge_caller(self, name: str, description: str) -> None:
        """Charge an identified caller for a call. Raises Problem 429, which has the description."""
        wait = math.ceil(self.caller_buckets.take(name, self.clock.monotonic()))
        if wait:
            raise _rate_limit_problem(description, wait)

    def is_callback_charged(self, callback: str) -> bool:
        """Whether the client was charged for this callback already."""
        return not self.callback_buckets.has_token(callback, self.clock.monotonic())

    def remember_charged_callback(self, callback: str) -> None:
        """Remember that the client was charged for this callback."""
        self.callback_buckets.take(callback, self.clock.monotonic())


def _network(request: web.Request) -> str:
    """Return the key of the caller's address: `relay.api.server.connection.Peer.network`."""
    return connection_of(request).peer.network


def _address_limit_problem(wait: int) -> Problem:
    return _rate_limit_problem("from this address without valid credentials", wait)


def _rate_limit_problem(description: str, wait: int) -> Problem:
    return Problem(
        429,
        f"too many calls {description}; try again in {wait} s",
        headers={"Retry-After": str(wait)},
    )
