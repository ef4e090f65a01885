"""``/v1/deliveries`` and ``/v1/dead-letters``: what was sent, what was given up and why, and sending that again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

import orjson
from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from relay.api.schema.paging import CURSOR, PAGE, cursor, page
from relay.api.schema.problems import Problem
from relay.api.schema.responses import json_response
from relay.api.schema.route import Call, Route
from relay.approvals.request import InvalidField, MalformedBody
from relay.delivery.dispatcher import redeliver, redeliver_matching
from relay.events.cloudevent import event_name
from relay.events.timestamps import format_rfc3339, parse_timestamp
from relay.outbox import EntryState
from relay.outbox.deliveries import DeadLetterFilter, Delivery

_ID = re.compile(r"[0-9]{1,18}", re.ASCII)


class DeliveryShown(TypedDict):
    """One event for one sink."""

    id: int
    sink: str
    eventId: str | None
    """null where it is not about an event."""
    type: str
    state: EntryState
    attempts: int
    nextAttempt: str | None
    reason: str | None
    lastStatus: int | None
    recorded: str
    settled: str | None


class DeliveriesShown(TypedDict):
    """A page of deliveries, the newest first."""

    items: list[DeliveryShown]
    next: str | None


class AttemptShown(TypedDict):
    """One try."""

    number: int
    at: str
    tookSeconds: float
    outcome: Literal["delivered", "deferred", "parked", "error"]
    status: int | None
    """The far side's status, where it gave one."""
    reason: str | None
    answer: str | None
    """At most the first KiB of what the far side said."""


class DeliveryInFull(DeliveryShown):
    """One event for one sink, and every try."""

    log: list[AttemptShown]


class Redelivered(TypedDict):
    """It goes out again, at once."""

    id: int
    sink: str
    state: EntryState


class RedeliveredSome(TypedDict):
    """So many go out again. For what is left, call again with `until` as it is here and `after` from `next`; null: nothing is."""

    redelivered: int
    left: int
    until: str
    next: int | None


def _whole(value: object) -> object:
    # 1.0 is an integer to JSON Schema, and to writers of JSON that have one kind of number.
    return int(value) if isinstance(value, float) and value.is_integer() else value


