"""The signing keys of Entra ID: fetches them from the configured URL and keeps them for a day.

Nothing in a token chooses the URL. Imported only where `api.oidc` is configured.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import aiohttp
import jwt
import orjson

from relay.api.auth.authentication import NotAuthenticated
from relay.api.auth.entra_settings import OidcSettings
from relay.clock import Clock
from relay.net.http import open_session

KEY_REFETCH_INTERVAL = 300.0
"""Seconds between two fetches. Tokens with unknown key ids cause no more fetches than that."""
KEY_RETRY_INTERVAL = 30.0
"""Seconds after a failed fetch until the next. Otherwise a short failure at the start of the relay
would lock everybody out for minutes."""
MAX_KEY_AGE = 86400.0
"""Seconds until the keys are fetched again, so that a withdrawn key expires."""
_FETCH_TIMEOUT = 10.0
_MAX_DOCUMENT_BYTES = 256 * 1024
_MIN_KEY_BITS = 2048  # RSA: RFC 7518, section 3.3
_log = logging.getLogger(__name__)


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
