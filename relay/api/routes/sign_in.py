"""`/sign-in`, `/sign-out` and `/v1/session`: people sign in on the relay's pages.

`relay.api.auth.sign_in` has the flow. Nobody is signed in by a call that another site begins: a
sign-in begins on a page of the relay, and the person chooses the account.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiohttp import web
from typing_extensions import TypedDict

from relay.api.auth.authentication import ANONYMOUS
from relay.api.auth.entra_settings import CALLBACK_PATH
from relay.api.auth.pending_sign_in import PENDING_LIFETIME, SignInRefused
from relay.api.auth.sessions import (
    PENDING_COOKIE,
    SESSION_COOKIE,
    SESSION_LIFETIME,
    check_sent_by_own_page,
)
from relay.api.schema.html_headers_and_problems import ProblemWithLink
from relay.api.schema.responses import Problem, make_bytes_http_response, make_json_http_response
from relay.api.schema.route import SESSION, Call, Parameter, Route
from relay.approvals.request import Right
from relay.log_fields import log_extra

if TYPE_CHECKING:
    from relay.api.auth.sign_in import SignIn

_RIGHTS: tuple[Right, ...] = ("read", "approve", "hold", "operate")
_PATH = "/sign-in"
_NOT_SIGNED_IN = "You are not signed in"
_log = logging.getLogger(__name__)


class SessionInfo(TypedDict):
    """Who calls, and whether people can sign in."""

    signIn: str | None
    """The path at which a sign-in begins, with the parameter `to`; null: it is not configured."""
    principal: str | None
    """The principal of the caller; null: the call has no good credentials."""
    name: str | None
    """What the person of a session is called. It can change, and is not unique."""
    can: list[Right]
    """What the caller may do."""


def _sign_in_of(call: Call) -> SignIn:
    """Return what lets people sign in. Raises Problem 404 if it is not configured."""
    if call.server.sign_in is None:
        raise Problem(404, "nobody can sign in here: it is not configured")
    return call.server.sign_in


async def _begin(call: Call) -> web.Response:
    sign_in, request = _sign_in_of(call), call.request
    _refuse_cross_site_sign_in(request, sign_in)
    targets = request.query.getall("to", ["/"])
    try:
        url, pending = await sign_in.begin(targets[0] if len(targets) == 1 else "")
    except ValueError as error:
        raise Problem(400, f"to: {error}") from None
    except SignInRefused as error:
        raise _record_refusal_and_make_problem(call, error, sign_in) from None
    response = _redirect(url)
    PENDING_COOKIE.set_on_response(response, pending.cookie, seconds=PENDING_LIFETIME)
    return response


def _refuse_cross_site_sign_in(request: web.Request, sign_in: SignIn) -> None:
    """Raise ProblemWithLink 403 for a sign-in that a page of another site begins."""
    site = request.headers.get("Sec-Fetch-Site", "none")
    destination = request.headers.get("Sec-Fetch-Dest", "document")
    if site not in ("same-origin", "none") or destination != "document":
        raise ProblemWithLink(
            403,
            "a page of another site sent you here to sign in. Begin on the relay's own page",
            title=_NOT_SIGNED_IN,
            link=sign_in.url_of_path("/"),
            link_text="The relay's page",
        )


async def _finish(call: Call) -> web.Response:
    sign_in, request = _sign_in_of(call), call.request
    try:
        cookie, target = await sign_in.finish(
            PENDING_COOKIE.read_value_from_request(request),
            request.rel_url,
            SESSION_COOKIE.read_value_from_request(request),
        )
    except SignInRefused as error:
        raise _record_refusal_and_make_problem(call, error, sign_in) from None
    _log_session_action(sign_in, cookie, "signed in")
    response = _redirect(sign_in.url_of_path(target))
    PENDING_COOKIE.clear_on_response(response)
    SESSION_COOKIE.set_on_response(response, cookie, seconds=SESSION_LIFETIME)
    return response


def _record_refusal_and_make_problem(call: Call, error: SignInRefused, sign_in: SignIn) -> Problem:
    """Return the problem of a sign-in that failed, and log its reason."""
    problem = ProblemWithLink(
        error.status,
        error.advice,
        title=_NOT_SIGNED_IN,
        link=sign_in.url_of_path(error.target or "/"),
        link_text="Back to the relay's page",
    )
    return call.server.rates.refuse(call.request, f"sign-in: {error}", problem)


def _redirect(url: str) -> web.Response:
    headers = {"Location": url, "Referrer-Policy": "no-referrer"}
    return make_bytes_http_response(303, b"", "text/html; charset=utf-8", headers)


async def _show_session(call: Call) -> SessionInfo | web.Response:
    session, caller = call.request.get(SESSION), call.caller
    is_known = caller is not ANONYMOUS
    info = _make_session_info(
        call,
        principal=caller.principal if is_known else None,
        name=None if session is None else session.name,
        can=[right for right in _RIGHTS if right in caller.rights.can],
    )
    cookie, sign_in = SESSION_COOKIE.read_value_from_request(call.request), call.server.sign_in
    if cookie is None or sign_in is None or sign_in.sessions.find(cookie) is not None:
        return info
    response = make_json_http_response(200, info)
    SESSION_COOKIE.clear_on_response(response)
    return response


async def _sign_out(call: Call) -> SessionInfo | web.Response:
    sign_in, cookie = _sign_in_of(call), SESSION_COOKIE.read_value_from_request(call.request)
    check_sent_by_own_page(call.request, sign_in.origin)
    if cookie is not None:
        _log_session_action(sign_in, cookie, "signed out")
        call.server.end_session(cookie)
    response = make_json_http_response(
        200, _make_session_info(call, principal=None, name=None, can=[])
    )
    SESSION_COOKIE.clear_on_response(response)
    return response


def _log_session_action(sign_in: SignIn, cookie: str, action: str) -> None:
    """Tell in the log what the person of an open session does."""
    session = sign_in.sessions.find(cookie)
    if session is not None:
        principal = session.caller.principal
        _log.info("%s %s", principal, action, extra=log_extra(principal=principal))


def _make_session_info(
    call: Call, *, principal: str | None, name: str | None, can: list[Right]
) -> SessionInfo:
    path = None if call.server.sign_in is None else _PATH
    return SessionInfo(signIn=path, principal=principal, name=name, can=can)


ROUTES = (
    Route(
        method="GET",
        path="/v1/session",
        summary="who calls, and whether people can sign in; never refused",
        handler=_show_session,
        access="key or public",
    ),
    Route(
        method="GET",
        path=_PATH,
        summary="begin to sign in: a browser goes on to Entra ID, and comes back to `to`",
        handler=_begin,
        status=303,
        access="handler",
        media_types=("text/html",),
        parameters=(
            Parameter(
                name="to",
                place="query",
                description="the path of this relay to which the browser goes afterwards; "
                "default: /",
                pattern=r"^/",
            ),
        ),
        shows_problems=True,
        problem_statuses=(403, 404, 502),
    ),
    Route(
        method="GET",
        path=CALLBACK_PATH,
        summary="end a sign-in: Entra ID sends the browser here",
        handler=_finish,
        status=303,
        access="handler",
        media_types=("text/html",),
        shows_problems=True,
        problem_statuses=(403, 404, 502),
    ),
    Route(
        method="POST",
        path="/sign-out",
        summary="end the session of the browser; only the relay's own pages may do so",
        handler=_sign_out,
        access="public",
        problem_statuses=(403, 404),
    ),
)
