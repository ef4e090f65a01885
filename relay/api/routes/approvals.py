"""`/v1/approvals`: decisions about events, and the mode of approvals.

`/v1/callbacks/{client}` takes the same decisions, with a signature instead of a key. The gate
checks and records a decision, and answers with the status and the body that the caller gets: 202 if
it was recorded, else the members of a problem. A repeat of a request gets its first answer again.
`/v1/chat/{sink}` takes what somebody clicks or types in a chat. The chat sink verifies that the
platform made the call.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NotRequired, cast

from aiohttp import web
from typing_extensions import TypedDict

from relay.api.calls import Call, Parameter, post, put
from relay.api.responses import COMMON_HEADERS, Problem
from relay.approvals.request import HOLD_NOTICE, DecisionAnswer, DecisionBody, DecisionKind
from relay.chat import CallbackRefused
from relay.events.data_types import LimitWait, StandingHoldInForce
from relay.store import Mode
from relay.validation import RequestBody

_KEY = "Idempotency-Key"
_KEY_PATTERN = r"^[\x21-\x7e]{1,256}$"


def _read_request_id(request: web.Request) -> str | None:
    """Return what identifies a repeat of the request, or None. Raises Problem 400."""
    request_ids = {
        value for name in (_KEY, "webhook-id") for value in request.headers.getall(name, [])
    }
    is_valid = all(re.fullmatch(_KEY_PATTERN, each) for each in request_ids)
    if len(request_ids) > 1 or not is_valid:
        raise Problem(400, f"expected one {_KEY} of at most 256 visible ASCII characters")
    return next(iter(request_ids), None)


RequestId = Annotated[
    str | None,
    Parameter(
        name=_KEY,
        place="header",
        description="identifies a repeat, which gets the first answer again; or use webhook-id",
        pattern=_KEY_PATTERN,
        read_request=_read_request_id,
    ),
]


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


@post(
    "/v1/approvals",
    f"approve an event, hold it, or release it; {HOLD_NOTICE}",
    status=202,
    problems=(403, 404, 409),
)
async def decide(call: Call, request_id: RequestId, body: DecisionBody) -> DecisionRecorded:
    request = body.to_request(
        call.caller, call.relay.clock.now(), call.content, request_id=request_id
    )
    answer = await call.relay.gate.submit(request)
    return cast("DecisionRecorded", body_of_accepted(answer))


@post(
    "/v1/callbacks/{client}",
    "the same as POST /v1/approvals, signed as Standard Webhooks with that client's secret",
    status=202,
    access="signature",
    problems=(403, 404, 409),
)
async def decide_by_callback(call: Call, body: DecisionBody) -> DecisionRecorded:
    # The header is there and valid, as the signature was verified.
    return await decide(call, call.request.headers["webhook-id"], body)


def body_of_accepted(answer: DecisionAnswer) -> dict[str, Any]:
    """Return the body of the gate's answer. Raises Problem if it is a refusal."""
    if answer.status >= 400:  # HTTP
        raise Problem(answer.status, **answer.body)
    return dict(answer.body)


@put(
    "/v1/approvals/mode",
    "set approvals to on, dry-run or off; remembered across restarts",
    needs="operate",
    problems=(409,),
)
async def set_mode(call: Call, body: ApprovalModeRequest) -> ApprovalMode:
    mode = await call.relay.gate.set_approval_mode(body.mode, call.caller.principal)
    return ApprovalMode(mode=mode)


@post(
    "/v1/chat/{sink}",
    "a chat platform's own interaction, proved in the platform's own way",
    access="handler",
    problems=(401, 404),
)
async def answer_chat(call: Call, sink: str) -> dict[str, Any] | web.Response:
    chat = call.relay.chats.get(sink)
    if chat is None:
        raise Problem(404, "no chat sink of this name")
    try:
        reply = await chat.handle_callback(call.request.headers, call.content)
    except CallbackRefused as error:
        detail = "the call proves nothing, or cannot be read; the relay's log says more"
        problem = Problem(error.status, detail)
        raise call.server.rates.refuse(call.request, f"chat {sink}: {error}", problem) from None
    return web.Response(headers=COMMON_HEADERS) if reply is None else dict(reply)
