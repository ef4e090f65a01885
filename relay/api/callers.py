"""Finds out who makes a call: a program or a person, as a `Caller` with rights; limits how often.

A key or token counts first, then the cookie of a session, then the certificate. A call whose
credentials are wrong is refused: other credentials are not tried after that. The user of the local
socket needs none. A reload makes new `Callers`, and compares them with the old ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import math
import re
import ssl
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from aiohttp import web

from relay.api.connections import connection_of
from relay.api.responses import Problem, too_many
from relay.api.sessions import SESSION, SESSION_COOKIE, Session, check_sent_by_own_page
from relay.api.settings import ApiSettings, Client
from relay.approvals.request import Caller, Rights
from relay.clock import CALLER_BURST, CALLER_RATE, Clock, TokenBuckets
from relay.files import user_name
from relay.logs import ThrottledLog
from relay.signature import MAX_AGE, MAX_AHEAD, SignatureRefused, verify

if TYPE_CHECKING:
    from relay.api.entra import TokenVerifier
    from relay.api.sign_in import SignIn

Access = Literal[
    "public", "key", "key or public", "key or loopback", "key, loopback or public", "signature"
]
"""How the server identifies the caller.

public: not at all; a handler may check a proof in the request. key: by a bearer key, the cookie of
a session, a certificate or the local socket. key or public: the same, but no caller is refused: the
others are anonymous, without rights. key or loopback: as key, and programs on this machine need
none. key, loopback or public: the same, and no caller is refused. signature: by a Standard Webhooks
signature.
"""
NEVER_REFUSED: tuple[Access, ...] = ("public", "key or public", "key, loopback or public")
"""Callers without good credentials are anonymous there."""
ANONYMOUS = Caller("anonymous", "http", Rights(frozenset()))
"""The caller of routes that need no credentials."""
_ALL_RIGHTS = Rights(frozenset({"read", "approve", "hold", "operate"}))
_BEARER = {"WWW-Authenticate": 'Bearer realm="imds-relay"'}
_log = logging.getLogger(__name__)
_HOST = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::[0-9]*)?")
_PROXY_HEADER = re.compile(
    r"forwarded|via|x-real-ip|x-client-ip|x-cluster-client-ip|true-client-ip|cf-connecting-ip"
    r"|(x-forwarded|x-envoy-|x-original-).*",
    re.IGNORECASE,
)
"""Headers that proxies add. X-Forwarded-* and X-Envoy-* have many more."""


class NotAuthenticated(Exception):
    """Missing or wrong credentials.

    The text is for the log, and contains no part of the credentials. `problem` is what the caller
    gets in place of the usual 401, which says nothing.
    """

    def __init__(self, reason: str, problem: Problem | None = None) -> None:
        super().__init__(reason)
        self.problem = problem


class Callers:
    """Identifies callers by the credentials of the configured clients."""

    def __init__(self, settings: ApiSettings, clock: Clock, earlier: Callers | None = None) -> None:
        """``earlier``: those of before a reload."""
        self.settings = settings
        """What is in force; a reload makes other callers."""
        self._clock = clock
        self._clients_by_name = {client.name: client for client in settings.clients}
        self._clients_by_san = {_san_key(each.san): each for each in settings.clients if each.san}
        self._tokens: TokenVerifier | None = None
        self.sign_in: SignIn | None = None
        """None if nobody can sign in on the pages."""
        self.entra = oidc, public_url = settings.oidc, settings.public_url
        if oidc is None:
            return
        # Imported here: the library takes ten megabytes, and only relays with api.oidc have it.
        from relay.api.entra import TokenVerifier  # noqa: PLC0415
        from relay.api.sign_in import SignIn  # noqa: PLC0415

        self._tokens = TokenVerifier(oidc, clock)
        if earlier is not None and earlier.entra == self.entra:
            self.sign_in = earlier.sign_in  # with its sessions
        elif oidc.sign_in is not None and public_url is not None:
            # Without sessions: rights that were taken away must not live on in them.
            self.sign_in = SignIn(oidc, public_url, self._tokens, clock)

    async def identify(
        self, access: Access, request: web.Request, content: bytes, rates: CallRates
    ) -> Caller:
        """Return the caller; charge it, or its address if the call fails. Raises Problem."""
        peer = connection_of(request).peer
        if access == "public":
            return ANONYMOUS
        if peer.uid is not None and access != "signature":
            user = await asyncio.to_thread(user_name, peer.uid)
            return Caller(f"local:{user}", "local", _ALL_RIGHTS)
        allows_loopback = access in ("key or loopback", "key, loopback or public")
        if allows_loopback and peer.is_loopback_tcp and _is_direct_loopback_call(request):
            return Caller("anonymous", "http", Rights(frozenset({"read"})))
        try:
            if access == "signature":
                caller = self._caller_of_signature(request, content)
                rates.charge_callback(request, caller.principal, content)
            else:
                caller = await self._caller_of_credentials(request)
                rates.charge(caller.principal)
        except NotAuthenticated as error:
            refused = error.problem or _unauthorized(access)
            # A certificate that names no client is normal for a health check, and is no attempt.
            # A wrong key counts everywhere, so that nobody can guess keys where nobody is refused.
            if access not in NEVER_REFUSED or "Authorization" in request.headers:
                refused = rates.refuse(request, str(error), refused)
        except Problem as too_many_calls:
            refused = too_many_calls
        else:
            return caller
        if access in NEVER_REFUSED:
            return ANONYMOUS
        raise refused

    def _caller_of_signature(self, request: web.Request, content: bytes) -> Caller:
        client = self._clients_by_name.get(request.match_info["client"])
        client_secrets = () if client is None else client.reveal_list("secrets")
        if client is None or not client_secrets:
            raise NotAuthenticated("no client with secrets has this name")
        try:
            verify(client_secrets, request.headers, content, self._clock.now())
        except SignatureRefused as error:
            raise NotAuthenticated(str(error)) from None
        return caller_for_client(client, "callback")

    async def _caller_of_credentials(self, request: web.Request) -> Caller:
        authorization = request.headers.getall("Authorization", [])
        # A key counts instead of a cookie, because a page has added it. A certificate does not: who
        # signed in does not want to be somebody else when the session is over.
        if self.sign_in is not None and not authorization:
            cookie = SESSION_COOKIE.read(request)
            if cookie is not None:
                request[SESSION] = session = _session_of_own_page(request, cookie, self.sign_in)
                return session.caller
        certificate = request.get_extra_info("peercert")  # the TLS handshake has verified it
        if not authorization and certificate and self._clients_by_san:
            return self._caller_of_certificate(certificate)
        if len(authorization) != 1:
            raise NotAuthenticated(
                f"Authorization: expected it once, got it {len(authorization)} times"
            )
        scheme, _, key = authorization[0].partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise NotAuthenticated("Authorization: expected Bearer and a key")
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        # Always all of them, each in constant time.
        owners = [
            client
            for client in self.settings.clients
            for client_digest in client.key_digests()
            if hmac.compare_digest(client_digest, digest)
        ]
        if owners:
            return caller_for_client(owners[0], "http")
        if self._tokens is None or key.count(".") != 2:  # of a token: RFC 7515, section 3.1
            raise NotAuthenticated("the bearer key is no client's")
        return await self._tokens.caller_from_token(key)

    def _caller_of_certificate(self, certificate: Mapping[str, Any]) -> Caller:
        # The handshake checked the time. The connection, or its TLS session, can outlast it.
        if self._clock.now().timestamp() > ssl.cert_time_to_seconds(certificate["notAfter"]):
            raise NotAuthenticated("the certificate has expired since the handshake")
        names = {_comparable_name(*name) for name in certificate.get("subjectAltName", ())}
        clients = [client for name, client in self._clients_by_san.items() if name in names]
        if len(clients) != 1:
            raise NotAuthenticated(
                f"the certificate: expected the name of one client, got those of {len(clients)}"
            )
        return Caller(f"mtls:{clients[0].san}", "http", clients[0].rights)

    def what_makes(self, principal: str) -> object:
        """Return the settings that make somebody this principal, to compare with other ones."""
        kind, _, name = principal.partition(":")
        if kind == "client":
            return self._clients_by_name.get(name)
        if kind == "mtls":
            return self._clients_by_san.get(_san_key(name)), self.settings.tls
        return self.settings.oidc if kind == "entra" else None


def caller_for_client(client: Client, channel: str) -> Caller:
    """Return the client as a caller through a channel: http, callback or amqp."""
    return Caller(f"client:{client.name}", channel, client.rights)


def _session_of_own_page(request: web.Request, cookie: str, sign_in: SignIn) -> Session:
    try:
        check_sent_by_own_page(request, sign_in.origin)
    except Problem as problem:
        raise NotAuthenticated(problem.detail, problem) from None
    session = sign_in.sessions.find(cookie)
    if session is None:
        ended = Problem(401, "the session has ended: sign in again", headers=_BEARER)
        raise NotAuthenticated("the session has ended, or there was none", ended)
    return session


def _unauthorized(access: Access) -> Problem:
    if access == "signature":
        text = "expected a body signed as Standard Webhooks with this client's secret"
        return Problem(401, text, headers={"WWW-Authenticate": "Signature"})
    text = "expected Authorization: Bearer and the key of a client"
    return Problem(401, text, headers=_BEARER)


def _is_direct_loopback_call(request: web.Request) -> bool:
    """Whether the call names a loopback host and came through no proxy.

    A proxy on this machine serves callers elsewhere. A page of another site can let its own name
    point to this machine, and its visitor's browser then names that host.
    """
    hosts = [_HOST.fullmatch(value) for value in request.headers.getall("Host", [])]
    if len(hosts) != 1 or hosts[0] is None:
        return False
    ipv6, name = hosts[0].groups("")
    try:
        is_loopback = name.lower() == "localhost" or ipaddress.ip_address(ipv6 or name).is_loopback
    except ValueError:  # another name
        return False
    return is_loopback and not any(map(_PROXY_HEADER.fullmatch, request.headers))


def _san_key(san: str) -> tuple[str, str]:
    """Return the comparable name of a client's ``san``: kinds are called as by the ssl module."""
    if ":" in san:
        return _comparable_name("URI", san)
    return _comparable_name("email" if "@" in san else "DNS", san)


