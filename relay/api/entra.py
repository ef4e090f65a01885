"""What Entra ID says: verifies its tokens (JWT), and fetches its keys and endpoints.

Sources: https://learn.microsoft.com/entra/identity-platform/access-tokens (claims, validation),
access-token-claims-reference and id-token-claims-reference there, RFC 7519, RFC 8725 (known
attacks), OpenID Connect Discovery 1.0, section 4. Nothing in a token or in an answer of a browser
chooses the algorithm, the issuer, the URL of its keys or where a code and the client secret go: the
configuration does.

An ID token of this relay's own application has the same issuer, audience, tenant and roles as an
access token. It tells an application who signed in, and gives nobody access: it names no
application that uses it (`_require_access_token`). It counts once, for the sign-in that asked for
it: it has that sign-in's nonce. Imported only where `api.oidc` is configured: the extra `entra` has
the library.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from yarl import URL

from relay.api.callers import NotAuthenticated
from relay.api.settings import GUID, OidcSettings, check_https_or_loopback_url
from relay.approvals.request import Caller
from relay.clock import Clock
from relay.errors import Deferred
from relay.net.http import Method, Request, open_session, send

T = TypeVar("T")
CLOCK_TOLERANCE = 60.0
"""Seconds by which the clocks of issuer and relay may differ."""
REFETCH_INTERVAL = 300.0
"""Seconds between two fetches. Tokens with unknown key ids cause no more fetches than that."""
RETRY_INTERVAL = 30.0
"""Seconds after a failed fetch until the next. Otherwise a short failure at the start of the relay
would lock everybody out for minutes."""
MAX_AGE = 86400.0
"""Seconds until keys and endpoints are fetched again, so that a withdrawn key expires."""
_TIMEOUT = 10.0
_MAX_NAME_LENGTH = 100
_LATEST = 2**40  # seconds since 1970
_log = logging.getLogger(__name__)


class EntraUnavailable(Exception):
    """Entra ID gave no usable answer. The text contains no secret."""


async def ask(url: str, form: Mapping[str, str] | None = None) -> tuple[int, Mapping[str, Any]]:
    """Return the status and the JSON object of an answer. Raises EntraUnavailable.

    A form is posted; no log contains its values. Of a long body only the start is read, which is no
    JSON.
    """
    headers, body, secrets = {"Accept": "application/json"}, b"", tuple((form or {}).values())
    if form is not None:
        headers["Content-Type"] = "application/x-www-form-urlencoded"
        body = urlencode(form).encode()
    request = Request(url=URL(url), headers=headers, body=body, secrets=secrets)
    try:
        async with open_session() as session:
            method: Method = "GET" if form is None else "POST"
            response = await send(session, method, request, seconds=_TIMEOUT)
    except Deferred as error:
        raise EntraUnavailable(error.reason) from None
    document = response.json()
    if not isinstance(document, dict):
        raise EntraUnavailable(f"expected a JSON object, got none (status {response.status})")
    return response.status, document


class Kept(Generic[T]):
    """What was fetched, for a day. After a failed fetch the old one stays for some minutes more."""

    def __init__(self, fetch: Callable[[], Awaitable[T]], clock: Clock) -> None:
        self._fetch = fetch
        self._clock = clock
        self._value: T | None = None
        self._fetched_at = self._next_fetch_at = -math.inf
        self._failure = ""
        self._lock = asyncio.Lock()

    async def get(self, suffices: Callable[[T], bool] = lambda _: True) -> T:
        """Return what was fetched, fetched again if it does not suffice. Raises EntraUnavailable.

        A server that hangs delays only callers for whom nothing at hand suffices, and the caller
        for whom an old one is fetched again.
        """
        is_usable = self._value is not None and suffices(self._value)
        if not is_usable or (self._age() >= MAX_AGE and not self._lock.locked()):
            async with self._lock:
                if self._clock.monotonic() >= self._next_fetch_at:  # else somebody just did
                    await self._refetch()
        if self._value is None or self._age() >= MAX_AGE + 2 * REFETCH_INTERVAL:
            raise EntraUnavailable(self._failure)
        return self._value

    def _age(self) -> float:
        return self._clock.monotonic() - self._fetched_at

    async def _refetch(self) -> None:
        now = self._clock.monotonic()
        self._next_fetch_at = now + RETRY_INTERVAL
        try:
            self._value = await self._fetch()
        except EntraUnavailable as error:
            self._failure = str(error)
            _log.warning("api.oidc: %s", error)
            return
        self._fetched_at = now
        self._next_fetch_at = now + REFETCH_INTERVAL


async def fetch_keys(settings: OidcSettings) -> dict[str, RSAPublicKey]:
    """Return the issuer's strong RSA keys for signatures by id. Raises EntraUnavailable."""
    failed = "the keys could not be fetched from keys_url"
    try:
        status, document = await ask(settings.keys_url)
    except EntraUnavailable as error:
        raise EntraUnavailable(f"{failed}: {error}") from None
    if status != HTTPStatus.OK:
        raise EntraUnavailable(f"{failed}: expected 200, got {status}")
    try:
        found = jwt.PyJWKSet.from_dict(dict(document))
    except (jwt.PyJWTError, ValueError, TypeError):
        raise EntraUnavailable(f"{failed}: expected a JSON Web Key Set (RFC 7517)") from None
    keys = {
        key.key_id: key.key
        for key in found
        if isinstance(key.key_id, str)
        and key.public_key_use in (None, "sig")
        and isinstance(key.key, RSAPublicKey)
        and key.key.key_size >= 2048  # RFC 7518, section 3.3
    }
    if not keys:
        raise EntraUnavailable(f"{failed}: expected RSA keys for signatures, got none")
    return keys


