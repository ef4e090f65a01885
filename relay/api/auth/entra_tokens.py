"""Verifies tokens (JWT) of Entra ID: access tokens of callers, and ID tokens of sign-ins.

Sources: https://learn.microsoft.com/entra/identity-platform/access-tokens (claims, validation),
access-token-claims-reference and id-token-claims-reference there, RFC 7519, RFC 8725 (known
attacks). Nothing in a token chooses the algorithm, the issuer or the URL of its keys. `SigningKeys`
fetches the issuer's keys from the configured URL and keeps them for a day.

An ID token of this relay's own application has the same issuer, audience, tenant and roles as an
access token. It tells an application who signed in, and gives nobody access. It names no
application that uses it: `_require_access_token_of_allowed_application`. It counts once, for the
sign-in that asked for it: it has that sign-in's nonce. Imported only where `api.oidc` is
configured: the extra `entra` has the library.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import jwt
import orjson

from relay.api.auth.authentication import NotAuthenticated
from relay.api.auth.entra_settings import GUID, OidcSettings
from relay.approvals.request import Caller
from relay.clock import Clock
from relay.net.http import open_session

if TYPE_CHECKING:
    from jwt.types import Options

CLOCK_TOLERANCE = 60.0
"""Seconds by which the clocks of issuer and relay may differ."""
KEY_REFETCH_INTERVAL = 300.0
"""Seconds between two fetches. Tokens with unknown key ids cause no more fetches than that."""
KEY_RETRY_INTERVAL = 30.0
"""Seconds after a failed fetch until the next. Otherwise a short failure at the start of the relay
would lock everybody out for minutes."""
MAX_KEY_AGE = 86400.0
"""Seconds until the keys are fetched again, so that a withdrawn key expires."""
_MAX_TOKEN_LENGTH = 16 * 1024
_ID_TOKEN_CLAIMS = ("nonce", "c_hash", "at_hash")
"""Claims that only ID tokens have."""
_MAX_NAME_LENGTH = 100
_FETCH_TIMEOUT = 10.0
_MAX_DOCUMENT_BYTES = 256 * 1024
_MIN_KEY_BITS = 2048  # RSA: RFC 7518, section 3.3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Person:
    """A person who signed in."""

    caller: Caller
    name: str | None
    """What the person is called, for people. It can change, and is not unique."""
    expires_at: float
    """When the ID token expires: seconds since 1970."""


class TokenVerifier:
    """Verifies tokens with the issuer's keys."""

    def __init__(self, settings: OidcSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._keys = SigningKeys(settings, clock)

    async def caller_from_token(self, token: str) -> Caller:
        """Return the token's owner with the rights of its roles. Raises NotAuthenticated."""
        claims = await self._verify_token(token, self._settings.audience)
        self._require_access_token_of_allowed_application(claims)
        return self._caller_from_claims(claims)

    async def person_from_id_token(self, token: str, nonce: str) -> Person:
        """Return who signed in with this nonce. Raises NotAuthenticated.

        Who has no right of any role is refused: a session without rights helps nobody.
        """
        client_id = self._settings.client_id
        claims = await self._verify_token(token, client_id)
        found = claims.get("nonce")
        if not isinstance(found, str) or not _are_equal(found, nonce):
            raise NotAuthenticated("the ID token's nonce: expected that of the sign-in")
        if claims.get("azp", client_id) != client_id:  # OpenID Connect Core, section 3.1.3.7
            raise NotAuthenticated("the ID token's azp: expected the relay's application")
        caller = self._caller_from_claims(claims)
        _check_roles_are_complete(claims)
        if not caller.rights.can:
            raise NotAuthenticated(
                f"{caller.principal} has none of the application roles of api.oidc.roles"
                + _groups_give_no_rights_hint(claims)
            )
        return Person(caller, _clean_display_name(claims.get("name")), claims["exp"])

    async def _verify_token(self, token: str, audience: str) -> Mapping[str, Any]:
        """Return the claims after the checks that all tokens need. Raises NotAuthenticated."""
        key = await self._keys.find(_key_id(token))
        claims = self._decode_with_key(token, key, audience)
        self._check_times(claims)
        return claims

    def _caller_from_claims(self, claims: Mapping[str, Any]) -> Caller:
        tenant, object_id = claims.get("tid"), claims.get("oid")
        if tenant != self._settings.tenant:
            raise NotAuthenticated("the token's tid: expected the configured tenant, got another")
        if not isinstance(object_id, str) or GUID.fullmatch(object_id) is None:
            raise NotAuthenticated("the token's oid: expected an object's id, got something else")
        rights = self._settings.rights_of_roles(claims.get("roles"))
        return Caller(f"entra:{tenant}/{object_id}", "http", rights)

    def _decode_with_key(self, token: str, key: Any, audience: str) -> Mapping[str, Any]:
        options: Options = {
            "require": ["exp", "iat", "iss", "aud"],
            "strict_aud": True,
            # `_check_times` checks these with the relay's clock.
            "verify_exp": False,
            "verify_nbf": False,
            "verify_iat": False,
        }
        try:
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key,
                algorithms=["RS256"],
                audience=audience,
                issuer=self._settings.issuer,
                options=options,
            )
        except jwt.PyJWTError as error:
            raise NotAuthenticated(f"the token: {type(error).__name__}") from None
        return claims

    def _require_access_token_of_allowed_application(self, claims: Mapping[str, Any]) -> None:
        """Return for an access token that a configured application got.

        A token of the v2.0 endpoint names its application in azp, one of v1.0 in appid.
        """
        found = [name for name in _ID_TOKEN_CLAIMS if name in claims]
        if found:
            raise NotAuthenticated(f"expected an access token, got an ID token: it has {found[0]}")
        names = [claims[name] for name in ("azp", "appid") if name in claims]
        if not names:
            raise NotAuthenticated("expected an access token, got one without azp and appid")
        allowed = self._settings.applications
        if not all(isinstance(name, str) and name.lower() in allowed for name in names):
            raise NotAuthenticated(
                "the token's azp or appid: expected one of api.oidc.applications, got another"
            )

    def _check_times(self, claims: Mapping[str, Any]) -> None:
        times = {name: claims[name] for name in ("exp", "iat", "nbf") if name in claims}
        if not all(_is_finite_number(value) for value in times.values()):
            raise NotAuthenticated("the token's times: expected numbers, got something else")
        now = self._clock.now().timestamp()
        if now >= times["exp"] + CLOCK_TOLERANCE:
            raise NotAuthenticated("the token has expired")
        valid_from = max(times["iat"], times.get("nbf", times["iat"]))
        if now < valid_from - CLOCK_TOLERANCE:
            raise NotAuthenticated("the token is not valid yet, by this machine's clock")


