"""`/v1/sinks`: the state of each sink. Sends a sink a test message, pauses it and resumes it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

from typing_extensions import TypedDict

from relay.api.calls import Call, get_page, post
from relay.api.responses import Problem
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
    """The number of deliveries since the start of the relay or its last reload."""
    deadLetters: int | None
    """null: the state file cannot be read now."""


class SinkList(TypedDict):
    """All sinks, in the order of the configuration."""

    items: list[SinkSummary]


@get_page("/v1/sinks", "the sinks, what waits for each, and whether it takes it")
async def list_sinks(call: Call) -> SinkList:
    dead_letters: Mapping[str, int] | None = None
    with suppress(StoreUnavailable):
        dead_letters = await call.run_long_read(lambda tx: tx.deliveries.count_by_sink("parked"))
    items = [
        SinkSummary(
            **_details(sink),
            circuit=sink.circuit_state,
            oldestWaitingSeconds=sink.oldest_age(),
            delivered=sink.ends["delivered"],
            deadLetters=None if dead_letters is None else dead_letters.get(sink.name, 0),
        )
        for sink in call.relay.dispatcher.workers
    ]
    return SinkList(items=items)


def _find(call: Call, name: str) -> Worker:
    sinks = {sink.name: sink for sink in call.relay.dispatcher.workers}
    if name not in sinks:
        choices = describe_choices(name, list(sinks))
        raise Problem(404, f"no such sink in the configuration; {choices}")
    return sinks[name]


@post(
    "/v1/sinks/{name}/ping",
    "send a sink a test message",
    status=202,
    needs="operate",
    problems=(404,),
)
async def ping(call: Call, name: str) -> PingRecorded:
    relay, at = call.relay, call.relay.clock.now()
    name = _find(call, name).name
    reason = f"a test message, asked for by {call.caller.principal}"

    def record(tx: Transaction) -> CloudEvent:
        event = relay_event(
            "relay.ping", relay.origin, at, sink=name, reason=reason, count=1, head=str(tx.head())
        )
        tx.record(event, at, to=[name])
        return event

    event = await relay.store.transact(record)
    return PingRecorded(sink=name, id=event.id)


@post("/v1/sinks/{name}/pause", "let a sink's deliveries wait", needs="operate", problems=(404,))
async def pause(call: Call, name: str) -> SinkDetails:
    return await _set_state(call, name, "paused", f"paused by {call.caller.principal}")


@post(
    "/v1/sinks/{name}/resume",
    "send a sink's deliveries again",
    needs="operate",
    problems=(404,),
)
async def resume(call: Call, name: str) -> SinkDetails:
    return await _set_state(call, name, "on", None)


async def _set_state(
    call: Call, name: str, state: Literal["on", "paused"], reason: str | None
) -> SinkDetails:
    sink = _find(call, name)
    await call.relay.dispatcher.set_state(name, state, reason)
    principal = call.caller.principal
    _log.warning(
        "sink %s was set to %s by %s",
        name,
        state,
        principal,
        extra=log_extra(sink=name, state=state, principal=principal),
    )
    return _details(sink)


def _details(sink: Worker) -> SinkDetails:
    return SinkDetails(
        name=sink.name,
        kind=sink.kind,
        state=sink.state,
        failing=sink.failing,
        reason=sink.reason,
        waiting=sink.waiting,
    )
