"""Responses: JSON, pages and errors. All errors are `application/problem+json` (RFC 9457).

A route that a browser opens as a page (`Route.shows_problems`) shows its errors as a page instead,
which contains no script.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from html import escape
from http import HTTPStatus
from typing import Any, NotRequired

import orjson
from aiohttp import web
from typing_extensions import TypedDict

from relay.events.timestamps import format_rfc3339

COMMON_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Server": "imds-relay",  # aiohttp's default names its version and that of Python
}
PROBLEM_MEDIA_TYPE = "application/problem+json"


def json_response(status: int, body: Any) -> web.Response:
    """Return a JSON response. `orjson.Fragment` marks parts of the body that are JSON already."""
    return bytes_response(status, orjson.dumps(body), "application/json")


def bytes_response(
    status: int, body: bytes, content_type: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    sent = {**COMMON_HEADERS, "Content-Type": content_type, **(headers or {})}
    return web.Response(status=status, body=body, headers=sent)


def rfc3339_or_null(time: datetime | None) -> str | None:
    """Return a time as responses show it; None, in JSON null, without one."""
    return None if time is None else format_rfc3339(time)


class ProblemDetails(TypedDict):
    """Why a call failed."""

    type: str
    """Always about:blank: the status names the kind of problem (RFC 9457, section 4.2.1)."""
    title: str
    status: int
    detail: str
    field: NotRequired[str]
    """The wrong or missing field of a 422."""
    revision: NotRequired[str]
    """The current revision of the event, in a 409."""
    restartRequired: NotRequired[list[str]]
    """The keys of the configuration that a reload cannot change, in the 422 of a reload."""


class Problem(Exception):
    """A call failed.

    `detail` gives the reason and the remedy, without secrets. `closes` ends the connection, because
    unread parts of the request may follow. `link` is where a person who is not signed in can begin
    again. `members` are further fields of the response.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        closes: bool = False,
        link: str | None = None,
        **members: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers or {}
        self.closes = closes
        self.link = link
        self.members = members

    def to_response(self) -> web.Response:
        details = ProblemDetails(
            type="about:blank",
            title=HTTPStatus(self.status).phrase,
            status=self.status,
            detail=self.detail,
        )
        body = orjson.dumps({**details, **self.members})
        response = bytes_response(self.status, body, PROBLEM_MEDIA_TYPE, self.headers)
        if self.closes:
            response.force_close()
        return response


def too_many(detail: str, seconds: int) -> Problem:
    """``seconds`` is after what time the caller should try again."""
    return Problem(429, detail, headers={"Retry-After": str(seconds)})


def internal_error() -> Problem:
    return Problem(500, "an internal error of the relay; its log says more", closes=True)


def problem_of_aiohttp(error: web.HTTPException) -> Problem:
    """Convert an error of aiohttp: unknown path, wrong method, body too large."""
    if isinstance(error, web.HTTPNotFound):
        return Problem(404, "no such path; see /openapi.json")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        text = f"method {error.method[:20]} is not allowed; expected {allowed}"
        return Problem(405, text, headers={"Allow": allowed})
    return Problem(error.status, error.reason, closes=True)


def page_headers(scripts: str) -> Mapping[str, str]:
    """Return the headers of a page, which runs its own scripts and loads nothing else.

    `scripts` is a source expression of CSP. Trusted types keep its own scripts from inserting text
    as markup.
    """
    policy = (
        "default-src 'none'",
        f"script-src {scripts}",
        "style-src 'self'",
        "img-src data:",  # the page's icon; without one, browsers ask for /favicon.ico
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), display-capture=(), geolocation=(), microphone=(), "
        "payment=(), usb=()",
        "Referrer-Policy": "no-referrer",
        "X-Frame-Options": "DENY",
        "X-Robots-Tag": "noindex, nofollow",
    }


_PROBLEM_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title} – imds-relay</title>
<link rel="stylesheet" href="{style}">
</head>
<body><main><div class="card"><h1>{title}</h1><p>{text}</p>{link}</div></main></body>
</html>
"""


def problem_page(problem: Problem, path: str) -> web.Response:
    """Return the problem as a page at this path. Its texts may contain what others wrote."""
    title, link = HTTPStatus(problem.status).phrase, ""
    if problem.link is not None:
        title = "You are not signed in"
        link = f'<p><a href="{escape(problem.link)}">Back to the relay\'s page</a></p>'
    text = f"{problem.detail[:1].upper()}{problem.detail[1:]}".removesuffix(".")
    style = "../" * (path.count("/") - 1) + "page/style.css"  # below a path of a proxy, too
    page = _PROBLEM_PAGE.format(title=title, style=style, text=escape(f"{text}."), link=link)
    headers = {**page_headers("'none'"), **problem.headers}
    response = bytes_response(problem.status, page.encode(), "text/html; charset=utf-8", headers)
    if problem.closes:
        response.force_close()
    return response
