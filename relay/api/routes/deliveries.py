"""`/v1/deliveries`: what was sent and what waits, with the attempts of each delivery.

A delivery is one event for one sink. It waits, is delivered, or was given up (`parked`, see
`relay.api.routes.dead_letters`).
"""

from __future__ import annotations

import re
from typing import Literal, cast

from typing_extensions import TypedDict

from relay.api.schema.responses import Problem
from relay.api.schema.route import (
    MAX_DETAIL_ROWS,
    PAGE_SIZE,
    Call,
    page_route,
    parse_cursor,
    split_page,
)
from relay.events.cloudevent import TYPE_PREFIX, TYPE_VERSION
from relay.store import EntryState
from relay.store.deliveries import Delivery

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
    """One event for one sink, with its attempts."""

    log: list[DeliveryAttempt]
    """The newest attempts, oldest first."""
    next: str | None
    """The cursor of the attempts before; null: there are none."""


def delivery_summary(delivery: Delivery) -> DeliverySummary:
    """Return a delivery as the API shows it."""
    return DeliverySummary(
        id=delivery.id,
        sink=delivery.sink,
        eventId=delivery.event_id,
        type=f"{TYPE_PREFIX}{delivery.type}{TYPE_VERSION}",
        state=delivery.state,
        attempts=delivery.attempts,
        nextAttempt=delivery.next_at,
        reason=delivery.reason,
        lastStatus=delivery.last_status,
        recorded=delivery.recorded,
        settled=delivery.settled,
    )


async def read_delivery_page(call: Call, states: tuple[EntryState, ...] = ()) -> DeliveryPage:
    """Return the page that the cursor names, of deliveries in these states; none means all."""
    cursor = parse_cursor(call.request)
    deliveries = await call.run_long_read(
        lambda tx: tx.deliveries.page(states=states, before=cursor, limit=PAGE_SIZE + 1)
    )
    page, next_cursor = split_page(deliveries)
    return DeliveryPage(items=[delivery_summary(row) for row in page], next=next_cursor)


async def find_delivery_of_path(call: Call) -> Delivery | None:
    """Return the delivery that the path names; None if there is none."""
    text = call.request.match_info["id"]
    if _DELIVERY_ID.fullmatch(text) is None:
        return None
    return await call.relay.store.read(lambda tx: tx.deliveries.find_delivery(int(text)))


async def _show_delivery(call: Call) -> DeliveryDetails:
    cursor = parse_cursor(call.request)
    delivery = await find_delivery_of_path(call)
    if delivery is None:
        raise Problem(404, "no such delivery; see GET /v1/deliveries, or `imds-relay deliveries`")
    attempts = await call.run_long_read(
        lambda tx: tx.deliveries.attempts_of_entry(delivery.id, cursor, MAX_DETAIL_ROWS + 1)
    )
    page = attempts[-MAX_DETAIL_ROWS:]
    log = [
        DeliveryAttempt(
            number=attempt.number,
            at=attempt.at,
            tookSeconds=round(attempt.elapsed, 6),
            outcome=cast("_Outcome", attempt.outcome),
            status=attempt.status,
            reason=attempt.reason,
            answer=attempt.response,
        )
        for attempt in page
    ]
    next_cursor = str(page[0].number) if len(attempts) > MAX_DETAIL_ROWS else None
    return DeliveryDetails(**delivery_summary(delivery), log=log, next=next_cursor)


ROUTES = (
    page_route(
        "/v1/deliveries",
        "what was sent and what waits, the newest first",
        read_delivery_page,
    ),
    page_route(
        "/v1/deliveries/{id}",
        "one delivery with its newest attempts: "
        "outcome, duration, status, the first KiB of the response",
        _show_delivery,
        problem_statuses=(404,),
    ),
)
