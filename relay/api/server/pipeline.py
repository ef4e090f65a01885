"""Runs the checks of a call in order, then the handler of its route.

The server makes a handler for aiohttp from each route here. docs/api.md#order-of-checks says the
order to callers: 413 body over 64 KiB, 415 wrong content type, 401 credentials, or 429 after too
many failures of this address, 429 too many calls of this caller, 403 missing right, 429 too many
large answers. Then the handler reads its parameters and body: 400 malformed, 422 invalid field, 404
unknown resource.
`relay.approvals.gate` makes the other checks of a decision. The server
listens before its role has started the relay: a handler that uses the relay earlier fails with 503.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from relay.api.auth.authentication import (
    ANONYMOUS,
    LOOPBACK_READER,
    Authenticator,
    NotAuthenticated,
    local_socket_caller,
)
from relay.api.auth.sessions import SESSION_COOKIE, Session, check_sent_by_own_page
from relay.api.schema.html_headers_and_problems import problem_page
from relay.api.schema.responses import Problem, make_json_http_response
from relay.api.schema.route import NEVER_REFUSED, SESSION, Call, Route
from relay.api.server.connections import connection_of, send_response
from relay.api.server.limits import MAX_BODY_BYTES
from relay.api.server.state import ServerState
from relay.approvals.request import Caller

_HOST = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::[0-9]*)?")
# Proxies add headers like these. X-Forwarded-* and X-Envoy-* have many more.
_PROXY_HEADERS = (
    "forwarded",
    "via",
    "x-real-ip",
    "x-client-ip",
    "x-cluster-client-ip",
    "true-client-ip",
    "cf-connecting-ip",
)
_PROXY_HEADER_PREFIXES = ("x-forwarded", "x-envoy-", "x-original-")


@dataclass(slots=True)
class RequestPipeline:
    """Makes handlers for aiohttp, which check a call and run the handler of its route."""

    authenticator: Authenticator
    """A reload replaces it."""
    state: ServerState

    def make_aiohttp_handler(
        self, route: Route
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return the route as a handler for aiohttp."""

        async def handle(request: web.Request) -> web.StreamResponse:
            connection = connection_of(request)
            try:
                content = await _read_content(request, self.state.limits.body_timeout)
                _check_content_type(route, request)
                caller = await self._identify_caller(route, request, content)
                connection.in_good_call = caller is not ANONYMOUS
                return await self._run(route, request, caller, content)
            except Problem as problem:
                if route.shows_problems:
                    return problem_page(problem)
                raise
            finally:
                connection.in_good_call = False

        return handle

    async def _run(
        self, route: Route, request: web.Request, caller: Caller, content: bytes
    ) -> web.StreamResponse:
        if route.needs is not None and route.needs not in caller.rights.can:
            raise Problem(
                403, f"{caller.principal} may not {route.needs}: it is not in the rights (can)"
            )
        call = Call(request=request, server=self.state, caller=caller, content=content, route=route)
        if not route.is_large:
            return await _answer(route, call)
        async with self.state.large_answers.slot(_concurrency_key(caller, request)):
            response = await _answer(route, call)
            return await send_response(request, response, self.state.limits.send_timeout)

    async def _identify_caller(self, route: Route, request: web.Request, content: bytes) -> Caller:
        """Return the caller as `Route.access` asks. Raises Problem 429, 401 or 403."""
        peer = connection_of(request).peer
        if route.access in ("public", "handler"):
            return ANONYMOUS
        if peer.uid is not None and route.access != "signature":
            return local_socket_caller(await asyncio.to_thread(_user_name_from_uid, peer.uid))
        allows_loopback = route.access in ("key or loopback", "key, loopback or public")
        if allows_loopback and peer.is_loopback_tcp and _is_direct_loopback_call(request):
            return LOOPBACK_READER
        if route.access not in NEVER_REFUSED:
            return await self._authenticate_with_rate_limit(route, request, content)
        if not self._has_credentials(request):
            return ANONYMOUS
        try:  # it counts towards the limits, so that nobody can guess keys here
            return await self._authenticate_with_rate_limit(route, request, content)
        except Problem:
            return ANONYMOUS

    async def _authenticate_with_rate_limit(
        self, route: Route, request: web.Request, content: bytes
    ) -> Caller:
        """Return the caller that the credentials prove, and charge it. Raises Problem.

        429: no calls left. 401: bad credentials. 403: another site's page uses a session.
        """
        rates = self.state.rates
        try:
            caller = await self._caller_from_credentials(route, request, content)
        except NotAuthenticated as error:
            has_session = self._session_cookie_unless_bearer_key(request) is not None
            problem = _unauthorized_problem(route, has_session=has_session)
            # A certificate that names no client is normal for a health check, and is no attempt.
            if route.access in NEVER_REFUSED and "Authorization" not in request.headers:
                raise problem from None
            raise rates.refuse(request, str(error), problem) from None
        if route.access == "signature":
            rates.charge_callback(request, caller.principal, content)
        else:
            rates.charge(caller.principal)
        return caller

    async def _caller_from_credentials(
        self, route: Route, request: web.Request, content: bytes
    ) -> Caller:
        """Return the caller that the credentials prove. Raises Problem, NotAuthenticated."""
        if route.access == "signature":
            client = request.match_info["client"]
            return self.authenticator.caller_from_signature(client, request.headers, content)
        authorization = request.headers.getall("Authorization", [])
        cookie = self._session_cookie_unless_bearer_key(request)
        if cookie is not None:
            request[SESSION] = session = self._require_session_of_cookie(request, cookie)
            return session.caller
        certificate = request.get_extra_info("peercert")  # the TLS handshake has verified it
        return await self.authenticator.caller_from_bearer_or_certificate(
            authorization, certificate
        )

    def _has_credentials(self, request: web.Request) -> bool:
        """Whether the caller gives a key, a token, a certificate or the cookie of a session."""
        has_certificate = bool(request.get_extra_info("peercert"))
        has_session = self._session_cookie_unless_bearer_key(request) is not None
        return "Authorization" in request.headers or has_certificate or has_session

    def _session_cookie_unless_bearer_key(self, request: web.Request) -> str | None:
        """Return the cookie of a session if it says who calls; else None.

        A key counts instead, because a page has added it. A certificate does not: who signed in
        does not want to be somebody else when the session is over.
        """
        if self.state.sign_in is None or "Authorization" in request.headers:
            return None
        return SESSION_COOKIE.read_value_from_request(request)

    def _require_session_of_cookie(self, request: web.Request, cookie: str) -> Session:
        """Return the session of a call. Raises Problem 403, NotAuthenticated."""
        sign_in = self.state.sign_in
        assert sign_in is not None  # noqa: S101  # `_session_cookie_unless_bearer_key`
        try:
            check_sent_by_own_page(request, sign_in.origin)
        except Problem as problem:
            raise self.state.rates.refuse(request, problem.detail, problem) from None
        session = sign_in.sessions.find(cookie)
        if session is None:
            raise NotAuthenticated("the session has ended, or there was none")
        return session


