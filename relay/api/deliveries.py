"""``/v1/deliveries`` and ``/v1/dead-letters``: what was sent, what was given up and why, and sending that again."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web
from typing_extensions import TypedDict

from relay.api.answers import answer
from relay.api.paging import CURSOR, PAGE, cursor, page
from relay.api.problems import Problem
from relay.api.routes import Call, Route
from relay.delivery.dispatcher import redeliver
from relay.outbox import EntryState
from relay.outbox.deliveries import Delivery
from relay.outbox.transaction import Transaction

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


class Redelivered(TypedDict):
    """It goes out again, at once."""

    id: int
    sink: str
    state: EntryState


def shown_delivery(delivery: Delivery) -> dict[str, Any]:
    """A delivery as the API gives it."""
    return delivery.shown()


async def _all(call: Call) -> web.StreamResponse:
    return await _page(call, ())


async def _dead(call: Call) -> web.StreamResponse:
    return await _page(call, ("parked",))


async def _page(call: Call, states: tuple[EntryState, ...]) -> web.StreamResponse:
    found = await call.relay.store.read(lambda tx: tx.deliveries.page(states=states, before=call.content, limit=PAGE + 1))
    return answer(200, page([shown_delivery(one) for one in found], [one.id for one in found]))


async def _find(call: Call) -> Delivery:
    given = call.request.match_info["id"]
    found: list[Delivery] = []
    if _ID.fullmatch(given) is not None:

        def work(tx: Transaction) -> list[Delivery]:
            return tx.deliveries.page(states=("parked",), before=int(given) + 1, limit=1)

        found = await call.relay.store.read(work)
    if not found or found[0].id != int(given):
        raise _no_such()
    return found[0]


async def _redeliver(call: Call) -> web.StreamResponse:
    relay, letter = call.relay, call.found
    if letter.sink not in {sink.name for sink in relay.dispatcher.status()}:
        raise Problem(409, f"the sink {letter.sink} is not in the configuration any more: there is nobody to send it to")
    if not await relay.store.transact(redeliver(letter.id, relay.clock.now())):
        raise _no_such()
    return answer(202, {"id": letter.id, "sink": letter.sink, "state": "waiting"})


def _no_such() -> Problem:
    return Problem(404, "no such dead letter; see GET /v1/dead-letters")


ROUTES = (
    Route(
        "GET",
        "/v1/deliveries",
        "what was sent and what waits, the newest first",
        _all,
        {200: DeliveriesShown},
        needs="read",
        read=cursor,
        parameters=(CURSOR,),
    ),
    Route(
        "GET",
        "/v1/dead-letters",
        "what was given up, and why",
        _dead,
        {200: DeliveriesShown},
        needs="read",
        read=cursor,
        parameters=(CURSOR,),
    ),
    Route(
        "POST",
        "/v1/dead-letters/{id}/redeliver",
        "send a dead letter again",
        _redeliver,
        {202: Redelivered},
        needs="operate",
        find=_find,
        refuses=(409,),
    ),
)
