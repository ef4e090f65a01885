"""The cookies of sign-ins and sessions, and what a call with a session's cookie must show besides.

Sources: RFC 6265bis, section 4.1.3 (prefixes) and 8.8 (SameSite);
https://www.w3.org/TR/fetch-metadata/. A browser sends a cookie whoever makes it call. So the cookie
counts only for calls of the relay's own pages.
"""

from __future__ import annotations

from aiohttp import web

from relay.api.schema.responses import Problem

SESSION_COOKIE = "__Host-imds-relay-session"
"""The prefix lets browsers accept it over https from this host alone, for this host alone."""
PENDING_COOKIE = "__Host-imds-relay-sign-in"
"""Lax: Entra ID sends the browser back, and a Strict cookie would be missing then."""
PAGE_HEADER = "X-Requested-With"
PAGE_HEADER_VALUE = "imds-relay"
"""No page of another origin can add this header without asking, and the relay allows it to none."""


def read_session_cookie(request: web.Request) -> str | None:
    """Return the cookie of a session; None if the browser sent none."""
    return _find_value_in_cookie_header(request, SESSION_COOKIE)


def read_pending_cookie(request: web.Request) -> str | None:
    """Return the cookie of a sign-in that has begun; None if the browser sent none."""
    return _find_value_in_cookie_header(request, PENDING_COOKIE)


def _find_value_in_cookie_header(request: web.Request, name: str) -> str | None:
    """Return the value of a cookie, split as a browser joins it (RFC 6265bis, section 5.8.3).

    `request.cookies` also ends a value at a space, and strips other spaces from a name. So a
    cookie of a sibling host could contain one with the prefix, which that host may not set. A
    browser has one cookie with the prefix and this name: of two, none counts.
    """
    pairs = (
        pair.strip(" \t").partition("=")
        for header in request.headers.getall("Cookie", [])
        for pair in header.split(";")
    )
    values = [value for key, _, value in pairs if key == name]
    return values[0] or None if len(values) == 1 else None


def set_session_cookie(response: web.StreamResponse, value: str, *, seconds: float) -> None:
    """Let the browser keep the cookie of a session."""
    _set_cookie(response, SESSION_COOKIE, value, seconds, "Strict")


def clear_session_cookie(response: web.StreamResponse) -> None:
    """Let the browser forget the cookie of a session."""
    _set_cookie(response, SESSION_COOKIE, "", 0, "Strict")


def set_pending_cookie(response: web.StreamResponse, value: str, *, seconds: float) -> None:
    """Let the browser keep the cookie of a sign-in that has begun, in place of an older one."""
    _set_cookie(response, PENDING_COOKIE, value, seconds, "Lax")


def clear_pending_cookie(response: web.StreamResponse) -> None:
    """Let the browser forget the cookie of a sign-in that has begun."""
    _set_cookie(response, PENDING_COOKIE, "", 0, "Lax")


def _set_cookie(
    response: web.StreamResponse, name: str, value: str, seconds: float, same_site: str
) -> None:
    response.set_cookie(
        name,
        value,
        max_age=int(seconds),
        path="/",
        secure=True,
        httponly=True,
        samesite=same_site,
    )


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
