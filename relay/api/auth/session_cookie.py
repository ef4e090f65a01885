"""The cookies of sign-ins and sessions, and what a call with a session's cookie must show besides.

Sources: RFC 6265bis, section 4.1.3 (prefixes) and 8.8 (SameSite);
https://www.w3.org/TR/fetch-metadata/. A browser sends a cookie whoever makes it call. So the cookie
counts only for calls of the relay's own pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aiohttp import web

from relay.api.schema.responses import Problem


@dataclass(frozen=True, slots=True)
class Cookie:
    """A cookie of the relay. Browsers send it over https alone, and show it to no script."""

    name: str
    """The prefix `__Host-` lets browsers accept it from this host alone, for this host alone."""
    same_site: Literal["Strict", "Lax"]

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

    def set(self, response: web.StreamResponse, value: str, *, seconds: float) -> None:
        """Let the browser keep the cookie, in place of an older one."""
        response.set_cookie(
            self.name,
            value,
            max_age=int(seconds),
            path="/",
            secure=True,
            httponly=True,
            samesite=self.same_site,
        )

    def clear(self, response: web.StreamResponse) -> None:
        """Let the browser forget the cookie."""
        self.set(response, "", seconds=0)


SESSION_COOKIE = Cookie("__Host-imds-relay-session", "Strict")
PENDING_COOKIE = Cookie("__Host-imds-relay-sign-in", "Lax")
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
    if request.method in ("GET", "HEAD"):
        if any(site not in ("same-origin", "none") for site in sites):
            raise _foreign_page_problem("Sec-Fetch-Site")
        return
    if any(site != "same-origin" for site in sites):
        raise _foreign_page_problem("Sec-Fetch-Site")
    if any(other != origin for other in origins):
        raise _foreign_page_problem("Origin")
    if not sites and not origins:
        raise _foreign_page_problem("Sec-Fetch-Site and Origin")
    if request.headers.getall(PAGE_HEADER, []) != [PAGE_HEADER_VALUE]:
        raise Problem(
            403,
            f"expected {PAGE_HEADER}: {PAGE_HEADER_VALUE} with the cookie of a session: "
            "only the relay's own pages may use it",
        )


def _foreign_page_problem(header: str) -> Problem:
    return Problem(
        403,
        f"the cookie of a session counts only for calls of the relay's own pages, and {header} "
        "shows no such page",
    )
