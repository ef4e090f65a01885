"""How often each address may fail, and each caller may call; and what is told of those who fail.

A *failed* call takes a token of its address, a good one a token of its principal. So behind a
proxy, where all callers have one address, a call with good credentials costs that address nothing,
and is let through where strangers have used it up
(docs/decisions.md#who-gives-way-and-who-is-let-through).
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import OrderedDict
from dataclasses import dataclass, field

from aiohttp import web

from relay.api.connections import Peer, connection_of
from relay.api.responses import Problem
from relay.clock import Clock
from relay.rate_limits import CALLER_BURST, CALLER_RATE, TokenBuckets
from relay.signature import MAX_AGE, MAX_AHEAD

_LOG_INTERVAL = 60.0
"""Seconds between two log lines about one address or RabbitMQ user."""
_MAX_LINES = 1024
"""Lines about all of them in that time."""
_MAX_CALLBACKS = 4096
_MAX_REASON_LENGTH = 300  # characters of a reason that may quote the message
_log = logging.getLogger(__name__)


class RejectionLog:
    """Counts every rejection, and logs them at most once a minute for each sender.

    They are calls without valid credentials, and AMQP messages that cannot be used; neither becomes
    an event. `now` is monotonic seconds. No reason contains a secret.
    """

    def __init__(self) -> None:
        self.count = 0
        self._senders = TokenBuckets(1 / _LOG_INTERVAL, 1)
        self._all = TokenBuckets(_MAX_LINES / _LOG_INTERVAL, _MAX_LINES)

    def record_unauthenticated_call(self, peer: Peer, reason: str, now: float) -> None:
        """Record a call without valid credentials."""
        text = f"a call from {peer.address} without good credentials was refused: {reason}"
        self._record(peer.network, text, now)

    def record_unusable_amqp_message(self, user: str | None, reason: str, now: float) -> None:
        """Record an AMQP message that cannot be used. The broker validated the user."""
        quoted = ascii(reason[:_MAX_REASON_LENGTH])
        text = f"a message from {user or 'nobody'!r} was dead-lettered: {quoted}"
        self._record(f"amqp {user}", text, now)

    def _record(self, sender: str, text: str, now: float) -> None:
        self.count += 1
        if not self._senders.take(sender, now) and not self._all.take("", now):
            _log.warning("%s", text)


@dataclass(slots=True, kw_only=True)
class CallRates:
    """The token buckets of addresses and of callers."""

    clock: Clock
    rejections: RejectionLog = field(default_factory=RejectionLog)
    addresses: TokenBuckets = field(default_factory=lambda: TokenBuckets(20, 100))
    callers: TokenBuckets = field(default_factory=lambda: TokenBuckets(CALLER_RATE, CALLER_BURST))
    _callbacks: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """The callbacks that were charged to their client, and until when a signature can be valid."""

    def refuse(self, request: web.Request, reason: str, problem: Problem) -> Problem:
        """Charge the address for a call without valid credentials, and log the reason.

        Return the problem, or a 429 if the address has no calls left.
        """
        if refused := self._charge_address(request):
            return refused
        peer = connection_of(request).peer
        self.rejections.record_unauthenticated_call(peer, reason, self.clock.monotonic())
        return problem

    def charge(self, principal: str) -> None:
        """Charge an identified caller for a call. Raises Problem 429."""
        if wait := self.callers.take(principal, self.clock.monotonic()):
            raise _too_many_calls(f"of {principal}", wait)

    def charge_callback(self, request: web.Request, principal: str, content: bytes) -> None:
        """Charge a client for its callback once, and the address for each copy: it may be stolen.

        Raises Problem 429.
        """
        digest = hashlib.sha256(content).hexdigest()
        callback = f"{principal} {request.headers['webhook-id']} {digest}"
        now = self.clock.monotonic()
        if now < self._callbacks.get(callback, now):
            if refused := self._charge_address(request):
                raise refused
            return
        self.charge(principal)
        self._callbacks[callback] = now + MAX_AGE + MAX_AHEAD
        self._callbacks.move_to_end(callback)
        if len(self._callbacks) > _MAX_CALLBACKS:
            self._callbacks.popitem(last=False)

    def _charge_address(self, request: web.Request) -> Problem | None:
        network = connection_of(request).peer.network
        if wait := self.addresses.take(network, self.clock.monotonic()):
            return _too_many_calls("from this address without valid credentials", wait)
        return None


def _too_many_calls(whose: str, wait: float) -> Problem:
    seconds = math.ceil(wait)
    text = f"too many calls {whose}; try again in {seconds} s"
    return Problem(429, text, headers={"Retry-After": str(seconds)})