async def fetch_endpoints(settings: OidcSettings) -> tuple[URL, str]:
    """Return where people sign in, and where codes are exchanged. Raises EntraUnavailable."""
    status, document = await ask(settings.issuer.rstrip("/") + "/.well-known/openid-configuration")
    if status != HTTPStatus.OK:
        raise EntraUnavailable(f"expected the issuer's endpoints, got status {status}")
    if document.get("issuer") != settings.issuer:
        raise EntraUnavailable("expected the endpoints of api.oidc.issuer, got those of another")
    urls = []
    for name in ("authorization_endpoint", "token_endpoint"):
        try:
            urls.append(check_https_or_loopback_url(document[name]))
        except (KeyError, TypeError, AttributeError, ValueError):
            text = f"expected an https URL as {name}, got something else"
            raise EntraUnavailable(text) from None
    return URL(urls[0]), urls[1]


@dataclass(frozen=True, slots=True)
class Person:
    caller: Caller
    name: str | None
    """What the person is called, for people. It can change, and is not unique."""
    expires_at: float
    """When the ID token expires: seconds since 1970."""


class TokenVerifier:
    def __init__(self, settings: OidcSettings, clock: Clock) -> None:
        self._settings = settings
        self._keys = Kept(partial(fetch_keys, settings), clock)

    async def caller_from_token(self, token: str) -> Caller:
        """Return the owner of an access token, with its roles' rights. Raises NotAuthenticated."""
        claims = await self._verify(token, self._settings.audience)
        self._require_access_token(claims)
        return self._caller(claims)

    async def person_from_id_token(self, token: str, nonce: str) -> Person:
        """Return who signed in with this nonce and has a right. Raises NotAuthenticated."""
        client_id = self._settings.client_id
        claims = await self._verify(token, client_id)
        found = str(claims.get("nonce")).encode("utf-8", "surrogatepass")
        if not hmac.compare_digest(found, nonce.encode()):
            raise NotAuthenticated("the ID token's nonce: expected that of the sign-in")
        if claims.get("azp", client_id) != client_id:  # OpenID Connect Core, section 3.1.3.7
            raise NotAuthenticated("the ID token's azp: expected the relay's application")
        caller = self._caller(claims)
        if not caller.rights.can:
            raise NotAuthenticated(
                f"{caller.principal} has none of the application roles of api.oidc.roles; "
                "groups in a token give no rights, assign a role to the group"
            )
        name = claims.get("name")
        if isinstance(name, str):  # on one line, without characters that nobody sees
            name = "".join(filter(str.isprintable, name))[:_MAX_NAME_LENGTH].strip()
        else:
            name = None
        expires_at = min(int(claims["exp"]), _LATEST)  # JSON has integers too large for a float
        return Person(caller, name or None, expires_at)

    async def _verify(self, token: str, audience: str) -> Mapping[str, Any]:
        """Return the claims after the checks that all tokens need. Raises NotAuthenticated."""
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise NotAuthenticated("the bearer is neither a client's key nor a token") from None
        key_id = header.get("kid")
        if header.get("alg") != "RS256" or not isinstance(key_id, str):
            text = "the token's header: expected alg RS256 and a kid, got something else"
            raise NotAuthenticated(text)
        try:
            keys = await self._keys.get(lambda keys: key_id in keys)
        except EntraUnavailable:
            text = "the issuer's keys are not at hand: they could not be fetched"
            raise NotAuthenticated(text) from None
        if key_id not in keys:
            text = "the token's kid: expected one of the issuer's keys, got another"
            raise NotAuthenticated(text)
        try:
            claims: Mapping[str, Any] = jwt.decode(
                token,
                keys[key_id],
                algorithms=["RS256"],
                audience=audience,
                issuer=self._settings.issuer,
                leeway=CLOCK_TOLERANCE,
                options={"require": ["exp", "iat", "iss", "aud"], "strict_aud": True},
            )
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError) as error:
            raise NotAuthenticated(f"the token: {type(error).__name__}") from None
        return claims

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        tenant, object_id = claims.get("tid"), claims.get("oid")
        if tenant != self._settings.tenant:
            raise NotAuthenticated("the token's tid: expected the configured tenant, got another")
        if not isinstance(object_id, str) or GUID.fullmatch(object_id) is None:
            raise NotAuthenticated("the token's oid: expected an object's id, got something else")
        rights = self._settings.rights_of_roles(claims.get("roles"))
        return Caller(f"entra:{tenant}/{object_id}", "http", rights)

    def _require_access_token(self, claims: Mapping[str, Any]) -> None:
        """Raise NotAuthenticated for all but an access token that a configured application got."""
        found = [name for name in ("nonce", "c_hash", "at_hash") if name in claims]
        if found:
            raise NotAuthenticated(f"expected an access token, got an ID token: it has {found[0]}")
        # A token of the v2.0 endpoint names its application in azp, one of v1.0 in appid.
        names = [claims[name] for name in ("azp", "appid") if name in claims]
        if not names:
            raise NotAuthenticated("expected an access token, got one without azp and appid")
        allowed = self._settings.applications
        if not all(isinstance(name, str) and name.lower() in allowed for name in names):
            text = "the token's azp or appid: expected one of api.oidc.applications, got another"
            raise NotAuthenticated(text)
