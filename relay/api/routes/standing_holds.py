"""`/v1/standing-holds`: holds by conditions and for a time, also of events still to come.

A standing hold keeps the relay from starting every event that meets its conditions. The gate makes,
finds and ends standing holds. On an agent of a fleet it raises NotDecidedHere, because the hub has
them: the server answers 409.
"""

from __future__ import annotations

import hashlib
from typing import Literal, NotRequired, cast

from typing_extensions import TypedDict

from relay.api.routes.approvals import IDEMPOTENCY_KEY, parse_request_id
from relay.api.schema.responses import Problem
from relay.api.schema.route import PAGE_SIZE, Call, Parameter, Route, page_route, parse_cursor
from relay.approvals.request import HOLD_NOTICE, DecisionAnswer
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

_OVER = Parameter(
    name="over",
    place="query",
    description="true: also those that were ended or expired",
    pattern=r"^(true|false)$",
)


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


async def _list(call: Call) -> StandingHoldPage:
    only_open = _OVER.read_from_query(call.request, "true or false") != "true"
    cursor = parse_cursor(call.request)
    async with call.server.long_reads:  # the gate reads the page from the store
        holds, has_more = await call.relay.gate.read_standing_holds(
            lambda holds: holds.page(cursor, PageLimit(PAGE_SIZE), only_open=only_open)
        )
    return StandingHoldPage(
        items=[_standing_hold_details(call, hold) for hold in holds],
        next=str(holds[-1].position) if has_more else None,
    )


async def _find(call: Call) -> StandingHold:
    hold_id = call.request.match_info["holdId"]
    hold = await call.relay.gate.read_standing_holds(lambda holds: holds.find(hold_id))
    if hold is None:
        raise Problem(404, "no such standing hold; see GET /v1/standing-holds")
    return hold


async def _show(call: Call) -> StandingHoldDetails:
    return _standing_hold_details(call, await _find(call))


async def _create(call: Call) -> StandingHoldData:
    request_id = parse_request_id(call.request)
    body: StandingHoldBody = call.body
    answer = await call.relay.gate.submit(
        CreateRequest(
            caller=call.caller,
            at=call.relay.clock.now(),
            request_id=request_id,
            digest=_request_digest(call),
            body=body,
        )
    )
    return cast("StandingHoldData", _body_if_accepted(answer))


async def _end(call: Call) -> EndedStandingHoldData:
    request_id = parse_request_id(call.request)
    body: EndBody = call.body
    await _find(call)
    answer = await call.relay.gate.submit(
        EndRequest(
            caller=call.caller,
            at=call.relay.clock.now(),
            request_id=request_id,
            digest=_request_digest(call),
            hold_id=call.request.match_info["holdId"],
            reason=body.reason,
        )
    )
    return cast("EndedStandingHoldData", _body_if_accepted(answer))


def _body_if_accepted(answer: DecisionAnswer) -> dict[str, object]:
    if answer.status >= 400:  # HTTP
        raise Problem(answer.status, **answer.body)
    return dict(answer.body)


def _request_digest(call: Call) -> str:
    """Return what a repeat has in common with the first request: the path and the body."""
    return hashlib.sha256(f"{call.request.path}\n".encode() + call.content).hexdigest()


def _standing_hold_details(call: Call, hold: StandingHold) -> StandingHoldDetails:
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


ROUTES = (
    page_route(
        "/v1/standing-holds",
        f"holds by conditions and for a time, that are not over; {HOLD_NOTICE}",
        _list,
        filters=(_OVER,),
        problem_statuses=(409,),
    ),
    Route(
        method="POST",
        path="/v1/standing-holds",
        summary=f"hold every event that can meet conditions, also later ones; {HOLD_NOTICE}",
        handler=_create,
        status=201,
        needs="hold",
        parameters=(IDEMPOTENCY_KEY,),
        body=StandingHoldBody,
        problem_statuses=(409,),
    ),
    Route(
        method="GET",
        path="/v1/standing-holds/{holdId}",
        summary="one standing hold, also one that is over",
        handler=_show,
        needs="read",
        problem_statuses=(404, 409),
    ),
    Route(
        method="POST",
        path="/v1/standing-holds/{holdId}/end",
        summary="end a standing hold early: its author, or whoever has the right operate",
        handler=_end,
        parameters=(IDEMPOTENCY_KEY,),
        body=EndBody,
        problem_statuses=(403, 404, 409),
    ),
)
