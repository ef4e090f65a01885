"""``/v1/approvals``: decisions about events, and the switch."""

from __future__ import annotations

import re
from typing import Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import TypedDict

from relay.api.schema.problems import Problem
from relay.api.schema.responses import json_response
from relay.api.schema.route import Call, Parameter, Route
from relay.approvals.authorize import HOLD_NOTICE
from relay.approvals.request import (
    DecisionAnswer,
    DecisionBody,
    DecisionKind,
    InvalidField,
    MalformedBody,
    parse_body,
    read_json,
)
from relay.outbox import Mode

_KEY = Parameter(
    "Idempotency-Key",
    "header",
    "makes a repeat known: it gets the first answer again; webhook-id does the same",
    pattern=r"^[\x21-\x7e]{1,256}$",
)
_FORM = re.compile(_KEY.pattern)


class Accepted(TypedDict):
    """The decision is on disk."""

    approvalId: str
    eventId: str
    decision: DecisionKind
    state: Literal["granted", "pending", "held", "released"]
    votes: int
    required: int
    rule: str | None


class Switch(BaseModel):
    """How approvals are to be."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    mode: Mode


class Switched(TypedDict):
    """How approvals are now: of the configuration and the switch the stricter."""

    mode: Mode


def decision(body: bytes, request_id: str | None) -> tuple[DecisionBody, str | None]:
    """A decision that was sent, and the id that makes a repeat of it known."""
    return parse_body(body), request_id


async def submit(call: Call) -> web.StreamResponse:
    """Hand a decision to the gate, and say what it says."""
    relay = call.relay
    body, request_id = call.content
    said: DecisionAnswer = await relay.gate.submit(
        body.to_request(call.caller, relay.clock.now(), call.body, request_id=request_id)
    )
    if not said.accepted:
        raise Problem(said.status, **said.body)
    return json_response(said.status, said.body)


def _read(request: web.Request, body: bytes) -> tuple[DecisionBody, str | None]:
    given = {
        value for name in (_KEY.name, "webhook-id") for value in request.headers.getall(name, [])
    }
    if len(given) > 1 or any(_FORM.fullmatch(value) is None for value in given):
        raise Problem(400, f"expected one {_KEY.name} of at most 256 visible ASCII characters")
    return decision(body, next(iter(given), None))


def _read_switch(_request: web.Request, body: bytes) -> Switch:
    try:
        return Switch.model_validate(read_json(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        if not first["loc"]:
            raise MalformedBody("expected a JSON object") from error
        raise InvalidField(".".join(str(part) for part in first["loc"]), first["msg"]) from error


async def _switch(call: Call) -> web.StreamResponse:
    mode = await call.relay.gate.set_mode(call.content.mode, call.caller.principal)
    return json_response(200, {"mode": mode})


ROUTES = (
    Route(
        "POST",
        "/v1/approvals",
        f"approve an event, hold it, or release it; {HOLD_NOTICE}",
        submit,
        {202: Accepted},
        parse=_read,
        body=DecisionBody,
        parameters=(_KEY,),
        problem_statuses=(403, 404, 409),
    ),
    Route(
        "PUT",
        "/v1/approvals/mode",
        "turn approvals on, to dry-run, or off; remembered over restarts",
        _switch,
        {200: Switched},
        needs="operate",
        parse=_read_switch,
        body=Switch,
    ),
)
