"""`/v1/approvals`: decisions about events, and the mode of approvals.

`/v1/callbacks/{client}` takes the same decisions, with a signature instead of a key. The gate
checks and records a decision, and answers with the status and the body that the caller gets: 202 if
it was recorded, else the members of a problem. A repeat of a request gets its first answer again.
"""

from __future__ import annotations

import re
from typing import Literal, NotRequired, cast

from aiohttp import web
from typing_extensions import TypedDict

from relay.api.schema.responses import Problem
from relay.api.schema.route import Call, Parameter, Route
from relay.approvals.request import HOLD_NOTICE, DecisionAnswer, DecisionBody, DecisionKind
from relay.events.data_types import LimitWait, StandingHoldInForce
from relay.store import Mode
from relay.validation import RequestBody

IDEMPOTENCY_KEY = Parameter(
    name="Idempotency-Key",
    place="header",
    description="identifies a repeat, which gets the first answer again; or use webhook-id",
    pattern=r"^[\x21-\x7e]{1,256}$",
)
_REQUEST_ID = re.compile(IDEMPOTENCY_KEY.pattern)
_SIGNATURE_PARAMETERS = (
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


class DecisionRecorded(TypedDict):
    """The decision is on disk."""

    approvalId: str
    eventId: str
    decision: DecisionKind
    state: Literal["granted", "waiting", "pending", "held", "released"]
    votes: int
    required: int
    rule: str | None
    notice: NotRequired[str]
    """Only of a hold after an earlier StartRequest, which Azure may have accepted."""
    waitingFor: NotRequired[list[LimitWait]]
    """The limits that alone keep this relay from starting the event."""
    standingHolds: NotRequired[list[StandingHoldInForce]]
    """The standing holds that keep this relay from starting the event."""


class ApprovalModeRequest(RequestBody):
    """The mode that approvals should have."""

    mode: Mode


class ApprovalMode(TypedDict):
    """The mode of approvals: the stricter of the configured and the requested mode."""

    mode: Mode


async def _submit_decision(call: Call) -> DecisionRecorded:
    return await _submit(call, request_id=parse_request_id(call.request))


async def _submit_decision_of_signed_request(call: Call) -> DecisionRecorded:
    headers = call.request.headers  # present and valid, as the signature was verified
    return await _submit(call, request_id=headers["webhook-id"])


async def _submit(call: Call, *, request_id: str | None) -> DecisionRecorded:
    body: DecisionBody = call.body
    answer = await call.relay.gate.submit(
        body.to_request(
            call.caller,
            call.relay.clock.now(),
            call.content,
            request_id=request_id,
        )
    )
    return require_accepted_answer_body(answer)


def require_accepted_answer_body(answer: DecisionAnswer) -> DecisionRecorded:
    """Return the body of the gate's answer. Raises Problem if the decision was refused."""
    if not answer.accepted:
        raise Problem(answer.status, **answer.body)
    return cast("DecisionRecorded", dict(answer.body))


def parse_request_id(request: web.Request) -> str | None:
    """Return what identifies a repeat of the request, or None. Raises Problem 400."""
    request_ids = {
        value
        for name in (IDEMPOTENCY_KEY.name, "webhook-id")
        for value in request.headers.getall(name, [])
    }
    is_valid = all(_REQUEST_ID.fullmatch(request_id) for request_id in request_ids)
    if len(request_ids) > 1 or not is_valid:
        raise Problem(
            400, f"expected one {IDEMPOTENCY_KEY.name} of at most 256 visible ASCII characters"
        )
    return next(iter(request_ids), None)


async def _set_approval_mode(call: Call) -> ApprovalMode:
    body: ApprovalModeRequest = call.body
    mode = await call.relay.gate.set_approval_mode(body.mode, call.caller.principal)
    return ApprovalMode(mode=mode)


ROUTES = (
    Route(
        method="POST",
        path="/v1/approvals",
        summary=f"approve an event, hold it, or release it; {HOLD_NOTICE}",
        handler=_submit_decision,
        status=202,
        parameters=(IDEMPOTENCY_KEY,),
        body=DecisionBody,
        problem_statuses=(403, 404, 409),
    ),
    Route(
        method="PUT",
        path="/v1/approvals/mode",
        summary="set approvals to on, dry-run or off; remembered across restarts",
        handler=_set_approval_mode,
        needs="operate",
        body=ApprovalModeRequest,
        problem_statuses=(409,),
    ),
    Route(
        method="POST",
        path="/v1/callbacks/{client}",
        summary="the same as POST /v1/approvals, "
        "signed as Standard Webhooks with that client's secret",
        handler=_submit_decision_of_signed_request,
        status=202,
        access="signature",
        parameters=_SIGNATURE_PARAMETERS,
        body=DecisionBody,
        problem_statuses=(403, 404, 409),
    ),
)