class WhichBody(BaseModel):
    """Which dead letters: those that meet every condition given; none given is all."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    sink: str | None = Field(default=None, max_length=64)
    type: str | None = Field(default=None, max_length=64)
    """Such as event.scheduled."""
    eventId: str | None = Field(default=None, max_length=256)  # noqa: N815  # the documented name
    """Compared without case."""
    since: str | None = Field(
        default=None, max_length=64, json_schema_extra={"format": "date-time"}
    )
    """Given up at this moment (RFC 3339) or later."""
    until: str | None = Field(
        default=None, max_length=64, json_schema_extra={"format": "date-time"}
    )
    """Given up by this moment, that of the first call: what is given up meanwhile does not go out twice. Left out: by now."""
    after: Annotated[int, BeforeValidator(_whole)] = Field(default=0, ge=0, lt=2**63)
    """`next` of the call before."""


def shown_delivery(delivery: Delivery) -> dict[str, Any]:
    """A delivery as the API gives it."""
    return delivery.shown()


async def _all(call: Call) -> web.StreamResponse:
    return await _page(call, ())


async def _dead(call: Call) -> web.StreamResponse:
    return await _page(call, ("parked",))


async def _page(call: Call, states: tuple[EntryState, ...]) -> web.StreamResponse:
    found = await call.relay.store.read(
        lambda tx: tx.deliveries.page(states=states, before=call.content, limit=PAGE + 1)
    )
    return json_response(
        200, page([shown_delivery(one) for one in found], [one.id for one in found])
    )


async def _look(call: Call) -> Delivery | None:
    relay, given = call.relay, call.request.match_info["id"]
    return (
        await relay.store.read(lambda tx: tx.deliveries.find(int(given)))
        if _ID.fullmatch(given) is not None
        else None
    )


async def _find(call: Call) -> Delivery:
    found = await _look(call)
    if found is None:
        raise Problem(404, "no such delivery; see GET /v1/deliveries, or `imds-relay deliveries`")
    return found


async def _find_dead(call: Call) -> Delivery:
    found = await _look(call)
    if found is None or found.state != "parked":
        raise _no_such()
    return found


async def _one(call: Call) -> web.StreamResponse:
    log = await call.relay.store.read(lambda tx: tx.deliveries.attempts(call.found.id))
    tries = [
        {
            "number": one.number,
            "at": one.at,
            "tookSeconds": round(one.elapsed, 6),
            "outcome": one.outcome,
            "status": one.status,
            "reason": one.reason,
            "answer": one.response,
        }
        for one in log
    ]
    return json_response(200, {**shown_delivery(call.found), "log": tries})


@dataclass(frozen=True, slots=True)
class _Wanted:
    which: DeadLetterFilter
    until: datetime | None
    after: int


def _which(_request: web.Request, raw: bytes) -> _Wanted:
    """Read the body. Raises MalformedError, WrongFieldError."""
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise MalformedBody(f"expected a JSON object: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedBody("expected a JSON object")
    try:
        body = WhichBody.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise InvalidField(
            ".".join(str(part) for part in first["loc"]) or "body", first["msg"]
        ) from error
    event_key = body.eventId.lower() if body.eventId is not None else None
    which = DeadLetterFilter(
        body.sink, body.type and event_name(body.type), event_key, _moment("since", body.since)
    )
    return _Wanted(which, _moment("until", body.until), body.after)


def _moment(name: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    moment = parse_timestamp(text)
    if moment is None:
        raise InvalidField(name, "expected a moment such as 2026-04-11T22:26:58Z")
    return moment


async def _redeliver_some(call: Call) -> web.StreamResponse:
    wanted, now = call.content, call.relay.clock.now()
    known = [sink.name for sink in call.relay.dispatcher.status()]
    if wanted.which.sink is not None and wanted.which.sink not in known:
        raise Problem(
            404,
            f"no sink {wanted.which.sink!r} in the configuration; there are: {', '.join(known) or 'none'}",
        )
    until = wanted.until or now
    ids, left = await call.relay.store.transact(
        redeliver_matching(wanted.which, now, after=wanted.after, until=until, limit=PAGE)
    )
    return json_response(
        202,
        {
            "redelivered": len(ids),
            "left": left,
            "until": format_rfc3339(until),
            "next": ids[-1] if left else None,
        },
    )


async def _redeliver(call: Call) -> web.StreamResponse:
    relay, letter = call.relay, call.found
    if letter.sink not in {sink.name for sink in relay.dispatcher.status()}:
        raise Problem(
            409,
            f"the sink {letter.sink} is not in the configuration any more: there is nobody to send it to",
        )
    if not await relay.store.transact(redeliver(letter.id, relay.clock.now())):
        raise _no_such()
    return json_response(202, {"id": letter.id, "sink": letter.sink, "state": "waiting"})


def _no_such() -> Problem:
    return Problem(
        404, "no such dead letter; see GET /v1/dead-letters, or `imds-relay dead-letters`"
    )


ROUTES = (
    Route(
        "GET",
        "/v1/deliveries",
        "what was sent and what waits, the newest first",
        _all,
        {200: DeliveriesShown},
        needs="read",
        parse=cursor,
        parameters=(CURSOR,),
    ),
    Route(
        "GET",
        "/v1/deliveries/{id}",
        "one delivery with every try: outcome, time taken, status, the first KiB of the answer",
        _one,
        {200: DeliveryInFull},
        needs="read",
        lookup=_find,
    ),
    Route(
        "GET",
        "/v1/dead-letters",
        "what was given up, and why",
        _dead,
        {200: DeliveriesShown},
        needs="read",
        parse=cursor,
        parameters=(CURSOR,),
    ),
    Route(
        "POST",
        "/v1/dead-letters/redeliver",
        f"send dead letters again: up to {PAGE} of those that are meant, the oldest first",
        _redeliver_some,
        {202: RedeliveredSome},
        needs="operate",
        parse=_which,
        body=WhichBody,
        problem_statuses=(404,),
    ),
    Route(
        "POST",
        "/v1/dead-letters/{id}/redeliver",
        "send a dead letter again",
        _redeliver,
        {202: Redelivered},
        needs="operate",
        lookup=_find_dead,
        problem_statuses=(409,),
    ),
)
