"""What HTML pages have in common: headers that restrict them, and problems as pages.

The routes of pages send `html_page_security_headers` with their files. The server sends
`problem_page` in place of JSON for the routes that a browser opens as a page
(`Route.shows_problems`). Such a problem contains no script.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from html import escape
from http import HTTPStatus
from typing import Any

from aiohttp import web

from relay.api.schema.responses import Problem, make_bytes_http_response


def html_page_security_headers(*, script_source: str, style_source: str) -> Mapping[str, str]:
    """Return the headers of a page, which runs its own scripts and loads nothing else.

    The sources are source expressions of CSP. Trusted types keep the page's own scripts from
    inserting text as markup.
    """
    policy = (
        "default-src 'none'",
        f"script-src {script_source}",
        f"style-src {style_source}",
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


def hash_source(content: bytes) -> str:
    """Return the source expression of CSP that allows exactly this inline script or style.

    Source: https://www.w3.org/TR/CSP3/, section 2.3.1.
    """
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


_STYLE = """
:root { color-scheme: light dark; --page: #f2f4f7; --card: #fff; --ink: #1b1f24; --line: #d5dae1;
  --act: #0b57c2; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0e1116; --card: #181c23; --ink: #e8eaed; --line: #343b46; --act: #8ab8ff; }
}
body { margin: 0; background: var(--page); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; }
main { max-width: 38rem; margin: 1rem auto; padding: 1.25rem; background: var(--card);
  border: 1px solid var(--line); border-radius: .75rem; }
h1 { font-size: 1.4rem; line-height: 1.25; margin: 0; }
a { color: var(--act); }
"""
_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": f"default-src 'none'; style-src {hash_source(_STYLE.encode())}; "
    "img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "X-Robots-Tag": "noindex, nofollow",
}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title} – imds-relay</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p>{text}</p>
{link}</main>
</body>
</html>
"""


class ProblemWithLink(Problem):
    """A problem with a heading and a link for the person who reads it."""

    def __init__(self, status: int, detail: str, *, title: str, link: str, link_text: str) -> None:
        super().__init__(status, detail)
        self.title = title
        self.link = link
        self.link_text = link_text


def problem_page(problem: Problem) -> web.Response:
    """Return the problem as a page. Its texts are escaped: they may contain what others wrote."""
    link, title = "", HTTPStatus(problem.status).phrase
    if isinstance(problem, ProblemWithLink):
        title = problem.title
        link = f'<p><a href="{escape(problem.link)}">{escape(problem.link_text)}</a></p>\n'
    page = _PAGE.format(
        title=escape(title),
        style=_STYLE,
        text=escape(_to_sentence(problem.detail)),
        link=link,
    )
    headers: dict[str, Any] = {**_HEADERS, **problem.headers}
    response = make_bytes_http_response(
        problem.status, page.encode(), "text/html; charset=utf-8", headers
    )
    if problem.closes:
        response.force_close()
    return response


def _to_sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
