"""Responses in JSON and other formats. All errors are `application/problem+json` (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
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


def make_json_http_response(
    status: int,
    body: Any,
    *,
    media_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """Return a JSON response. `orjson.Fragment` marks parts of the body that are JSON already."""
    return make_bytes_http_response(status, orjson.dumps(body), media_type, headers)


def make_bytes_http_response(
    status: int, body: bytes, content_type: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return a response with this body and complete Content-Type."""
    return web.Response(
        status=status,
        body=body,
        headers={**COMMON_HEADERS, "Content-Type": content_type, **(headers or {})},
    )


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
    unread parts of the request may follow. `members` are further fields of the response.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        closes: bool = False,
        **members: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers or {}
        self.closes = closes
        self.members = members

    def to_response(self) -> web.Response:
        """Return the error response."""
        details = ProblemDetails(
            type="about:blank",
            title=HTTPStatus(self.status).phrase,
            status=self.status,
            detail=self.detail,
        )
        response = make_json_http_response(
            self.status,
            {**details, **self.members},
            media_type=PROBLEM_MEDIA_TYPE,
            headers=self.headers,
        )
        if self.closes:
            response.force_close()
        return response


def internal_error_problem() -> Problem:
    """Return a 500 for an error in the relay's own code, which the log describes."""
    return Problem(500, "an internal error of the relay; its log says more", closes=True)


def problem_from_http_exception(error: web.HTTPException) -> Problem:
    """Convert an error of aiohttp: unknown path, wrong method, body too large."""
    match error:
        case web.HTTPNotFound():
            return Problem(404, "no such path; see /openapi.json")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return Problem(
                405,
                f"method {error.method[:20]} is not allowed; expected {allowed}",
                headers={"Allow": allowed},
            )
        case _:
            return Problem(error.status, error.reason, closes=True)
