"""``/v1/events``: what Azure announced, how its approval stands, and for one event everything that was said about it."""

from __future__ import annotations

from typing import Any, Literal

import orjson
from aiohttp import web
from pydantic import with_config
from typing_extensions import TypedDict

from relay.api.routes.deliveries import DeliveryShown, shown_delivery
from relay.api.schema.paging import CURSOR, PAGE, cursor, page
from relay.api.schema.problems import Problem
from relay.api.schema.responses import json_response
from relay.api.schema.route import Call, Route
from relay.approvals.explain import approval_summary
from relay.approvals.service import ApprovalService
from relay.approvals.status import ApprovalState
from relay.events.catalog import EventData
from relay.events.timestamps import format_rfc3339
from relay.outbox import Decision, Occurrence
from relay.outbox.transaction import Transaction

_MOST_DELIVERIES = 1000


class ApprovalShown(TypedDict):
    """How an event's approval stands."""

    state: ApprovalState
    rule: str | None
    votes: int
    required: int
    missing: int
    closes: str | None
    """RFC 3339: when voting closes."""


class EventShown(EventData):
    """A scheduled event."""

    occurrence: int
    """How often this EventId has been in Azure's document, this time included."""
    outcome: Literal["completed", "canceled", "unknown"] | None
    """null while it is in the document."""
    firstSeen: str  # noqa: N815  # the documented name
    lastChanged: str  # noqa: N815  # the same
    approval: ApprovalShown


@with_config({"extra": "allow"})
class Said(TypedDict):
    """A CloudEvent; `imds-relay schema` has the schema of each type."""

    specversion: str
    id: str
    type: str
    source: str
    time: str
    data: dict[str, Any]


class Vote(TypedDict):
    """A vote, hold or release that was accepted."""

    approvalId: str
    decision: Literal["approve", "hold", "release"]
    principal: str
    channel: str
    revision: str
    at: str
    counts: bool


class EventInFull(EventShown):
    """A scheduled event with all that happened to it."""

    history: list[Said]
    votes: list[Vote]
    deliveries: list[DeliveryShown]


class Events(TypedDict):
    """A page of events, the newest first."""

    items: list[EventShown]
    next: str | None


def _shown(
    tx: Transaction, ledger: ApprovalService, call: Call, occurrence: Occurrence
) -> dict[str, Any]:
    return {
        **occurrence.data,
        "occurrence": occurrence.number,
        "outcome": occurrence.outcome,
        "firstSeen": occurrence.first_seen,
        "lastChanged": occurrence.last_changed,
        "approval": approval_summary(ledger.status(tx, occurrence, call.relay.clock.now())),
    }


def _in_full(
    tx: Transaction, ledger: ApprovalService, call: Call, occurrence: Occurrence
) -> dict[str, Any]:
    deliveries = tx.deliveries.page(event_key=occurrence.key, limit=_MOST_DELIVERIES)
    return {
        **_shown(tx, ledger, call, occurrence),
        "history": [
            orjson.Fragment(said.body)
            for said in tx.journal.history(occurrence.key, occurrence.first_seen)
        ],
        "votes": [_vote(one) for one in tx.decisions.for_occurrence(occurrence.id)],
        "deliveries": [
            shown_delivery(one) for one in deliveries if one.recorded >= occurrence.first_seen
        ],
    }


def _vote(decision: Decision) -> dict[str, Any]:
    return {
        "approvalId": decision.approval_id,
        "decision": decision.decision,
        "principal": decision.principal,
        "channel": decision.channel,
        "revision": decision.revision,
        "at": format_rfc3339(decision.at),
        "counts": decision.counts,
    }


async def _list(call: Call) -> web.StreamResponse:
    ledger = call.relay.gate.service

    def work(tx: Transaction) -> dict[str, Any]:
        found = tx.snapshot.page(call.content, PAGE + 1)
        return page([_shown(tx, ledger, call, one) for one in found], [one.id for one in found])

    return json_response(200, await call.relay.store.read(work))


async def _find(call: Call) -> dict[str, Any]:
    ledger = call.relay.gate.service
    key = call.request.match_info["eventId"].lower()

    def work(tx: Transaction) -> dict[str, Any] | None:
        occurrence = tx.snapshot.find(key)
        return _in_full(tx, ledger, call, occurrence) if occurrence is not None else None

    found = await call.relay.store.read(work)
    if found is None:
        raise Problem(
            404, "no such event in this scope; see GET /v1/events, or `imds-relay events`"
        )
    return found


async def _show(call: Call) -> web.StreamResponse:
    return json_response(200, call.found)


ROUTES = (
    Route(
        "GET",
        "/v1/events",
        "current and recent events",
        _list,
        {200: Events},
        needs="read",
        parse=cursor,
        parameters=(CURSOR,),
    ),
    Route(
        "GET",
        "/v1/events/{eventId}",
        "one event with its history, votes and deliveries",
        _show,
        {200: EventInFull},
        needs="read",
        lookup=_find,
    ),
)
