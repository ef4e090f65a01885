"""`/v1/sinks`: the state of each sink. Sends a sink a test message, pauses it and resumes it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

from typing_extensions import TypedDict

from relay.api.schema.responses import Problem
from relay.api.schema.route import Call, Route
from relay.delivery.sink_health import CircuitState
from relay.delivery.worker import Worker
from relay.errors import StoreUnavailable
from relay.events.build import relay_event
from relay.events.cloudevent import CloudEvent
from relay.log_fields import log_extra
from relay.store import SinkState
from relay.store.transaction import Transaction
from relay.suggestions import describe_choices

_log = logging.getLogger(__name__)


class PingRecorded(TypedDict):
    """The test message waits for delivery."""

    sink: str
    id: str
    """The id of the CloudEvent."""


class SinkDetails(TypedDict):
    """The state of a sink."""

    name: str
    kind: str
    state: SinkState
    failing: bool
    reason: str | None
    """Why it is paused, disabled or failing."""
    waiting: int
    """The number of waiting deliveries."""


class SinkSummary(SinkDetails):
    """The state of a sink, and what waits for it."""

    circuit: CircuitState
    """closed: it is not failing. open: it is, and is tried later. half-open: it is tried now."""
    oldestWaitingSeconds: float | None
    """The age of the oldest delivery that waits; null: none waits."""
    delivered: int
    """The number of deliveries since the start of the relay."""
    deadLetters: int | None
    """null: the state file cannot be read now."""


class SinkList(TypedDict):
    """All sinks, in the order of the configuration."""

    items: list[SinkSummary]


async def _list_sinks(call: Call) -> SinkList:
    dead_letters = await _count_dead_letters_by_sink(call)
    items = [
        SinkSummary(
            **_sink_details(sink),
            circuit=sink.circuit_state,
            oldestWaitingSeconds=sink.oldest_age(),
            delivered=sink.ends["delivered"],
            deadLetters=None if dead_letters is None else dead_letters.get(sink.name, 0),
        )
        for sink in call.relay.dispatcher.workers
    ]
    return SinkList(items=items)


async def _count_dead_letters_by_sink(call: Call) -> Mapping[str, int] | None:
    try:
        return await call.run_long_read(lambda tx: tx.deliveries.count_dead_letters_by_sink())
    except StoreUnavailable:
        return None


def _find_sink(call: Call) -> Worker:
    name = call.request.match_info["name"]
    sinks = {sink.name: sink for sink in call.relay.dispatcher.workers}
    if name not in sinks:
        choices = describe_choices(name, list(sinks))
        raise Problem(404, f"no such sink in the configuration; {choices}")
    return sinks[name]


async def _ping(call: Call) -> PingRecorded:
    relay, name, at = call.relay, _find_sink(call).settings.name, call.relay.clock.now()
    reason = f"a test message, asked for by {call.caller.principal}"

    def record_ping_event_for_delivery(tx: Transaction) -> CloudEvent:
        event = relay_event(
            "relay.ping", relay.origin, at, sink=name, reason=reason, count=1, head=str(tx.head())
        )
        tx.record(event, at, to=[name])
        return event

    event = await relay.store.transact(record_ping_event_for_delivery)
    return PingRecorded(sink=name, id=event.id)


async def _pause(call: Call) -> SinkDetails:
    return await _set_state(call, "paused", f"paused by {call.caller.principal}")


async def _resume(call: Call) -> SinkDetails:
    return await _set_state(call, "on", None)


async def _set_state(call: Call, state: Literal["on", "paused"], reason: str | None) -> SinkDetails:
    sink = _find_sink(call)
    name = sink.name
    await call.relay.dispatcher.set_state(name, state, reason)
    principal = call.caller.principal
    _log.warning(
        "sink %s was set to %s by %s",
        name,
        state,
        principal,
        extra=log_extra(sink=name, state=state, principal=principal),
    )
    return _sink_details(sink)


def _sink_details(sink: Worker) -> SinkDetails:
    return SinkDetails(
        name=sink.name,
        kind=sink.kind,
        state=sink.state,
        failing=sink.failing,
        reason=sink.reason,
        waiting=sink.waiting,
    )


ROUTES = (
    Route(
        method="GET",
        path="/v1/sinks",
        summary="the sinks, what waits for each, and whether it takes it",
        handler=_list_sinks,
        needs="read",
        is_large=True,
    ),
    Route(
        method="POST",
        path="/v1/sinks/{name}/ping",
        summary="send a sink a test message",
        handler=_ping,
        status=202,
        needs="operate",
        problem_statuses=(404,),
    ),
    Route(
        method="POST",
        path="/v1/sinks/{name}/pause",
        summary="let a sink's deliveries wait",
        handler=_pause,
        needs="operate",
        problem_statuses=(404,),
    ),
    Route(
        method="POST",
        path="/v1/sinks/{name}/resume",
        summary="send a sink's deliveries again",
        handler=_resume,
        needs="operate",
        problem_statuses=(404,),
    ),
)
