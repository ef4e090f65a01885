"""`/v1/callbacks/{client}`: the decisions of `/v1/approvals`, with a signature instead of a key."""

from __future__ import annotations

from aiohttp import web

from relay.api.routes.approvals import submit_decision
from relay.api.schema.route import Parameter, Route
from relay.approvals.request import DecisionBody

_PARAMETERS = (
    Parameter(
        name="webhook-id",
        place="header",
        description="identifies a repeat, which gets the first answer again",
        required=True,
    ),
    Parameter(
        name="webhook-timestamp",
        place="header",
        description="seconds since 1970, at most 300 s ago and 60 s ahead",
        pattern="^[0-9]{1,12}$",
        required=True,
    ),
    Parameter(
        name="webhook-signature",
        place="header",
        description="v1,<base64> once for each secret, separated by spaces",
        required=True,
    ),
)


def _request_id(request: web.Request) -> str:
    return request.headers["webhook-id"]  # present and valid, as the signature was verified


ROUTES = (
    Route(
        method="POST",
        path="/v1/callbacks/{client}",
        summary="the same as POST /v1/approvals, "
        "signed as Standard Webhooks with that client's secret",
        handler=submit_decision,
        status=202,
        access="signature",
        parameters=_PARAMETERS,
        parse_parameters=_request_id,
        body=DecisionBody,
        problem_statuses=(403, 404, 409),
    ),
)