async def _answer(route: Route, call: Call) -> web.StreamResponse:
    result = await route.handler(call)
    if isinstance(result, web.StreamResponse):
        return result
    return make_json_http_response(route.status, result)


def _is_direct_loopback_call(request: web.Request) -> bool:
    """Whether the call names a loopback host and came through no proxy.

    A proxy on this machine serves callers elsewhere. A page of another site can let its own name
    point to this machine, and its visitor's browser then names that host.
    """
    hosts = [_HOST.fullmatch(value) for value in request.headers.getall("Host", [])]
    if len(hosts) != 1 or hosts[0] is None or not _is_loopback_host(*hosts[0].groups("")):
        return False
    names = [name.lower() for name in request.headers]
    return not any(
        name in _PROXY_HEADERS or name.startswith(_PROXY_HEADER_PREFIXES) for name in names
    )


def _is_loopback_host(ipv6: str, name: str) -> bool:
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(ipv6 or name).is_loopback
    except ValueError:  # another name
        return False


def check_content_length(request: web.Request) -> None:
    """Refuse a body that is announced as too long before reading it. Raises Problem 413."""
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise _content_too_long_problem()


async def _read_content(request: web.Request, seconds: float) -> bytes:
    """Return the body. Raises Problem 413, 408, 400 or 417, ConnectionResetError."""
    expectation = request.headers.get("Expect", "")
    if expectation and expectation.lower() != "100-continue":
        raise Problem(417, "Expect: only 100-continue is understood", closes=True)
    if expectation and request.version >= HttpVersion11 and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        raise Problem(408, f"the body did not arrive within {seconds:g} s", closes=True) from None
    except web.HTTPRequestEntityTooLarge:
        raise _content_too_long_problem() from None
    except (web.RequestPayloadError, HttpProcessingError):
        raise Problem(400, "the body's framing is malformed", closes=True) from None
    except OSError as error:
        raise ConnectionResetError("the caller has disconnected") from error


def _content_too_long_problem() -> Problem:
    return Problem(413, f"expected a body of at most {MAX_BODY_BYTES} bytes", closes=True)


def _check_content_type(route: Route, request: web.Request) -> None:
    # All values count: a proxy that unpacks bodies may read another one than we would.
    encodings = request.headers.getall("Content-Encoding", [])
    if any(encoding.strip().lower() != "identity" for encoding in encodings):
        raise Problem(
            415, "expected a body without Content-Encoding", headers={"Accept-Encoding": "identity"}
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


def _unauthorized_problem(route: Route, *, has_session: bool) -> Problem:
    if route.access == "signature":
        return Problem(
            401,
            "expected a body signed as Standard Webhooks with this client's secret",
            headers={"WWW-Authenticate": "Signature"},
        )
    return Problem(
        401,
        "the session has ended: sign in again"
        if has_session
        else "expected Authorization: Bearer and the key of a client",
        headers={"WWW-Authenticate": 'Bearer realm="imds-relay"'},
    )


def _concurrency_key(caller: Caller, request: web.Request) -> str:
    """Who reads the answer: the principal, or the address of an anonymous caller."""
    return connection_of(request).peer.network if caller is ANONYMOUS else caller.principal


def _user_name_from_uid(uid: int) -> str:
    import pwd  # noqa: PLC0415  # missing on Windows, like local sockets with known users

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
