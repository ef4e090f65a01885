"""`/v1/approvals`: decisions about events, and the mode of approvals; `/v1/standing-holds`.

`/v1/callbacks/{client}` takes the same decisions, with a signature instead of a key. The gate
checks and records a decision, and answers with the status and the body that the caller gets: 202 if
it was recorded, else the members of a problem. A repeat of a request gets its first answer again.
`/v1/chat/{sink}` takes what somebody clicks or types in a chat. The chat sink verifies that the
platform made the call.

A standing hold keeps the relay from starting every event that meets its conditions, also events
still to come. The gate makes, finds and ends standing holds. On an agent of a fleet it raises
NotDecidedHere, because the hub has them: the server answers 409.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal, NotRequired, cast

from aiohttp import web
from typing_extensions import TypedDict

from relay.api.calls import PAGE_SIZE, Call, Cursor, Parameter, flag, get, get_page, post, put
from relay.api.responses import COMMON_HEADERS, Problem
from relay.approvals.request import HOLD_NOTICE, DecisionAnswer, DecisionBody, DecisionKind
from relay.approvals.standing_holds import (
    CreateRequest,
    EndBody,
    EndRequest,
    StandingHoldBody,
    has_begun,
    standing_hold_to_json_object,
)
from relay.chat import CallbackRefused
from relay.events.data_types import (
    EndedStandingHoldData,
    LimitWait,
    StandingHoldData,
    StandingHoldInForce,
)
from relay.events.timestamps import format_rfc3339
from relay.settings import RequestBody
from relay.store import Mode, StandingHold
from relay.store.rows import PageLimit

RequestId = Annotated[
    str | None,
    Parameter(
        "Idempotency-Key",
        "identifies a repeat, which gets the first answer again; or use webhook-id",
        r"^[\x21-\x7e]{1,256}$",
        "at most 256 visible ASCII characters",
        place="header",
        other_headers=("webhook-id",),
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
    """Only in a dry run, and of a hold after a StartRequest that Azure may have accepted."""
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
    now = call.relay.clock.now()
    request = body.to_request(call.caller, now, call.content, request_id=request_id)
    answer = await call.relay.gate.submit(request)
    return cast("DecisionRecorded", body_of_accepted(answer))


@post(
    "/v1/callbacks/{client}",
    "the same as POST /v1/approvals, signed as Standard Webhooks with that client's secret",
    status=202,
    access="signature",
    problems=(403, 409),
)
async def decide_by_callback(call: Call, body: DecisionBody) -> DecisionRecorded:
    # The header is there and valid, as the signature was verified.
    return await decide(call, call.request.headers["webhook-id"], body)


def body_of_accepted(answer: DecisionAnswer) -> dict[str, Any]:
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
    access="public",
    problems=(401, 429, 503),
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


_OVER = flag("over", "true: also those that were ended or expired")


class StandingHoldDetails(StandingHoldData):
    """A hold by conditions and for a time."""

    state: Literal["upcoming", "active", "ended", "expired"]
    """active: its time is now; with hours in its match it applies within these only."""
    endedAt: NotRequired[str]  # noqa: N815
    """RFC 3339: when it was ended or expired."""
    endedBy: NotRequired[str]  # noqa: N815
    """Who ended it early."""


class StandingHoldPage(TypedDict):
    """A page of standing holds, the newest first."""

    items: list[StandingHoldDetails]
    next: str | None


@get_page(
    "/v1/standing-holds",
    f"holds by conditions and for a time, that are not over; {HOLD_NOTICE}",
    problems=(409,),
)
async def list_holds(
    call: Call, cursor: Cursor, over: Annotated[bool | None, _OVER]
) -> StandingHoldPage:
    async with call.server.long_reads:  # the gate reads the page from the store
        holds, has_more = await call.relay.gate.read_standing_holds(
            lambda holds: holds.page(cursor, PageLimit(PAGE_SIZE), only_open=not over)
        )
    return StandingHoldPage(
        items=[_details(call, hold) for hold in holds],
        next=str(holds[-1].position) if has_more else None,
    )


@post(
    "/v1/standing-holds",
    f"hold every event that can meet conditions, also later ones; {HOLD_NOTICE}",
    status=201,
    needs="operate",
    problems=(409,),
)
async def create_hold(
    call: Call, request_id: RequestId, body: StandingHoldBody
) -> StandingHoldData:
    answer = await call.relay.gate.submit(
        CreateRequest(
            caller=call.caller,
            at=call.relay.clock.now(),
            request_id=request_id,
            digest=_request_digest(call),
            body=body,
        )
    )
    return cast("StandingHoldData", body_of_accepted(answer))


@get(
    "/v1/standing-holds/{holdId}",
    "one standing hold, also one that is over",
    needs="read",
    problems=(409,),
)
async def show_hold(call: Call, hold_id: str) -> StandingHoldDetails:
    return _details(call, await _find(call, hold_id))


@post(
    "/v1/standing-holds/{holdId}/end", "end a standing hold early", needs="operate", problems=(409,)
)
async def end_hold(
    call: Call, hold_id: str, request_id: RequestId, body: EndBody
) -> EndedStandingHoldData:
    await _find(call, hold_id)
    answer = await call.relay.gate.submit(
        EndRequest(
            caller=call.caller,
            at=call.relay.clock.now(),
            request_id=request_id,
            digest=_request_digest(call),
            hold_id=hold_id,
            reason=body.reason,
        )
    )
    return cast("EndedStandingHoldData", body_of_accepted(answer))


async def _find(call: Call, hold_id: str) -> StandingHold:
    hold = await call.relay.gate.read_standing_holds(lambda holds: holds.find(hold_id))
    if hold is None:
        raise Problem(404, "no such standing hold; see GET /v1/standing-holds")
    return hold


def _request_digest(call: Call) -> str:
    """Return what a repeat has in common with the first request: the path and the body."""
    return hashlib.sha256(f"{call.request.path}\n".encode() + call.content).hexdigest()


def _details(call: Call, hold: StandingHold) -> StandingHoldDetails:
    details = cast("StandingHoldDetails", standing_hold_to_json_object(hold))
    now = call.relay.clock.now()
    if hold.ended_by is not None:
        details["state"] = "ended"
        details["endedBy"] = hold.ended_by
    elif hold.ended is not None or hold.ends <= now:
        details["state"] = "expired"
    else:
        details["state"] = "active" if has_begun(hold, now) else "upcoming"
    if hold.ended is not None:
        details["endedAt"] = format_rfc3339(hold.ended)
    return details
