"""`/v1/deliveries`: what was sent and what waits, with the attempts of each delivery."""

from __future__ import annotations

import re
from typing import Literal, cast

from typing_extensions import TypedDict

from relay.api.schema.paging import CURSOR, PAGE_SIZE, parse_cursor, split_page
from relay.api.schema.problems import Problem
from relay.api.schema.route import Call, Route
from relay.events.cloudevent import PREFIX, VERSION
from relay.outbox import EntryState
from relay.outbox.deliveries import Delivery, LoggedAttempt

_DELIVERY_ID = re.compile(r"[0-9]{1,18}", re.ASCII)
_Outcome = Literal["delivered", "deferred", "parked", "error"]


class DeliverySummary(TypedDict):
    """One event for one sink."""

    id: int
    sink: str
    eventId: str | None
    """null if the delivery is not about an Azure event."""
    type: str
    state: EntryState
    attempts: int
    nextAttempt: str | None
    reason: str | None
    lastStatus: int | None
    recorded: str
    settled: str | None


class DeliveryPage(TypedDict):
    """A page of deliveries, the newest first."""

    items: list[DeliverySummary]
    next: str | None


class DeliveryAttempt(TypedDict):
    """One attempt of a delivery."""

    number: int
    at: str
    tookSeconds: float
    outcome: _Outcome
    status: int | None
    """The receiver's status, if it gave one."""
    reason: str | None
    answer: str | None
    """At most the first KiB of the receiver's response."""


class DeliveryDetails(DeliverySummary):
    """One event for one sink, with every attempt."""

    log: list[DeliveryAttempt]


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
    eventId: str | None = Field(default=None, max_length=256)  # the documented name
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
    return delivery.to_json()


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
        await relay.store.read(lambda tx: tx.deliveries.find_delivery(int(given)))
        if _ID.fullmatch(given) is not None
        else None
    )
    page, next_cursor = split_page(deliveries)
    return DeliveryPage(items=[delivery_summary(row) for row in page], next=next_cursor)


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
        sink=body.sink,
        type=body.type and event_name(body.type),
        event_key=event_key,
        since=_moment("since", body.since),
    )
    return _Wanted(which, _moment("until", body.until), body.after)


def _moment(name: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    return await call.relay.store.read(lambda tx: tx.deliveries.find(int(text)))


async def _list_deliveries(call: Call) -> DeliveryPage:
    return await read_page(call)


async def _find_delivery(call: Call) -> Delivery:
    delivery = await read_delivery(call)
    if delivery is None:
        raise Problem(404, "no such delivery; see GET /v1/deliveries, or `imds-relay deliveries`")
    return delivery


async def _show_delivery(call: Call) -> DeliveryDetails:
    delivery: Delivery = call.resource
    attempts = await call.relay.store.read(lambda tx: tx.deliveries.attempts(delivery.id))
    return DeliveryDetails(
        **delivery_summary(delivery), log=[_delivery_attempt(attempt) for attempt in attempts]
    )


def _delivery_attempt(attempt: LoggedAttempt) -> DeliveryAttempt:
    return DeliveryAttempt(
        number=attempt.number,
        at=attempt.at,
        tookSeconds=round(attempt.elapsed, 6),
        outcome=cast("_Outcome", attempt.outcome),
        status=attempt.status,
        reason=attempt.reason,
        answer=attempt.response,
    )


ROUTES = (
    Route(
        method="GET",
        path="/v1/deliveries",
        summary="what was sent and what waits, the newest first",
        handler=_list_deliveries,
        needs="read",
        parameters=(CURSOR,),
        parse_parameters=parse_cursor,
    ),
    Route(
        method="GET",
        path="/v1/deliveries/{id}",
        summary="one delivery with every attempt: "
        "outcome, duration, status, the first KiB of the response",
        handler=_show_delivery,
        needs="read",
        find_resource=_find_delivery,
    ),
)
