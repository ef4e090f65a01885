"""The order in which a call is checked (docs/api.md#order-of-checks), as one list of steps.

413 over 64 KiB, 415 wrong or encoded content, 429 too many from this address, 401, 429 too many of this client, 400
malformed, 422 a wrong field; then 404, and 403 for want of rights. Of an approval, the gate checks the rest: a repeat,
404, 409, 403, 503. While no relay is attached, 503 stands where its first look into the store would be.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from relay.api import Relay
from relay.api.auth.authentication import (
    ANONYMOUS,
    LOOPBACK_READER,
    Authenticator,
    NotAuthenticated,
    local_caller,
)
from relay.api.auth.rate_limits import TokenBuckets
from relay.api.auth.rejection_log import RejectionLog
from relay.api.schema.problems import Problem, too_many
from relay.api.schema.route import Call, Route
from relay.api.server.connection import Peer, mark_authenticated, request_peer
from relay.approvals.request import Caller, InvalidField, MalformedBody
from relay.clock import Clock

MAX_BODY_BYTES = 64 * 1024
"""Bytes of a body; one that is longer is refused."""
BODY_TIMEOUT = 10.0
"""Seconds that a body may take."""
_FORWARDED = ("Forwarded", "X-Forwarded-For", "Via")


@dataclass(slots=True)
class RequestPipeline:
    """What the checks know from one call to the next. Addresses count only calls that showed no good credentials."""

    clients: Authenticator
    clock: Clock
    attached: Relay | None = None
    rejections: RejectionLog = field(default_factory=RejectionLog)
    responses_by_status: Counter[int] = field(default_factory=Counter)
    """Answers so far, by status."""
    by_address: TokenBuckets = field(default_factory=lambda: TokenBuckets(rate=20, burst=100))
    by_client: TokenBuckets = field(default_factory=lambda: TokenBuckets(rate=10, burst=50))

    def handler(self, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The route as aiohttp calls it."""

        async def handle(request: web.Request) -> web.StreamResponse:
            body = await read_body(request)
            _check_content(route, request)
            caller = await self._caller(route, request, body)
            call = Call(request, caller, body, _content(route, request, body), self.attached)
            if route.lookup is not None:
                call = replace(call, found=await route.lookup(call))
            if route.needs is not None and route.needs not in caller.rights.can:
                raise Problem(
                    403, f"{caller.principal} may not {route.needs}: it is not in the rights (can)"
                )
            return await route.handle(call)

        return handle

    async def _caller(self, route: Route, request: web.Request, body: bytes) -> Caller:
        """Who calls. Raises Problem 429, 401, 429."""
        peer = request_peer(request)
        if route.access == "anyone":
            return ANONYMOUS
        if route.access == "proof":
            if wait := self.by_address.take(peer.network, self.clock.monotonic()):
                raise too_many("too many calls from this address that prove nothing", wait)
            return ANONYMOUS
        if route.access == "key or loopback" and _is_neighbour(request, peer):
            return LOOPBACK_READER
        if peer.uid is not None and route.access != "signature":
            return local_caller(await asyncio.to_thread(_user, peer.uid))
        network, now = peer.network, self.clock.monotonic()
        if wait := self.by_address.take(network, now):
            raise too_many("too many calls from this address without good credentials", wait)
        try:
            if route.access == "signature":
                caller = self.clients.by_signature(
                    request.match_info["client"], request.headers, body
                )
            else:
                certificate = request.get_extra_info(
                    "peercert"
                )  # verified, or there would be no connection
                caller = await self.clients.by_bearer(
                    request.headers.getall("Authorization", []), certificate
                )
        except NotAuthenticated as error:
            self.rejections.unauthenticated_call(peer, str(error), now)
            raise _unknown(route) from None
        self.by_address.refund(network, now)
        mark_authenticated(request)
        if wait := self.by_client.take(caller.principal, now):
            raise too_many(f"too many calls of {caller.principal}", wait)
        return caller


def check_length(request: web.Request) -> None:
    """Refuse a body that is announced to be too long before any of it is read. Raises Problem 413."""
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise _too_long()


async def read_body(request: web.Request) -> bytes:
    """The body, at most 64 KiB within ten seconds. Raises Problem 413, 408, 400, 417, ConnectionResetError."""
    expected = request.headers.get("Expect", "")
    if expected and expected.lower() != "100-continue":
        raise Problem(417, "Expect: only 100-continue is understood", closes=True)
    if expected and request.version >= HttpVersion11 and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            return await request.read()
    except TimeoutError:
        raise Problem(
            408, f"the body did not come within {BODY_TIMEOUT:g} s", closes=True
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_long() from None
    except (web.RequestPayloadError, HttpProcessingError):
        raise Problem(400, "the body's framing is malformed", closes=True) from None
    except OSError as error:
        raise ConnectionResetError("the caller has gone") from error


def _too_long() -> Problem:
    return Problem(413, f"expected a body of at most {MAX_BODY_BYTES} bytes", closes=True)


def _check_content(route: Route, request: web.Request) -> None:
    # Each that there is: of several, what unpacks a body may go by another than who looks at the first.
    if any(
        one.strip().lower() != "identity" for one in request.headers.getall("Content-Encoding", [])
    ):
        raise Problem(
            415,
            "expected a body as it is, without Content-Encoding",
            headers={"Accept-Encoding": "identity"},
        )
    if route.body is None:
        return
    charset = (request.charset or "utf-8").lower()
    if request.content_type != "application/json" or charset not in ("utf-8", "utf8"):
        raise Problem(
            415,
            "expected Content-Type: application/json, in UTF-8",
            headers={"Accept": "application/json"},
        )


def _content(route: Route, request: web.Request, body: bytes) -> object:
    try:
        return route.parse(request, body) if route.parse is not None else None
    except MalformedBody as error:
        raise Problem(400, str(error)) from None
    except InvalidField as error:
        raise Problem(422, str(error), field=error.field) from None


def _unknown(route: Route) -> Problem:
    if route.access == "signature":
        return Problem(
            401,
            "expected a body signed as Standard Webhooks with this client's secret",
            headers={"WWW-Authenticate": "Signature"},
        )
    return Problem(
        401,
        "expected Authorization: Bearer and the key of a client",
        headers={"WWW-Authenticate": 'Bearer realm="imds-relay"'},
    )


def _is_neighbour(request: web.Request, peer: Peer) -> bool:
    """Whether the call comes from this machine, and not through a proxy on it."""
    return (peer.uid is not None or peer.is_loopback) and not any(
        name in request.headers for name in _FORWARDED
    )


def _user(uid: int) -> str:
    import pwd  # noqa: PLC0415  # POSIX alone has it, and local sockets whose users are known

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
