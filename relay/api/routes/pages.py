"""`/`, the page for people, and `/sign-in`, `/sign-out` and `/v1/session`: they sign in there.

The page holds no data: its scripts call the API with the reader's credentials. Its files are in
`relay/api/page/`, and are read for each call, so that a relay without readers spends no memory.
`relay.api.sign_in` has the flow of a sign-in. Nobody is signed in by a call that another site
begins: a sign-in begins on a page of the relay, and the person chooses the account.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING

from aiohttp import web
from typing_extensions import TypedDict

from relay.api.callers import ANONYMOUS, NotAuthenticated
from relay.api.calls import Call, get, post
from relay.api.responses import Problem, bytes_response, json_response, page_headers
from relay.api.sessions import PENDING_COOKIE, SESSION, SESSION_COOKIE, check_sent_by_own_page
from relay.api.settings import CALLBACK_PATH
from relay.approvals.request import Right
from relay.logs import log_extra

if TYPE_CHECKING:
    from relay.api.sign_in import SignIn

_SIGN_IN = "/sign-in"
_log = logging.getLogger(__name__)
_DIRECTORY = resources.files("relay.api").joinpath("page")
_FILES = frozenset(file.name for file in _DIRECTORY.iterdir())
_CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}


@get(
    "/",
    "the page for people: what is scheduled, what happened, and the relay's health",
    access="public",
    media_types=("text/html",),
)
async def show_index(_call: Call) -> web.Response:
    return await _send("index.html")


@get(
    "/page/{file}",
    "the scripts and the style of the page",
    access="public",
    media_types=("text/javascript", "text/css", "text/html"),
)
async def show_file(_call: Call, file: str) -> web.Response:
    if file not in _FILES:
        raise Problem(404, "no such file of the page")
    return await _send(file)


async def _send(name: str) -> web.Response:
    content = await asyncio.to_thread(_DIRECTORY.joinpath(name).read_bytes)
    content_type = _CONTENT_TYPES[name.rpartition(".")[2]]
    return bytes_response(200, content, content_type, page_headers("'self'"))


class SessionInfo(TypedDict):
    """Who calls, and whether people can sign in."""

    signIn: str | None
    """The path at which a sign-in begins; null: it is not configured."""
    principal: str | None
    """The principal of the caller; null: the call has no good credentials."""
    name: str | None
    """What the person of a session is called. It can change, and is not unique."""
    can: list[Right]


@get(
    "/v1/session",
    "who calls, and whether people can sign in; never refused",
    access="key or public",
)
async def show_session(call: Call) -> SessionInfo | web.Response:
    session, caller = call.request.get(SESSION), call.caller
    sign_in = call.server.callers.sign_in
    rights: tuple[Right, ...] = ("read", "approve", "hold", "operate")
    info = SessionInfo(
        signIn=None if sign_in is None else _SIGN_IN,
        principal=None if caller is ANONYMOUS else caller.principal,
        name=None if session is None else session.name,
        can=[right for right in rights if right in caller.rights.can],
    )
    cookie = SESSION_COOKIE.read(call.request)
    if cookie is None or sign_in is None or sign_in.sessions.find(cookie) is not None:
        return info
    response = json_response(200, info)
    SESSION_COOKIE.give(response, None)
    return response


_get_redirect = partial(get, status=303, access="public", media_types=("text/html",))
_get_sign_in = partial(_get_redirect, shows_problems=True, problems=(403, 404, 429, 502, 503))


@_get_redirect("/approve", "where links in older messages led: goes on to the page")
async def open_old_link(_call: Call) -> web.Response:
    # Relative, because a proxy may serve the relay below a path. Without a fragment of its own the
    # browser would keep that of the link.
    return _redirect("./#/")


@_get_sign_in(
    _SIGN_IN, "begin to sign in: a browser goes on to Entra ID, and comes back to the page"
)
async def begin(call: Call) -> web.Response:
    sign_in = _sign_in_of(call)
    site = call.request.headers.get("Sec-Fetch-Site", "none")
    destination = call.request.headers.get("Sec-Fetch-Dest", "document")
    if site not in ("same-origin", "none") or destination != "document":
        text = "a page of another site sent you here to sign in. Begin on the relay's own page"
        raise Problem(403, text, link=sign_in.page)
    try:
        url, pending = await sign_in.begin()
    except NotAuthenticated as error:
        raise _refuse(call, error, sign_in) from None
    response = _redirect(url)
    PENDING_COOKIE.give(response, pending)
    return response


@_get_sign_in(CALLBACK_PATH, "end a sign-in: Entra ID sends the browser here")
async def finish(call: Call) -> web.Response:
    sign_in, request = _sign_in_of(call), call.request
    pending, old_session = PENDING_COOKIE.read(request), SESSION_COOKIE.read(request)
    try:
        cookie = await sign_in.finish(pending, request.rel_url, old_session)
    except NotAuthenticated as error:
        raise _refuse(call, error, sign_in) from None
    _log_action(sign_in, cookie, "signed in")
    response = _redirect(sign_in.page)
    PENDING_COOKIE.give(response, None)
    SESSION_COOKIE.give(response, cookie)
    return response


@post(
    "/sign-out",
    "end the session of the browser; only the relay's own pages may do so",
    access="public",
    problems=(403, 404),
)
async def sign_out(call: Call) -> SessionInfo | web.Response:
    sign_in, cookie = _sign_in_of(call), SESSION_COOKIE.read(call.request)
    check_sent_by_own_page(call.request, sign_in.origin)
    if cookie is not None:
        _log_action(sign_in, cookie, "signed out")
        sign_in.sessions.end(cookie)
        call.server.wake_streams()
    response = json_response(200, SessionInfo(signIn=_SIGN_IN, principal=None, name=None, can=[]))
    SESSION_COOKIE.give(response, None)
    return response


def _sign_in_of(call: Call) -> SignIn:
    sign_in = call.server.callers.sign_in
    if sign_in is None:
        raise Problem(404, "nobody can sign in here: it is not configured")
    return sign_in


def _refuse(call: Call, error: NotAuthenticated, sign_in: SignIn) -> Problem:
    assert error.problem is not None  # noqa: S101  # that of a sign-in has advice
    problem = Problem(error.problem.status, error.problem.detail, link=sign_in.page)
    return call.server.rates.refuse(call.request, f"sign-in: {error}", problem)


def _redirect(url: str) -> web.Response:
    headers = {"Location": url, "Referrer-Policy": "no-referrer"}
    return bytes_response(303, b"", "text/html; charset=utf-8", headers)


def _log_action(sign_in: SignIn, cookie: str, action: str) -> None:
    session = sign_in.sessions.find(cookie)
    if session is not None:
        principal = session.caller.principal
        _log.info("%s %s", principal, action, extra=log_extra(principal=principal))
