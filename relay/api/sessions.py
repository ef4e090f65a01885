"""The sessions of people who signed in, and the cookies by which a browser names them.

Sessions are in memory, bounded, and over after an hour at the latest. The browser has a random
cookie, and the relay its digest. There is no refresh: what a role gives is looked up at Entra ID
again at the next sign-in. A browser sends a cookie whoever makes it call. So a cookie counts only
for calls of the relay's own pages (`check_sent_by_own_page`). Sources: RFC 6265bis, section 4.1.3
(prefixes) and 8.8 (SameSite); https://www.w3.org/TR/fetch-metadata/.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Literal

from aiohttp import web

from relay.api.responses import Problem
from relay.approvals.request import Caller
from relay.clock import Clock

SESSION_LIFETIME = 3600.0
"""Seconds."""
PENDING_LIFETIME = 600.0
"""Seconds from the beginning of a sign-in to its end. A code of Entra ID lives as long."""
MAX_SESSIONS = 1000
MAX_SESSIONS_OF_PRINCIPAL = 10
"""A person has several browsers. The oldest session makes room for a new one."""


@dataclass(frozen=True, slots=True)
class Session:
    key: bytes
    """The digest of the cookie."""
    caller: Caller
    name: str | None
    """What the person is called, for people."""
    ends_at: float
    """Seconds since 1970. A machine that was suspended has a monotonic clock that stood still."""
    ends_at_monotonic: float
    """Monotonic seconds. A clock that is set back lengthens no session."""


SESSION = web.RequestKey("session", Session)
"""The session that authenticated a call. Only if its cookie did."""


class Sessions:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: dict[bytes, Session] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, caller: Caller, name: str | None, seconds: float) -> str:
        """Begin a session of at most that many seconds, and return its cookie."""
        for other in [each for each in self._sessions.values() if self._has_expired(each)]:
            del self._sessions[other.key]
        others = list(self._sessions.values())
        own = [each for each in others if each.caller.principal == caller.principal]
        if len(own) >= MAX_SESSIONS_OF_PRINCIPAL:
            del self._sessions[own[0].key]
        elif len(others) >= MAX_SESSIONS:
            del self._sessions[others[0].key]
        cookie, lifetime = secrets.token_urlsafe(32), min(seconds, SESSION_LIFETIME)
        ends_at = self._clock.now().timestamp() + lifetime
        session = Session(
            _digest(cookie), caller, name, ends_at, self._clock.monotonic() + lifetime
        )
        self._sessions[session.key] = session
        return cookie

    def find(self, cookie: str) -> Session | None:
        """Return the session of this cookie; None if there is none, or if it has ended."""
        session = self._sessions.get(_digest(cookie))
        return session if session is not None and self.is_open(session) else None

    def is_open(self, session: Session) -> bool:
        return session.key in self._sessions and not self._has_expired(session)

    def end(self, cookie: str) -> None:
        self._sessions.pop(_digest(cookie), None)

    def _has_expired(self, session: Session) -> bool:
        now, elapsed = self._clock.now().timestamp(), self._clock.monotonic()
        return now >= session.ends_at or elapsed >= session.ends_at_monotonic


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class HostPrefixCookie:
    """A cookie of the relay. Browsers send it over https alone, and show it to no script."""

    name: str
    """The prefix `__Host-` lets browsers accept it from this host alone, for this host alone."""
    same_site: Literal["Strict", "Lax"]
    seconds: float

    def read(self, request: web.Request) -> str | None:
        """Return the value, split as a browser joins it (RFC 6265bis, section 5.8.3).

        None if the browser sent none. `request.cookies` also ends a value at a space, and strips
        other spaces from a name. So a cookie of a sibling host could contain one with the prefix,
        which that host may not set. A browser has one cookie with the prefix and this name: of two,
        none counts.
        """
        pairs = (
            pair.strip(" \t").partition("=")
            for header in request.headers.getall("Cookie", [])
            for pair in header.split(";")
        )
        values = [value for key, _, value in pairs if key == self.name]
        return values[0] or None if len(values) == 1 else None

    def give(self, response: web.StreamResponse, value: str | None) -> None:
        """Let the browser keep the cookie in place of an older one; None: let it forget it."""
        response.set_cookie(
            self.name,
            value or "",
            max_age=0 if value is None else int(self.seconds),
            path="/",
            secure=True,
            httponly=True,
            samesite=self.same_site,
        )


SESSION_COOKIE = HostPrefixCookie("__Host-imds-relay-session", "Strict", SESSION_LIFETIME)
PENDING_COOKIE = HostPrefixCookie("__Host-imds-relay-sign-in", "Lax", PENDING_LIFETIME)
"""Of a sign-in that has begun. Entra ID sends the browser back: a Strict one would be missing."""
PAGE_HEADER = "X-Requested-With"
PAGE_HEADER_VALUE = "imds-relay"
"""No page of another origin can add this header without asking, and the relay allows it to none."""


def check_sent_by_own_page(request: web.Request, origin: str) -> None:
    """Raise Problem 403 unless a page of the relay itself sends this call.

    `origin` is that of the pages. Browsers add Sec-Fetch-Site and Origin, and no page can change
    them. GET and HEAD change nothing, and browsers send them without Origin.
    """
    sites = request.headers.getall("Sec-Fetch-Site", [])
    origins = request.headers.getall("Origin", [])
    only_reads = request.method in ("GET", "HEAD")
    allowed_sites = ("same-origin", "none") if only_reads else ("same-origin",)
    is_own = all(site in allowed_sites for site in sites)
    if not only_reads:
        is_own = is_own and bool(sites or origins) and all(other == origin for other in origins)
        is_own = is_own and request.headers.getall(PAGE_HEADER, []) == [PAGE_HEADER_VALUE]
    if not is_own:
        raise Problem(
            403,
            "the cookie of a session counts only for calls of the relay's own pages: expected "
            f"Sec-Fetch-Site: same-origin or Origin: {origin}, and to change something "
            f"{PAGE_HEADER}: {PAGE_HEADER_VALUE}",
        )
