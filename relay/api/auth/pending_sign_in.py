"""Sign-ins that have begun: what ties the answer of Entra ID to the browser that asked.

Nothing is kept for a sign-in that has begun, so strangers who begin many displace nobody's. The
browser keeps a random cookie. State, nonce and code verifier are MACs of the cookie with a key that
only this process has:

- The state proves that the answer belongs to the cookie, and that this process made the cookie.
- The code verifier (RFC 7636) leaves the process in the call for the ID token only.
- The ID token must contain the nonce.

A restart of the relay ends all sign-ins that have begun.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field

from relay.rate_limits import TokenBuckets

PENDING_LIFETIME = 600.0
"""Seconds from the beginning of a sign-in to its end. A code of Entra ID lives as long."""
MAX_TARGET_LENGTH = 512
_MAX_REMEMBERED = 4096
"""Used states that are remembered. Entra ID, too, takes each code once."""
_SEGMENT = r"[A-Za-z0-9_~-][A-Za-z0-9._~-]*"
_TARGET = re.compile(rf"/(?:{_SEGMENT}(?:/{_SEGMENT})*/?)?(?:\?[A-Za-z0-9._~&=:/@+%-]*)?")
"""A path of this relay: no other host (`//`, `\\`), no `..`, no control characters, no fragment."""


class SignInRefused(Exception):
    """The sign-in failed. The text is for the log, and contains no secret.

    `advice` is for the person in front of the browser. `status` is that of the answer, and `target`
    where the person can begin again, if the sign-in is known.
    """

    def __init__(self, reason: str, advice: str, *, status: int = 403) -> None:
        super().__init__(reason)
        self.advice = advice
        self.status = status
        self.target: str | None = None


@dataclass(frozen=True, slots=True)
class PendingSignIn:
    """A sign-in that has begun in one browser."""

    cookie: str = field(repr=False)
    state: str = field(repr=False)
    nonce: str = field(repr=False)
    verifier: str = field(repr=False)
    target: str
    """The path to which the browser goes afterwards."""

    @property
    def challenge(self) -> str:
        """The code challenge of the method S256."""
        return _encode_base64url(hashlib.sha256(self.verifier.encode()).digest())


class PendingSignIns:
    """Begins sign-ins, and finds them again. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._unused = TokenBuckets(1 / PENDING_LIFETIME, 1, _MAX_REMEMBERED)

    def begin(self, target: str, now: float) -> PendingSignIn:
        """Begin a sign-in. Raises ValueError if the target is not a path of this relay."""
        if len(target) > MAX_TARGET_LENGTH or _TARGET.fullmatch(target) is None:
            raise ValueError("expected a path of this relay that starts with one /")
        random = secrets.token_urlsafe(32)
        return self._derive_pending_sign_in(
            f"{int(now)}.{random}.{_encode_base64url(target.encode())}", target
        )

    def finish(self, cookie: str | None, state: str, now: float) -> PendingSignIn:
        """Return the sign-in of the browser with this cookie, once. Raises SignInRefused.

        The state must be that of the cookie.
        """
        if cookie is None:
            raise _begin_again_refusal("the browser has no cookie of a sign-in")
        expected = self._derive_secret_from_cookie("state", cookie)
        if not hmac.compare_digest(expected.encode(), state.encode("utf-8", "surrogateescape")):
            raise _begin_again_refusal("the state is not that of the browser's cookie")
        # Only this process can have made a cookie with the right state.
        began_at, _, encoded_target = cookie.split(".")
        if now >= int(began_at) + PENDING_LIFETIME:
            raise _begin_again_refusal("the sign-in began too long ago")
        if self._unused.take(expected, now):
            raise _begin_again_refusal("the state was used before")
        return self._derive_pending_sign_in(cookie, _decode_base64url(encoded_target).decode())

    def _derive_pending_sign_in(self, cookie: str, target: str) -> PendingSignIn:
        state, nonce, verifier = (
            self._derive_secret_from_cookie(use, cookie)
            for use in ("state", "nonce", "code verifier")
        )
        return PendingSignIn(cookie, state, nonce, verifier, target)

    def _derive_secret_from_cookie(self, use: str, cookie: str) -> str:
        message = f"{use} {cookie}".encode("utf-8", "surrogateescape")
        return _encode_base64url(hmac.digest(self._key, message, "sha256"))


def _begin_again_refusal(reason: str) -> SignInRefused:
    return SignInRefused(
        reason,
        "This sign-in did not begin in this browser, began more than ten minutes ago, was replaced "
        "by a newer one, or is over. Begin again.",
    )


def _encode_base64url(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _decode_base64url(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
