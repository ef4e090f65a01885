"""``/v1/callbacks/{client}``: the same decisions as `relay.api.routes.approvals` takes, signed instead of sent with a key."""

from __future__ import annotations

from aiohttp import web

from relay.api.routes.approvals import Accepted, decision, submit
from relay.api.schema.route import Parameter, Route
from relay.approvals.request import DecisionBody


def _read(request: web.Request, body: bytes) -> tuple[DecisionBody, str | None]:
    return decision(
        body, request.headers["webhook-id"]
    )  # there once, and well-formed: its signature was good


ROUTES = (
    Route(
        "POST",
        "/v1/callbacks/{client}",
        "the same as POST /v1/approvals, signed as Standard Webhooks with that client's secret",
        submit,
        {202: Accepted},
        access="signature",
        parse=_read,
        body=DecisionBody,
        parameters=(
            Parameter(
                "webhook-id",
                "header",
                "makes a repeat known: it gets the first answer again",
                required=True,
            ),
            Parameter(
                "webhook-timestamp",
                "header",
                "seconds since 1970, at most 300 s ago and 60 s ahead",
                "^[0-9]{1,12}$",
                required=True,
            ),
            Parameter(
                "webhook-signature",
                "header",
                "v1,<base64> once for each secret, with spaces between",
                required=True,
            ),
        ),
        problem_statuses=(403, 404, 409),
    ),
)
