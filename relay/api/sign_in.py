"""People sign in with Entra ID on the relay's pages: authorization code flow with PKCE.

`relay.api.routes.pages` calls `begin`, which sends the browser to Entra ID, and `finish` when the
browser comes back with a code, which is exchanged for an ID token. Then a session begins. Whatever
fails raises NotAuthenticated, whose problem has a text for the person.

Nothing is kept for a sign-in that has begun, so strangers who begin many displace nobody's. The
browser keeps a random cookie. State, nonce and code verifier are MACs of the cookie with a key that
only this process has:

- The state proves that the answer belongs to the cookie, and that this process made the cookie.
- The code verifier (RFC 7636) leaves the process in the call for the ID token only.
- The ID token must contain the nonce.

A restart of the relay ends all sign-ins that have begun.

Sources: OpenID Connect Core 1.0, section 3.1; RFC 9700 (known attacks), RFC 7636, RFC 9207;
https://learn.microsoft.com/entra/identity-platform/v2-oauth2-auth-code-flow. docs/sign-in.md says
how to set it up, and docs/threat-model.md#signing-in how the known attacks are met. Imported only
where `api.oidc.sign_in` is configured.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

from yarl import URL

from relay.api.callers import NotAuthenticated
from relay.api.entra import (
    CLOCK_TOLERANCE,
    EntraUnavailable,
    Kept,
    Person,
    TokenVerifier,
    ask,
    fetch_endpoints,
)
from relay.api.responses import Problem
from relay.api.sessions import PENDING_LIFETIME, Sessions
from relay.api.settings import OidcSettings, redirect_uri
from relay.clock import Clock, TokenBuckets

_ERROR = re.compile(r"[a-z_]{1,64}")
_ENTRA_ERROR = re.compile(r"AADSTS\d{1,10}")
_BEGIN_AGAIN = (
    "This sign-in did not begin in this browser, began more than ten minutes ago, was replaced by "
    "a newer one, or is over. Begin again."
)
_UNUSABLE = "The answer of Entra ID is not usable. Begin again."


@dataclass(frozen=True, slots=True, repr=False)
class PendingSignIn:
    cookie: str
    state: str
    nonce: str
    verifier: str

    @property
    def challenge(self) -> str:
        """The code challenge of the method S256."""
        return _encode(hashlib.sha256(self.verifier.encode()).digest())


class PendingSignIns:
    """Begins sign-ins, and finds them again. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        # By state; of very many it forgets the oldest. Entra ID, too, takes each code once.
        self._unused = TokenBuckets(1 / PENDING_LIFETIME, 1)

    def begin(self, now: float) -> PendingSignIn:
        return self._derive(f"{int(now)}.{secrets.token_urlsafe(32)}")

    def finish(self, cookie: str | None, state: str, now: float) -> PendingSignIn:
        """Return the sign-in of this cookie and state, once. Raises NotAuthenticated."""
        if cookie is None:
            raise _refused("the browser has no cookie of a sign-in", _BEGIN_AGAIN)
        expected = self._mac("state", cookie)
        if not hmac.compare_digest(expected.encode(), state.encode("utf-8", "surrogateescape")):
            raise _refused("the state is not that of the browser's cookie", _BEGIN_AGAIN)
        # Only this process can have made a cookie with the right state.
        if now >= int(cookie.partition(".")[0]) + PENDING_LIFETIME:
            raise _refused("the sign-in began too long ago", _BEGIN_AGAIN)
        if self._unused.take(expected, now):
            raise _refused("the state was used before", _BEGIN_AGAIN)
        return self._derive(cookie)

    def _derive(self, cookie: str) -> PendingSignIn:
        macs = [self._mac(use, cookie) for use in ("state", "nonce", "code verifier")]
        return PendingSignIn(cookie, *macs)

    def _mac(self, use: str, cookie: str) -> str:
        message = f"{use} {cookie}".encode("utf-8", "surrogateescape")
        return _encode(hmac.digest(self._key, message, "sha256"))