def _are_equal(text: str, expected: str) -> bool:
    return hmac.compare_digest(text.encode("utf-8", "surrogatepass"), expected.encode())


def _check_roles_are_complete(claims: Mapping[str, Any]) -> None:
    """Raise NotAuthenticated if the token only says where the roles are.

    Entra ID does so with claims that are too large, such as groups that it emits as roles.
    """
    elsewhere = claims.get("_claim_names")
    if isinstance(elsewhere, dict) and "roles" in elsewhere:
        raise NotAuthenticated("the ID token does not contain the roles: there are too many")


def _groups_give_no_rights_hint(claims: Mapping[str, Any]) -> str:
    """Return what an administrator may have meant to count, and does not."""
    elsewhere = claims.get("_claim_names")
    has_overage = isinstance(elsewhere, dict) and "groups" in elsewhere
    if has_overage or any(name in claims for name in ("groups", "hasgroups")):
        return "; groups in the token give no rights, assign a role to the group"
    return ""


def _clean_display_name(name: object) -> str | None:
    """Return the name on one line, without characters that nobody sees."""
    if not isinstance(name, str):
        return None
    return "".join(filter(str.isprintable, name))[:_MAX_NAME_LENGTH].strip() or None


def _is_finite_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # JSON has integers that are too large for a float
        return False


