"""`/v1/standing-holds`: holds by conditions and for a time, also of events still to come.

A standing hold keeps the relay from starting every event that meets its conditions. The gate makes,
finds and ends standing holds. On an agent of a fleet it raises NotDecidedHere, because the hub has
them: the server answers 409.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, NotRequired, cast

from typing_extensions import TypedDict

from relay.api.calls import PAGE_SIZE, Call, Cursor, Parameter, flag, get, get_page, post
from relay.api.responses import Problem
from relay.api.routes.approvals import RequestId, body_of_accepted
from relay.approvals.request import HOLD_NOTICE
from relay.approvals.standing_holds import (
    CreateRequest,
    EndBody,
    EndRequest,
    StandingHoldBody,
    has_begun,
    standing_hold_to_json_object,
)
from relay.events.data_types import EndedStandingHoldData, StandingHoldData
from relay.events.timestamps import format_rfc3339
from relay.store import StandingHold
from relay.store.rows import PageLimit

_HoldId = Annotated[str, Parameter(name="holdId", place="path")]
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
    problems=(403, 409),
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
    problems=(404, 409),
)
async def show_hold(call: Call, hold_id: _HoldId) -> StandingHoldDetails:
    return _details(call, await _find(call, hold_id))


@post(
    "/v1/standing-holds/{holdId}/end",
    "end a standing hold early: its author, or whoever has the right operate",
    problems=(403, 404, 409),
)
async def end_hold(
    call: Call, hold_id: _HoldId, request_id: RequestId, body: EndBody
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
    """Return a standing hold with its state, which its events do not have."""
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
