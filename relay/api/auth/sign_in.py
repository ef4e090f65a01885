"""People sign in with Entra ID on the relay's pages: authorization code flow with PKCE.

`relay.api.routes.sign_in` calls `begin`, which sends the browser to Entra ID, and `finish` when the
browser comes back with a code. `pending_sign_in` proves that it is the same browser. The code is
exchanged for an ID token (`entra_endpoints`), which `entra_tokens` verifies. Then a session begins
(`sessions`). Whatever fails raises SignInRefused, which has a text for the person.

Sources: OpenID Connect Core 1.0, section 3.1; RFC 9700 (known attacks), RFC 7636, RFC 9207;
https://learn.microsoft.com/entra/identity-platform/v2-oauth2-auth-code-flow. docs/sign-in.md says
how to set it up, and docs/threat-model.md#signing-in how the known attacks
are met. Imported only where `api.oidc.sign_in` is configured.
"""

from __future__ import annotations

from yarl import URL

from relay.api.auth.authentication import NotAuthenticated
from relay.api.auth.entra_endpoints import (
    EntraEndpoints,
    EntraUnavailable,
    refusal_from_entra_error_codes,
)
from relay.api.auth.entra_settings import OidcSettings, redirect_uri
from relay.api.auth.entra_tokens import CLOCK_TOLERANCE, Person, TokenVerifier
from relay.api.auth.pending_sign_in import PendingSignIn, PendingSignIns, SignInRefused
from relay.api.auth.sessions import Sessions
from relay.clock import Clock

_SCOPE = "openid profile"  # profile: without it there is no oid
_MAX_CODE_LENGTH = 4096


class SignIn:
    """Lets people sign in at the configured issuer, and keeps their sessions."""

    def __init__(
        self, settings: OidcSettings, public_url: str, tokens: TokenVerifier, clock: Clock
    ) -> None:
        self.sessions = Sessions(clock)
        self._settings = settings
        self.redirect_uri = redirect_uri(public_url)
        """Where Entra ID sends the browser back."""
        self._base = public_url.rstrip("/")
        self._tokens = tokens
        self._clock = clock
        self._endpoints = EntraEndpoints(settings, clock)
        self._pending = PendingSignIns()

    @property
    def origin(self) -> str:
        """The origin of the relay's pages, as browsers write it."""
        return str(URL(self._base).origin())

    def url_of_path(self, target: str) -> str:
        """Return the URL of a path of this relay."""
        return f"{self._base}{target}"

    async def begin(self, target: str) -> tuple[str, PendingSignIn]:
        """Begin a sign-in, and return the URL at Entra ID to which the browser goes.

        Raises ValueError for a target that is no path of this relay, and SignInRefused.
        """
        pending = self._pending.begin(target, self._clock.monotonic())
        try:
            endpoints = await self._endpoints.find()
        except EntraUnavailable as error:
            raise _entra_unavailable_refusal(error) from None
        url = endpoints.authorization.update_query(
            client_id=self._settings.client_id,
            response_type="code",
            response_mode="query",
            redirect_uri=self.redirect_uri,
            scope=_SCOPE,
            state=pending.state,
            nonce=pending.nonce,
            code_challenge=pending.challenge,
            code_challenge_method="S256",
            # Nobody is signed in unseen, and who has several accounts can choose another one.
            prompt="select_account",
        )
        return str(url), pending

    async def finish(
        self, cookie: str | None, answer: URL, old_session: str | None
    ) -> tuple[str, str]:
        """End a sign-in. Return the cookie of the new session, and the path to open next.

        `cookie` is that of the sign-in, and `answer` the URL that Entra ID made the browser open.
        Raises SignInRefused. If the answer belongs to the cookie, the session that the browser had
        is over, so nobody's session becomes that of another person.
        """
        state = _single_query_value(answer, "state") or ""
        pending = self._pending.finish(cookie, state, self._clock.monotonic())
        if old_session is not None:
            self.sessions.end(old_session)
        try:
            person = await self._exchange_answer_for_person(answer, pending)
        except SignInRefused as error:
            error.target = pending.target
            raise
        # The token counts that long after its end, too, because clocks differ.
        lifetime = person.expires_at + CLOCK_TOLERANCE - self._clock.now().timestamp()
        return self.sessions.begin(person.caller, person.name, lifetime), pending.target

    async def _exchange_answer_for_person(self, answer: URL, pending: PendingSignIn) -> Person:
        """Return who signed in, by the answer of Entra ID. Raises SignInRefused."""
        issuers = answer.query.getall("iss", [])
        if any(issuer != self._settings.issuer for issuer in issuers):  # RFC 9207
            raise _malformed_answer_refusal("the answer is that of another issuer")
        if "error" in answer.query:
            raise refusal_from_entra_error_codes(
                _single_query_value(answer, "error"),
                _single_query_value(answer, "error_description"),
            )
        code = _single_query_value(answer, "code")
        if not code or len(code) > _MAX_CODE_LENGTH or not code.isascii():
            raise _malformed_answer_refusal("the answer has not exactly one code")
        try:
            token = await self._endpoints.exchange(code, pending.verifier, self.redirect_uri)
            return await self._tokens.person_from_id_token(token, pending.nonce)
        except EntraUnavailable as error:
            raise _entra_unavailable_refusal(error) from None
        except NotAuthenticated as error:
            raise SignInRefused(
                str(error),
                f"The relay did not accept the sign-in: {error}. Use another account, or tell "
                "whoever operates the relay.",
            ) from None


def _single_query_value(answer: URL, name: str) -> str | None:
    """Return the value of a parameter that is there once."""
    values = answer.query.getall(name, [])
    return values[0] if len(values) == 1 else None


def _malformed_answer_refusal(reason: str) -> SignInRefused:
    return SignInRefused(reason, "The answer of Entra ID is not usable. Begin again.", status=400)


def _entra_unavailable_refusal(error: EntraUnavailable) -> SignInRefused:
    return SignInRefused(
        f"Entra ID cannot be asked: {error}",
        f"The relay cannot reach Entra ID: {error}. Try again, or use a key.",
        status=502,
    )
