"""``/v1/sinks/{name}/plan``: whether a sink wants an event, and when it would be tried again if it failed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from aiohttp import web
from typing_extensions import TypedDict

from relay.api.schema.problems import Problem
from relay.api.schema.responses import json_response
from relay.api.schema.route import Call, Parameter
from relay.delivery.retry import DeadLetter
from relay.delivery.routing import exclusion_reason
from relay.errors import Failure
from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import format_rfc3339, parse_timestamp
from relay.outbox.transaction import Transaction

EVENT = Parameter("event", "query", "the EventId; upper and lower case are the same", required=True)
_FAILURES: tuple[Failure, ...] = ("transient", "slow")


class StretchShown(TypedDict):
    """Tries in a row with the same pause before each."""

    first: str
    last: str
    tries: int
    pauseSeconds: float


class CourseShown(TypedDict):
    """What becomes of a delivery that fails in one way every time."""

    failure: Failure
    """transient: no connection, no answer, 408, 409, 425, 429, 5xx. slow: somebody must mend something, as with other 4xx."""
    tries: list[StretchShown]
    ends: str | None
    """Why it becomes a dead letter after these; null: it goes on like that."""


class PlanShown(TypedDict):
    """The plan for one event and one sink, from now on and without jitter, which only adds up to a tenth."""

    sink: str
    eventId: str
    type: str
    """What was last said about the event."""
    notBefore: str | None
    whyNot: str | None
    """Why the sink does not want it; null: it does."""
    attempts: int
    """How often what waits about the event was tried already."""
    waiting: bool
    plan: list[CourseShown]


@dataclass(frozen=True, slots=True)
class _Facts:
    said: CloudEvent
    attempts: int
    waiting_since: datetime | None


def which(request: web.Request, _body: bytes) -> str:
    """The EventId that is asked for. Raises Problem 422."""
    given = request.query.getall("event", [])
    if len(given) != 1 or not given[0]:
        raise Problem(422, "event: expected one EventId", field="event")
    return given[0]


async def show(call: Call) -> web.StreamResponse:
    """Answer with the plan. Raises Problem 404 for an unknown event."""
    key, sink = call.content.lower(), call.found.name

    def work(tx: Transaction) -> _Facts | None:
        position = tx.journal.last_change_position(key)
        if position is None:
            return None
        entry = next((one for one in tx.deliveries.waiting(sink) if one.event_key == key), None)
        attempts, since = (entry.attempts, entry.recorded) if entry is not None else (0, None)
        return _Facts(tx.journal.event(position), attempts, since)

    facts = await call.relay.store.read(work)
    if facts is None:
        raise Problem(
            404, "no such event in this scope; see GET /v1/events, or `imds-relay events`"
        )
    worker = call.relay.dispatcher.worker(sink)
    not_before = parse_timestamp(facts.said.data.get("notBefore"))
    courses: list[dict[str, Any]] = []
    for failure in _FAILURES:
        tries, end = worker.prospects.outline(
            failure,
            tries=facts.attempts + 1,
            recorded=facts.waiting_since or call.relay.clock.now(),
            not_before=not_before,
        )
        shown = [
            {
                "first": format_rfc3339(one.first),
                "last": format_rfc3339(one.last),
                "tries": one.tries,
                "pauseSeconds": round(one.pause, 3),
            }
            for one in tries
        ]
        courses.append(
            {
                "failure": failure,
                "tries": shown,
                "ends": end.reason if isinstance(end, DeadLetter) else None,
            }
        )
    return json_response(
        200,
        {
            "sink": sink,
            "eventId": facts.said.data["eventId"],
            "type": facts.said.type,
            "notBefore": facts.said.data.get("notBefore"),
            "whyNot": exclusion_reason(worker.settings, facts.said),
            "attempts": facts.attempts,
            "waiting": facts.waiting_since is not None,
            "plan": courses,
        },
    )
