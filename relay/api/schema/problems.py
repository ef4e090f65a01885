"""Errors as ``application/problem+json`` (RFC 9457): the one form in which this server says no."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NotRequired

from aiohttp import web
from typing_extensions import TypedDict

from relay.api.schema.responses import json_response

MEDIA = "application/problem+json"


class ProblemBody(TypedDict):
    """Why a call was not answered as it wished."""

    type: str
    """about:blank: the status says what kind of problem it is (RFC 9457, section 4.2.1)."""
    title: str
    status: int
    detail: str
    field: NotRequired[str]
    """The field that is wrong or missing: of 422, and of 403 where a link's code is."""
    revision: NotRequired[str]
    """Of 409: the event's revision as it is now."""


class Problem(Exception):
    """Raised wherever a call cannot be answered as it wishes. ``detail`` says why, and what to do; never a secret.

    ``closes``: the connection cannot be used further, as there may be more of the request that nobody will read.
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
        """The answer."""
        body = {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            **self.members,
        }
        response = json_response(self.status, body, media=MEDIA, headers=self.headers)
        if self.closes:
            response.force_close()
        return response


def too_many(detail: str, wait: float) -> Problem:
    """429; ``wait`` is in seconds."""
    seconds = math.ceil(wait)
    return Problem(
        429, f"{detail}; try again in {seconds} s", headers={"Retry-After": str(seconds)}
    )


def of_http(error: web.HTTPException) -> Problem:
    """What the library refuses by itself: no such path, not with that method, too large."""
    match error:
        case web.HTTPNotFound():
            return Problem(404, "no such path; see /openapi.json")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return Problem(
                405, f"not with {error.method[:20]}; expected {allowed}", headers={"Allow": allowed}
            )
        case _:
            return Problem(error.status, error.reason, closes=True)
