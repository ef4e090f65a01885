"""People and programs that Entra ID vouches for: bearer tokens (JWT), and the keys that they are verified with.

Sources: https://learn.microsoft.com/entra/identity-platform/access-tokens (claims, validation), RFC 7519, RFC 8725 (what goes
wrong with JWTs). Nothing in a token chooses the algorithm, the keys' address or the issuer: those are configured. The library
takes ten megabytes, and comes with imds-relay[entra]: this module is imported where `api.oidc` is configured.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Any

import aiohttp
import jwt
import orjson

from relay.api.auth.entra_settings import GUID, OidcSettings, TokenRefused
from relay.approvals.request import Caller, Rights
from relay.clock import Clock
from relay.net.egress import guarded_socket
from relay.net.tls_context import default_context

LEEWAY = 60.0
"""Seconds by which the clocks of issuer and relay may differ."""
KEY_REFETCH_INTERVAL = 300.0
"""Seconds between two fetches of the keys, whatever tokens name: a stranger's token makes nobody busy."""
MAX_KEY_AGE = 86400.0
"""Seconds after which the keys are fetched again in any case: one that was withdrawn is believed no longer than that."""
_PATIENCE = 10.0
_LARGEST = 256 * 1024
_WEAKEST = 2048  # bits of an RSA key (RFC 7518, section 3.3)
_LONGEST = 16 * 1024
_log = logging.getLogger(__name__)


class TokenVerifier:
    """Verifies tokens, with keys that are kept."""

    def __init__(self, settings: OidcSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._keys: Mapping[str, Any] = {}
        self._tried: float | None = None
        self._fetched: float | None = None
        self._fetching = asyncio.Lock()

    async def caller(self, token: str) -> Caller:
        """Whom the token names, and what they may do. Raises TokenRefused."""
        settings = self._settings
        key = await self._key(_kid(token))
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=["RS256"],
                audience=settings.audience,
                issuer=settings.issuer,
                options={
                    "require": ["exp", "iat", "iss", "aud"],
                    "strict_aud": True,
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.PyJWTError as error:
            raise TokenRefused(f"the token: {type(error).__name__}") from None
        self._check_times(claims)
        tenant, object_id = claims.get("tid"), claims.get("oid")
        if tenant != settings.tenant:
            raise TokenRefused("the token's tid: expected the configured tenant, got another")
        if not isinstance(object_id, str) or GUID.fullmatch(object_id) is None:
            raise TokenRefused("the token's oid: expected an object's id, got something else")
        given = claims.get("roles")
        roles = [one for one in given if isinstance(one, str)] if isinstance(given, list) else []
        can = frozenset(right for role in roles for right in settings.roles.get(role, ()))
        return Caller(f"entra:{tenant}/{object_id}", "http", Rights(can))

    def _check_times(self, claims: Mapping[str, Any]) -> None:
        # By the relay's own clock, which a test can turn, and numbers alone: neither true nor NaN is one.
        now = self._clock.now().timestamp()
        times = {name: claims[name] for name in ("exp", "iat", "nbf") if name in claims}
        if any(
            isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one)
            for one in times.values()
        ):
            raise TokenRefused("the token's times: expected numbers, got something else")
        if now >= times["exp"] + LEEWAY:
            raise TokenRefused("the token has expired")
        if now < times["iat"] - LEEWAY or now < times.get("nbf", now) - LEEWAY:
            raise TokenRefused("the token is not good yet, by this machine's clock")

    async def _key(self, kid: str) -> Any:
        async with self._fetching:
            now = self._clock.monotonic()
            stale = self._fetched is None or now - self._fetched >= MAX_KEY_AGE
            if (stale or kid not in self._keys) and (
                self._tried is None or now - self._tried >= KEY_REFETCH_INTERVAL
            ):
                self._tried = now
                await self._fetch(now)
            if (
                self._fetched is None
                or self._clock.monotonic() - self._fetched >= MAX_KEY_AGE + 2 * KEY_REFETCH_INTERVAL
            ):
                raise TokenRefused("the issuer's keys are not at hand: they could not be fetched")
        if kid not in self._keys:
            raise TokenRefused("the token's kid: expected one of the issuer's keys, got another")
        return self._keys[kid]

    async def _fetch(self, now: float) -> None:
        """Fetch the keys; where that fails, those that there are hold a while."""
        try:
            found = await fetch_keys(self._settings)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            _log.warning(
                "api.oidc: the keys could not be fetched from keys_url: %s",
                str(error) or type(error).__name__,
            )
            return
        self._keys, self._fetched = found, now


async def fetch_keys(settings: OidcSettings) -> dict[str, Any]:
    """The issuer's keys by their ids. Raises ValueError, ClientError, TimeoutError, OSError."""
    return _keys_in(await _get(settings.keys_url))


async def _get(url: str) -> bytes:
    """What is there, at most 256 KiB within ten seconds. Raises ValueError, ClientError, TimeoutError, OSError."""
    connector = aiohttp.TCPConnector(socket_factory=guarded_socket, ssl=default_context())
    timeout = aiohttp.ClientTimeout(total=_PATIENCE)
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    async with (
        aiohttp.ClientSession(
            connector=connector, trust_env=False, timeout=timeout, auto_decompress=False
        ) as session,
        session.get(url, allow_redirects=False, headers=headers) as answer,
    ):
        if answer.status != 200:
            raise ValueError(f"expected 200, got {answer.status}")
        body = bytearray()
        async for chunk in answer.content.iter_chunked(16 * 1024):
            body += chunk
            if len(body) > _LARGEST:
                raise ValueError(f"expected at most {_LARGEST} bytes, got more")
        return bytes(body)


def _keys_in(body: bytes) -> dict[str, Any]:
    """The RSA keys for signatures in a key set, by their ids. Raises ValueError where there are none."""
    document = orjson.loads(body)
    listed = document.get("keys") if isinstance(document, dict) else None
    found = {}
    for one in listed if isinstance(listed, list) else ():
        if (
            not isinstance(one, dict)
            or one.get("kty") != "RSA"
            or one.get("use", "sig") != "sig"
            or not isinstance(one.get("kid"), str)
        ):
            continue
        try:
            key = jwt.PyJWK.from_dict(one, algorithm="RS256").key
        except (jwt.PyJWTError, ValueError, TypeError):
            continue  # a key that nobody can use verifies nothing
        if "d" not in one and key.key_size >= _WEAKEST:
            found[one["kid"]] = key
    if not found:
        raise ValueError("expected a JSON Web Key Set with RSA keys for signatures, got none")
    return found


def _kid(token: str) -> str:
    """Which key is said to have signed it. Raises TokenRefused for all but RS256."""
    if len(token) > _LONGEST:
        raise TokenRefused("the token is too long")
    try:
        header = jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise TokenRefused("the bearer is neither a client's key nor a token") from None
    if header.get("alg") != "RS256" or not isinstance(header.get("kid"), str):
        raise TokenRefused("the token's header: expected alg RS256 and a kid, got something else")
    return str(header["kid"])
