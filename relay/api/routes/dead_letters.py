"""`/v1/dead-letters`: deliveries that were given up, and their redelivery.

A dead letter is a delivery in the state `parked`. People send one dead letter again, or all that
meet conditions, up to a page in one call. The next call names the time of the first one (`until`)
and the last id of the call before (`after`), so that no dead letter is sent twice.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from relay.api.routes.deliveries import DeliveryPage, find_delivery_of_path, read_delivery_page
from relay.api.routes.events import problem_of_refusal
from relay.api.schema.responses import Problem
from relay.api.schema.route import PAGE_SIZE, Call, Route, page_route
from relay.approvals.admission import ambiguous_scope_refusal
from relay.events.cloudevent import event_name
from relay.events.timestamps import format_rfc3339, parse_timestamp
from relay.store import EntryState
from relay.store.deliveries import DeadLetterFilter
from relay.suggestions import describe_choices
from relay.validation import RequestBody

_NO_SUCH_DEAD_LETTER = "no such dead letter; see GET /v1/dead-letters, or `imds-relay dead-letters`"


class RedeliveredDeadLetter(TypedDict):
    """The dead letter is sent again now."""

    id: int
    sink: str
    state: EntryState


class BulkRedeliveryResult(TypedDict):
    """The number of dead letters that are sent again now.

    To send more, call again with this `until`, and with `next` as `after`.
    """

    redelivered: int
    left: int
    """The number of further dead letters that meet the conditions."""
    until: str
    next: int | None
    """null: nothing is left."""


def _parse_body_field_as_time(value: object) -> datetime:
    time = parse_timestamp(value) if isinstance(value, str) else None
    if time is None:
        raise PydanticCustomError("moment", "expected a moment such as 2026-04-11T22:26:58Z")
    return time


def _accept_whole_float(value: object) -> object:
    # JSON Schema and writers with one type of number regard 1.0 as an integer.
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Time = Annotated[datetime, BeforeValidator(_parse_body_field_as_time)]


class BulkRedeliveryRequest(RequestBody):
    """Selects the dead letters that meet every given condition. Without conditions, all."""

    sink: str | None = Field(default=None, max_length=64)
    type: str | None = Field(default=None, max_length=64)
    """Such as event.scheduled."""
    eventId: str | None = Field(default=None, max_length=256)  # noqa: N815
    """Compared without case."""
    since: _Time | None = None
    """Given up at this time (RFC 3339) or later."""
    until: _Time | None = None
    """Given up by this time; by default, by now.

    Repeat the time of the first call in later calls, so that nothing is sent twice.
    """
    after: Annotated[int, BeforeValidator(_accept_whole_float)] = Field(default=0, ge=0, lt=2**63)
    """`next` of the call before."""


async def _list_dead_letters(call: Call) -> DeliveryPage:
    return await read_delivery_page(call, ("parked",))


async def _redeliver(call: Call) -> RedeliveredDeadLetter:
    relay, dead_letter = call.relay, await find_delivery_of_path(call)
    if dead_letter is None or dead_letter.state != "parked":
        raise Problem(404, _NO_SUCH_DEAD_LETTER)
    if dead_letter.sink not in {sink.name for sink in relay.dispatcher.workers}:
        raise Problem(409, f"the sink {dead_letter.sink} is not in the configuration any more")
    now = relay.clock.now()
    if not await relay.store.transact(
        lambda tx: tx.deliveries.redeliver_dead_letter(dead_letter.id, now)
    ):
        raise Problem(404, _NO_SUCH_DEAD_LETTER)
    return RedeliveredDeadLetter(id=dead_letter.id, sink=dead_letter.sink, state="waiting")


async def _redeliver_page_of_matching(call: Call) -> BulkRedeliveryResult:
    body: BulkRedeliveryRequest = call.body
    relay, now = call.relay, call.relay.clock.now()
    sinks = [sink.name for sink in relay.dispatcher.workers]
    if body.sink is not None and body.sink not in sinks:
        raise Problem(
            404,
            f"no sink {body.sink!r} in the configuration; {describe_choices(body.sink, sinks)}",
        )
    reference, occurrences = body.eventId, []
    if reference is not None:
        occurrences = await relay.store.read(
            lambda tx: tx.occurrences.find_occurrences_by_reference(reference)
        )
    if len(occurrences) > 1:
        raise problem_of_refusal(ambiguous_scope_refusal(occurrences))
    condition = DeadLetterFilter(
        sink=body.sink,
        type=None if body.type is None else event_name(body.type),
        # A dead letter can outlive what the store knows of its event.
        event_key=occurrences[0].key if occurrences else reference and reference.lower(),
        since=body.since,
    )
    until = body.until or now
    ids, left = await relay.store.transact(
        lambda tx: tx.deliveries.redeliver_matching_dead_letters(
            condition, now, after=body.after, until=until, limit=PAGE_SIZE
        )
    )
    return BulkRedeliveryResult(
        redelivered=len(ids),
        left=left,
        until=format_rfc3339(until),
        next=ids[-1] if left else None,
    )


ROUTES = (
    page_route(
        "/v1/dead-letters",
        "deliveries that were given up, and the reasons",
        _list_dead_letters,
    ),
    Route(
        method="POST",
        path="/v1/dead-letters/redeliver",
        summary=f"send up to {PAGE_SIZE} selected dead letters again, the oldest first",
        handler=_redeliver_page_of_matching,
        status=202,
        needs="operate",
        body=BulkRedeliveryRequest,
        problem_statuses=(404,),
    ),
    Route(
        method="POST",
        path="/v1/dead-letters/{id}/redeliver",
        summary="send a dead letter again",
        handler=_redeliver,
        status=202,
        needs="operate",
        problem_statuses=(404, 409),
    ),
)