def _comparable_name(kind: str, value: str) -> tuple[str, str]:
    """Return a name such that equal ones belong to the same client.

    A CA checks each kind in its own way, so a name of one kind is none of another. The path of a
    URI has a case (RFC 3986, section 6.2.2.1), and two SPIFFE IDs can differ by it.
    """
    return kind, value if kind == "URI" else value.lower()


@dataclass(slots=True, kw_only=True)
class CallRates:
    """How often each address may fail, and each caller may call: token buckets.

    A *failed* call takes a token of its address, a good one a token of its principal. So behind a
    proxy, where all callers have one address, a call with good credentials costs that address
    nothing, and is let through where strangers have used it up
    (docs/decisions.md#who-gives-way-and-who-is-let-through).
    """

    clock: Clock
    rejections: ThrottledLog = field(default_factory=lambda: ThrottledLog(_log))
    """Counts and logs the calls, and the messages over RabbitMQ, that were rejected."""
    addresses: TokenBuckets = field(default_factory=lambda: TokenBuckets(20, 100))
    callers: TokenBuckets = field(default_factory=lambda: TokenBuckets(CALLER_RATE, CALLER_BURST))
    _callbacks: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """The callbacks that were charged to their client, and until when a signature can be valid."""

    def refuse(self, request: web.Request, reason: str, problem: Problem) -> Problem:
        """Charge the address for a call without credentials; return the problem, or a 429."""
        if refused := self._charge_address(request):
            return refused
        peer, now = connection_of(request).peer, self.clock.monotonic()
        text = f"a call from {peer.address} without good credentials was refused: {reason}"
        self.rejections.warning(peer.network, text, now)
        return problem

    def charge(self, principal: str) -> None:
        """Charge an identified caller for a call. Raises Problem 429."""
        if wait := self.callers.take(principal, self.clock.monotonic()):
            raise _too_many_calls(f"of {principal}", wait)

    def charge_callback(self, request: web.Request, principal: str, content: bytes) -> None:
        """Charge a client once, and the address for each copy: it may be stolen. Raises Problem."""
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
        if len(self._callbacks) > 4096:
            self._callbacks.popitem(last=False)

    def _charge_address(self, request: web.Request) -> Problem | None:
        network = connection_of(request).peer.network
        if wait := self.addresses.take(network, self.clock.monotonic()):
            return _too_many_calls("from this address without valid credentials", wait)
        return None


def _too_many_calls(whose: str, wait: float) -> Problem:
    seconds = math.ceil(wait)
    return too_many(f"too many calls {whose}; try again in {seconds} s", seconds)
