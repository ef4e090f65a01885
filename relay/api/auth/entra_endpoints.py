"""The endpoints of Entra ID for signing in: finds them, and exchanges a code for an ID token.

`relay.api.auth.sign_in` uses them for people, and `doctor` to check the client secret.

Sources: OpenID Connect Discovery 1.0, section 4; OpenID Connect Core 1.0, section 3.1.3; RFC 7636.
The configured issuer alone says where the endpoints are. So no answer of a browser can make the
relay send a code or the client secret elsewhere.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

import orjson
from yarl import URL

from relay.api.auth.entra_settings import OidcSettings, check_https_or_loopback_url
from relay.api.auth.pending_sign_in import SignInRefused
from relay.clock import Clock
from relay.errors import Deferred
from relay.net.http import Method, Request, Response, open_session, send

MAX_ENDPOINTS_AGE = 86400.0
"""Seconds until the endpoints are looked up again."""
ENDPOINTS_RETRY_INTERVAL = 5.0
"""Seconds after a failure until the endpoints are looked up again."""
MAX_EXCHANGES = 8
"""Codes that are exchanged at once. Others wait, as long as one exchange may take."""
_TIMEOUT = 10.0
_DISCOVERY_PATH = "/.well-known/openid-configuration"
_HEADERS = {"Accept": "application/json"}
_ERROR = re.compile(r"[a-z_]{1,64}")
_ENTRA_ERROR = re.compile(r"AADSTS\d{1,10}")
_CREDENTIALS_REFUSED = "invalid_client"
"""The error of a wrong or expired client secret (RFC 6749, section 5.2)."""


@dataclass(frozen=True, slots=True)
class SignInEndpoints:
    """Where people sign in, and where codes are exchanged."""

    authorization: URL
    token: URL
    graph_host: str | None
    """The host of Microsoft Graph in the same cloud, if Entra ID names it."""


class EntraUnavailable(Exception):
    """Entra ID gave no usable answer. The text contains no secret."""


class EntraEndpoints:
    """The endpoints of one issuer, kept for a day."""

    def __init__(self, settings: OidcSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._endpoints: SignInEndpoints | None = None
        self._next_fetch_at = float("-inf")
        self._fetch_lock = asyncio.Lock()
        self._exchanges = asyncio.Semaphore(MAX_EXCHANGES)
        self._failure = ""

    async def find(self) -> SignInEndpoints:
        """Return the endpoints. Raises EntraUnavailable.

        If they cannot be looked up again after a day, the old ones stay.
        """
        async with self._fetch_lock:
            if self._clock.monotonic() >= self._next_fetch_at:
                await self._refetch()
        if self._endpoints is None:
            raise EntraUnavailable(self._failure)
        return self._endpoints

    async def _refetch(self) -> None:
        try:
            self._endpoints = await fetch_endpoints(self._settings)
            interval = MAX_ENDPOINTS_AGE
        except EntraUnavailable as error:
            self._failure = str(error)
            interval = ENDPOINTS_RETRY_INTERVAL
        self._next_fetch_at = self._clock.monotonic() + interval

    async def exchange(self, code: str, verifier: str, redirect_uri: str) -> str:
        """Return the ID token for a code. Raises SignInRefused, EntraUnavailable.

        `verifier` is the code verifier (RFC 7636) of the sign-in that got the code.
        """
        endpoints = await self.find()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": verifier,
        }
        try:
            async with asyncio.timeout(_TIMEOUT):
                await self._exchanges.acquire()
        except TimeoutError:
            raise EntraUnavailable("too many people sign in at once") from None
        try:
            status, answer = await _post_form(endpoints.token, form, self._settings)
        finally:
            self._exchanges.release()
        token = answer.get("id_token")
        if status == HTTPStatus.OK and isinstance(token, str):
            return token
        raise _refusal_of_exchange(answer.get("error"), answer.get("error_description"))


def _refusal_of_exchange(error: object, description: object) -> SignInRefused:
    """Return what an error of the token endpoint means.

    Only this endpoint gets the client secret, so only its errors can say that it is wrong.
    """
    codes = _extract_error_codes(error, description)
    if error == _CREDENTIALS_REFUSED:
        return SignInRefused(
            f"Entra ID refused the client secret of api.oidc.sign_in ({codes})",
            f"Entra ID does not accept this relay: its client secret is wrong or has expired "
            f"({codes}). Tell whoever operates the relay.",
            status=502,
        )
    return refusal_from_entra_error_codes(error, description)


def refusal_from_entra_error_codes(error: object, description: object) -> SignInRefused:
    """Return what an error of Entra ID means, also one that a browser brings.

    Only codes are repeated: the description can contain anything.
    """
    codes = _extract_error_codes(error, description)
    return SignInRefused(
        f"Entra ID refused the sign-in ({codes})",
        f"Entra ID refused the sign-in ({codes}). Begin again, with an account that may use this "
        "application.",
    )


def _extract_error_codes(error: object, description: object) -> str:
    """Return the codes of an error: that of OAuth, and that of Entra ID."""
    codes = []
    if isinstance(error, str) and _ERROR.fullmatch(error):
        codes.append(error)
    if isinstance(description, str) and (found := _ENTRA_ERROR.search(description)):
        codes.append(found[0])
    return " ".join(codes) or "without a known error code"


async def fetch_endpoints(settings: OidcSettings) -> SignInEndpoints:
    """Look up the endpoints of the configured issuer. Raises EntraUnavailable."""
    url = URL(settings.issuer.rstrip("/") + _DISCOVERY_PATH)
    response = await _send("GET", Request(url=url, headers=_HEADERS, body=b""))
    document = _parse_object(response)
    if response.status != HTTPStatus.OK:
        raise EntraUnavailable(f"expected the issuer's endpoints, got status {response.status}")
    if document.get("issuer") != settings.issuer:
        raise EntraUnavailable("expected the endpoints of api.oidc.issuer, got those of another")
    graph_host = document.get("msgraph_host")
    return SignInEndpoints(
        _read_endpoint_url(document, "authorization_endpoint"),
        _read_endpoint_url(document, "token_endpoint"),
        graph_host if isinstance(graph_host, str) else None,
    )


async def check_client_secret(settings: OidcSettings, endpoints: SignInEndpoints) -> str | None:
    """Return why Entra ID refuses the client secret; None if it accepts it.

    Asks for a token in the name of the application itself, and drops it: that alone needs nothing
    but the secret. Raises EntraUnavailable if Entra ID does not say.
    """
    if endpoints.graph_host is None:
        raise EntraUnavailable("it names no host of Microsoft Graph")
    form = {
        "grant_type": "client_credentials",
        "scope": f"https://{endpoints.graph_host}/.default",
    }
    status, answer = await _post_form(endpoints.token, form, settings)
    if status == HTTPStatus.OK:
        return None
    codes = _extract_error_codes(answer.get("error"), answer.get("error_description"))
    if answer.get("error") == _CREDENTIALS_REFUSED:
        return codes
    raise EntraUnavailable(codes)


async def _post_form(
    url: URL, form: Mapping[str, str], settings: OidcSettings
) -> tuple[int, Mapping[str, Any]]:
    """POST a form with the credentials of the application. Raises EntraUnavailable."""
    assert settings.sign_in is not None  # noqa: S101  # nobody signs in without it
    secret = settings.sign_in.reveal("client_secret") or ""
    body = urlencode({**form, "client_id": settings.client_id, "client_secret": secret})
    request = Request(
        url=url,
        headers={**_HEADERS, "Content-Type": "application/x-www-form-urlencoded"},
        body=body.encode(),
        secrets=(secret, *form.values()),
    )
    response = await _send("POST", request)
    return response.status, _parse_object(response)


async def _send(method: Method, request: Request) -> Response:
    try:
        async with open_session() as session:
            return await send(session, method, request, seconds=_TIMEOUT)
    except Deferred as error:
        raise EntraUnavailable(error.reason) from None


def _parse_object(response: Response) -> Mapping[str, Any]:
    """Return the JSON object of a response. Raises EntraUnavailable.

    Of a long body only the start was read, which is no JSON.
    """
    try:
        document = orjson.loads(response.body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise EntraUnavailable(f"expected a JSON object, got none (status {response.status})")
    return document


def _read_endpoint_url(document: Mapping[str, Any], name: str) -> URL:
    try:
        return URL(check_https_or_loopback_url(document[name]))
    except (KeyError, TypeError, AttributeError, ValueError):
        raise EntraUnavailable(f"expected an https URL as {name}, got something else") from None