def _key_id(token: str) -> str:
    """Return the id of the key that the token names. Raises NotAuthenticated for all but RS256."""
    if len(token) > _MAX_TOKEN_LENGTH:
        raise NotAuthenticated("the token is too long")
    try:
        header = jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise NotAuthenticated("the bearer is neither a client's key nor a token") from None
    if header.get("alg") != "RS256" or not isinstance(header.get("kid"), str):
        raise NotAuthenticated(
            "the token's header: expected alg RS256 and a kid, got something else"
        )
    return str(header["kid"])


class SigningKeys:
    """The issuer's current keys."""

    def __init__(self, settings: OidcSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._keys: Mapping[str, Any] = {}
        self._next_fetch_at = 0.0
        self._fetched_at: float | None = None
        self._lock = asyncio.Lock()

    async def find(self, key_id: str) -> Any:
        """Return the key with this id. Raises NotAuthenticated without it or with stale keys.

        A server of keys that hangs delays only callers whose key is not at hand, and the caller for
        whom old keys are fetched again.
        """
        is_usable = key_id in self._keys and not self._is_too_old()
        if not is_usable or (self._age() >= MAX_KEY_AGE and not self._lock.locked()):
            async with self._lock:
                if key_id not in self._keys or self._age() >= MAX_KEY_AGE:
                    await self._refetch()
        if self._is_too_old():
            raise NotAuthenticated("the issuer's keys are not at hand: they could not be fetched")
        if key_id not in self._keys:
            raise NotAuthenticated(
                "the token's kid: expected one of the issuer's keys, got another"
            )
        return self._keys[key_id]

    def _is_too_old(self) -> bool:
        return self._age() >= MAX_KEY_AGE + 2 * KEY_REFETCH_INTERVAL

    def _age(self) -> float:
        if self._fetched_at is None:
            return float("inf")
        return self._clock.monotonic() - self._fetched_at

    async def _refetch(self) -> None:
        """Fetch the keys unless that was tried recently. After a failure the old keys stay."""
        now = self._clock.monotonic()
        if now < self._next_fetch_at:
            return
        self._next_fetch_at = now + KEY_RETRY_INTERVAL
        try:
            self._keys = await fetch_keys(self._settings)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            _log.warning(
                "api.oidc: the keys could not be fetched from keys_url: %s",
                str(error) or type(error).__name__,
            )
            return
        self._fetched_at = now
        self._next_fetch_at = now + KEY_REFETCH_INTERVAL


async def fetch_keys(settings: OidcSettings) -> dict[str, Any]:
    """Return the issuer's keys by id. Raises ValueError, ClientError, TimeoutError, OSError."""
    async with (
        open_session() as session,
        session.get(
            settings.keys_url,
            headers={"Accept": "application/json"},
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=_FETCH_TIMEOUT),
        ) as response,
    ):
        if response.status != 200:
            raise ValueError(f"expected 200, got {response.status}")
        document = bytearray()
        async for chunk in response.content.iter_chunked(16 * 1024):
            document += chunk
            if len(document) > _MAX_DOCUMENT_BYTES:
                raise ValueError(f"expected at most {_MAX_DOCUMENT_BYTES} bytes, got more")
    return _parse_keys(document)


def _parse_keys(content: bytearray) -> dict[str, Any]:
    """Return the usable RSA signature keys of a JSON Web Key Set (RFC 7517) by id."""
    document = orjson.loads(content)
    entries = document.get("keys") if isinstance(document, dict) else None
    keys: dict[str, Any] = {}
    for entry in entries if isinstance(entries, list) else ():
        key = _parse_key(entry)
        if key is not None:
            keys[entry["kid"]] = key
    if not keys:
        raise ValueError("expected a JSON Web Key Set with RSA keys for signatures, got none")
    return keys


def _parse_key(entry: object) -> Any:
    """Return the public key of an entry; None if it is no strong RSA key for signatures."""
    if not isinstance(entry, dict) or not isinstance(entry.get("kid"), str):
        return None
    is_private = "d" in entry
    if entry.get("kty") != "RSA" or entry.get("use", "sig") != "sig" or is_private:
        return None
    try:
        key = jwt.PyJWK.from_dict(entry, algorithm="RS256").key
    except (jwt.PyJWTError, ValueError, TypeError):
        return None
    return key if key.key_size >= _MIN_KEY_BITS else None