class SignIn:
    def __init__(
        self, settings: OidcSettings, public_url: str, tokens: TokenVerifier, clock: Clock
    ) -> None:
        self.sessions = Sessions(clock)
        self.origin = str(URL(public_url).origin())
        """The origin of the relay's pages, as browsers write it."""
        self.page = f"{public_url.rstrip('/')}/"
        """The URL of the page, to which the browser goes afterwards."""
        self._redirect_uri = redirect_uri(public_url)
        self._settings = settings
        self._tokens = tokens
        self._clock = clock
        self._endpoints = Kept(partial(fetch_endpoints, settings), clock)
        self._pending = PendingSignIns()

    async def begin(self) -> tuple[str, str]:
        """Return the URL at Entra ID for the browser, and its cookie. Raises NotAuthenticated."""
        pending = self._pending.begin(self._clock.monotonic())
        try:
            authorization, _ = await self._endpoints.get()
        except EntraUnavailable as error:
            raise _unavailable(error) from None
        url = authorization.update_query(
            client_id=self._settings.client_id,
            response_type="code",
            response_mode="query",
            redirect_uri=self._redirect_uri,
            scope="openid profile",  # profile: without it there is no oid
            state=pending.state,
            nonce=pending.nonce,
            code_challenge=pending.challenge,
            code_challenge_method="S256",
            # Nobody is signed in unseen, and who has several accounts can choose another one.
            prompt="select_account",
        )
        return str(url), pending.cookie

    async def finish(self, cookie: str | None, answer: URL, old_session: str | None) -> str:
        """End a sign-in, and return the cookie of the new session. Raises NotAuthenticated.

        `cookie` is that of the sign-in, and `answer` the URL that Entra ID made the browser open.
        If the answer belongs to the cookie, the session that the browser had is over, so nobody's
        session becomes that of another person.
        """
        state = _only(answer, "state") or ""
        pending = self._pending.finish(cookie, state, self._clock.monotonic())
        if old_session is not None:
            self.sessions.end(old_session)
        person = await self._find_person(answer, pending)
        # The token counts that long after its end, too, because clocks differ.
        lifetime = person.expires_at + CLOCK_TOLERANCE - self._clock.now().timestamp()
        return self.sessions.begin(person.caller, person.name, lifetime)

    async def _find_person(self, answer: URL, pending: PendingSignIn) -> Person:
        issuers = answer.query.getall("iss", [])
        if any(issuer != self._settings.issuer for issuer in issuers):  # RFC 9207
            raise _refused("the answer is that of another issuer", _UNUSABLE, 400)
        if "error" in answer.query:
            raise _refused_by_entra(_only(answer, "error"), _only(answer, "error_description"))
        code = _only(answer, "code")
        if not code or len(code) > 4096 or not code.isascii():
            raise _refused("the answer has not exactly one code", _UNUSABLE, 400)
        try:
            token = await self._exchange(code, pending.verifier)
        except EntraUnavailable as error:
            raise _unavailable(error) from None
        try:
            return await self._tokens.person_from_id_token(token, pending.nonce)
        except NotAuthenticated as error:
            advice = f"The relay did not accept the sign-in: {error}. Use another account, or tell "
            raise _refused(str(error), f"{advice}whoever operates the relay.") from None

    async def _exchange(self, code: str, verifier: str) -> str:
        """Return the ID token for a code. Raises NotAuthenticated, EntraUnavailable.

        Only this endpoint gets the client secret, so only its errors can say that it is wrong.
        """
        assert self._settings.sign_in is not None  # noqa: S101  # nobody signs in without it
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_uri,
            "code_verifier": verifier,
            "client_id": self._settings.client_id,
            "client_secret": self._settings.sign_in.reveal("client_secret") or "",
        }
        _, url = await self._endpoints.get()
        status, answer = await ask(url, form)
        token = answer.get("id_token")
        if status == HTTPStatus.OK and isinstance(token, str):
            return token
        error, description = answer.get("error"), answer.get("error_description")
        raise _refused_by_entra(error, description, is_exchange=True)


def _refused(reason: str, advice: str, status: int = 403) -> NotAuthenticated:
    """Return the error with a reason for the log, and advice for the person."""
    return NotAuthenticated(reason, Problem(status, advice))


def _refused_by_entra(
    error: object, description: object, *, is_exchange: bool = False
) -> NotAuthenticated:
    """Tell the codes of OAuth and Entra ID alone: the description can contain anything."""
    found = [error] if isinstance(error, str) and _ERROR.fullmatch(error) else []
    if isinstance(description, str) and (code := _ENTRA_ERROR.search(description)):
        found.append(code[0])
    codes = " ".join(found) or "without a known error code"
    if is_exchange and error == "invalid_client":  # RFC 6749, section 5.2
        return _refused(
            f"Entra ID refused the client secret of api.oidc.sign_in ({codes})",
            f"Entra ID does not accept this relay: its client secret is wrong or has expired "
            f"({codes}). Tell whoever operates the relay.",
            502,
        )
    text = f"Entra ID refused the sign-in ({codes})"
    return _refused(text, f"{text}. Begin again, with an account that may use this application.")


def _unavailable(error: EntraUnavailable) -> NotAuthenticated:
    advice = f"The relay cannot reach Entra ID: {error}. Try again, or use a key."
    return _refused(f"Entra ID cannot be asked: {error}", advice, 502)


def _only(answer: URL, name: str) -> str | None:
    """Return the value of a parameter that is there once."""
    values = answer.query.getall(name, [])
    return values[0] if len(values) == 1 else None


def _encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")
