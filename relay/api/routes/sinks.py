"""``/v1/sinks/{name}/…``: a test message to a sink, stopping and starting it, and what it would do with an event."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Literal

from aiohttp import web
from typing_extensions import TypedDict

from relay.api.routes import explain_delivery as plan
from relay.api.schema.problems import Problem
from relay.api.schema.responses import json_response
from relay.api.schema.route import Call, Route
from relay.delivery.dispatcher import SinkStatus
from relay.events.build import relay_event
from relay.events.cloudevent import CloudEvent
from relay.outbox import SinkState
from relay.outbox.transaction import Transaction

_log = logging.getLogger(__name__)


class Pinged(TypedDict):
    """The test message waits for its sink: `id` is that of its CloudEvent."""

    sink: str
    id: str


class SinkShown(TypedDict):
    """How a sink is."""

    name: str
    kind: str
    state: SinkState
    failing: bool
    reason: str | None
    """Why it is paused, disabled or failing."""
    waiting: int
    """How many entries wait for it."""


async def _find(call: Call) -> SinkStatus:
    return _status(call)


def _status(call: Call) -> SinkStatus:
    name = call.request.match_info["name"]
    found = next((sink for sink in call.relay.dispatcher.status() if sink.name == name), None)
    if found is None:
        raise Problem(404, "no such sink in the configuration")
    return found


async def _ping(call: Call) -> web.StreamResponse:
    relay, sink, reason = (
        call.relay,
        call.found.name,
        f"a test message, asked for by {call.caller.principal}",
    )
    at = relay.clock.now()

    def work(tx: Transaction) -> CloudEvent:
        event = relay_event(
            "relay.ping", relay.origin, at, sink=sink, reason=reason, count=1, head=str(tx.head())
        )
        tx.record(event, at, to=[sink])
        return event

    event = await relay.store.transact(work)
    return json_response(202, {"sink": sink, "id": event.id})


async def _pause(call: Call) -> web.StreamResponse:
    return await _set(call, "paused", f"paused by {call.caller.principal}")


async def _resume(call: Call) -> web.StreamResponse:
    return await _set(call, "on", None)


async def _set(
    call: Call, state: Literal["on", "paused"], reason: str | None
) -> web.StreamResponse:
    name = call.found.name
    await call.relay.dispatcher.set_state(name, state, reason)
    _log.warning("sink %s was set to %s by %s", name, state, call.caller.principal)
    status = asdict(_status(call))
    del status["tries"]  # for the metrics
    return json_response(200, status)


ROUTES = (
    Route(
        "GET",
        "/v1/sinks/{name}/plan",
        "whether a sink wants an event, and when it would be tried again",
        plan.show,
        {200: plan.PlanShown},
        needs="read",
        parse=plan.which,
        lookup=_find,
        parameters=(plan.EVENT,),
    ),
    Route(
        "POST",
        "/v1/sinks/{name}/ping",
        "send a sink a test message",
        _ping,
        {202: Pinged},
        needs="operate",
        lookup=_find,
    ),
    Route(
        "POST",
        "/v1/sinks/{name}/pause",
        "let a sink's entries wait",
        _pause,
        {200: SinkShown},
        needs="operate",
        lookup=_find,
    ),
    Route(
        "POST",
        "/v1/sinks/{name}/resume",
        "let them go out",
        _resume,
        {200: SinkShown},
        needs="operate",
        lookup=_find,
    ),
)
