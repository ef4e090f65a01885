"""`/v1/deliveries`, `/v1/dead-letters` and `/v1/sinks`: what was sent, what waits, and for whom.

A delivery is one event for one sink. It waits, is delivered, or was given up (`parked`): then it is
a dead letter. People send one dead letter again, those of a sink, or all. They send a sink a test
message, pause it and resume it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

from pydantic import Field
from typing_extensions import TypedDict

from relay.api.calls import MAX_DETAIL_ROWS, PAGE_SIZE, Call, Cursor, get_page, post
from relay.api.responses import Problem
from relay.delivery.sink_health import CircuitState
from relay.delivery.worker import Worker
from relay.errors import StoreUnavailable
from relay.events.build import relay_event
from relay.events.cloudevent import CloudEvent
from relay.logs import log_extra
from relay.settings import RequestBody, describe_choices
from relay.store import EntryState, SinkState
from relay.store.deliveries import DeliveryAttempt, DeliverySummary
from relay.store.transaction import Transaction

_log = logging.getLogger(__name__)


class DeliveryPage(TypedDict):
    """A page of deliveries, the newest first."""

    items: list[DeliverySummary]
    next: str | None


class DeliveryDetails(DeliverySummary):
    """One event for one sink, with its attempts."""

    log: list[DeliveryAttempt]
    """The newest attempts, oldest first."""
    next: str | None
    """The cursor of the attempts before; null: there are none."""


async def _page(call: Call, cursor: int | None, states: tuple[EntryState, ...]) -> DeliveryPage:
    rows = await call.run_long_read(
        lambda tx: tx.deliveries.page(states=states, before=cursor, limit=PAGE_SIZE + 1)
    )
    page, has_more = rows[:PAGE_SIZE], len(rows) > PAGE_SIZE
    return DeliveryPage(items=page, next=str(page[-1]["id"]) if has_more else None)


async def _find_delivery(call: Call, number: str) -> DeliverySummary | None:
    if re.fullmatch(r"[0-9]{1,18}", number) is None:
        return None
    return await call.relay.store.read(lambda tx: tx.deliveries.find(int(number)))


@get_page("/v1/deliveries", "what was sent and what waits, the newest first")
async def list_deliveries(call: Call, cursor: Cursor) -> DeliveryPage:
    return await _page(call, cursor, ())


@get_page("/v1/dead-letters", "deliveries that were given up, and the reasons")
async def list_dead_letters(call: Call, cursor: Cursor) -> DeliveryPage:
    return await _page(call, cursor, ("parked",))


@get_page(
    "/v1/deliveries/{id}",
    "one delivery with its newest attempts: "
    "outcome, duration, status, the first KiB of the response",
)
async def show_delivery(call: Call, number: str, cursor: Cursor) -> DeliveryDetails:
    delivery = await _find_delivery(call, number)
    if delivery is None:
        raise Problem(404, "no such delivery; see GET /v1/deliveries, or `imds-relay deliveries`")
    attempts = await call.run_long_read(
        lambda tx: tx.deliveries.attempts_of(delivery["id"], cursor, MAX_DETAIL_ROWS + 1)
    )
    log = attempts[-MAX_DETAIL_ROWS:]
    next_cursor = str(log[0]["number"]) if len(attempts) > MAX_DETAIL_ROWS else None
    return DeliveryDetails(**delivery, log=log, next=next_cursor)


class RedeliveredDeadLetter(TypedDict):
    """The dead letter is sent again now."""

    id: int
    sink: str
    state: EntryState


class BulkRedeliveryResult(TypedDict):
    """The number of dead letters that are sent again now."""

    redelivered: int


class BulkRedeliveryRequest(RequestBody):
    """Selects the dead letters of a sink. Without a sink, all."""

    sink: str | None = Field(default=None, max_length=64)


@post(
    "/v1/dead-letters/redeliver",
    "send all dead letters again, or those of a sink, the oldest first",
    status=202,
    needs="operate",
    problems=(404,),
)
async def redeliver_all(call: Call, body: BulkRedeliveryRequest) -> BulkRedeliveryResult:
    relay, now = call.relay, call.relay.clock.now()
    sinks = [sink.name for sink in relay.dispatcher.workers]
    if body.sink is not None and body.sink not in sinks:
        raise Problem(
            404, f"no sink {body.sink!r} in the configuration; {describe_choices(body.sink, sinks)}"
        )
    count = await relay.store.transact(lambda tx: tx.deliveries.redeliver(now, sink=body.sink))
    return BulkRedeliveryResult(redelivered=count)


@post(
    "/v1/dead-letters/{id}/redeliver",
    "send a dead letter again",
    status=202,
    needs="operate",
    problems=(409,),
)
async def redeliver(call: Call, number: str) -> RedeliveredDeadLetter:
    relay, found = call.relay, await _find_delivery(call, number)
    if found is None or found["state"] != "parked":
        text = "no such dead letter; see GET /v1/dead-letters, or `imds-relay deliveries --dead`"
        raise Problem(404, text)
    if found["sink"] not in {each.name for each in relay.dispatcher.workers}:
        raise Problem(409, f"the sink {found['sink']} is not in the configuration any more")
    now, entry_id = relay.clock.now(), found["id"]
    await relay.store.transact(lambda tx: tx.deliveries.redeliver(now, entry_id=entry_id))
    return RedeliveredDeadLetter(id=entry_id, sink=found["sink"], state="waiting")


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
            **_sink_details(sink),
            circuit=sink.health.circuit,
            oldestWaitingSeconds=sink.oldest_age(),
            delivered=sink.ends["delivered"],
            deadLetters=None if dead_letters is None else dead_letters.get(sink.name, 0),
        )
        for sink in call.relay.dispatcher.workers
    ]
    return SinkList(items=items)


def _find_sink(call: Call, name: str) -> Worker:
    sinks = {sink.name: sink for sink in call.relay.dispatcher.workers}
    if name not in sinks:
        choices = describe_choices(name, list(sinks))
        raise Problem(404, f"no such sink in the configuration; {choices}")
    return sinks[name]


@post("/v1/sinks/{name}/ping", "send a sink a test message", status=202, needs="operate")
async def ping(call: Call, name: str) -> PingRecorded:
    relay, at = call.relay, call.relay.clock.now()
    name = _find_sink(call, name).name
    reason = f"a test message, asked for by {call.caller.principal}"

    def record(tx: Transaction) -> CloudEvent:
        event = relay_event(
            "relay.ping", relay.origin, at, sink=name, reason=reason, count=1, head=str(tx.head())
        )
        tx.record(event, at, to=[name])
        return event

    event = await relay.store.transact(record)
    return PingRecorded(sink=name, id=event.id)


@post("/v1/sinks/{name}/pause", "let a sink's deliveries wait", needs="operate")
async def pause(call: Call, name: str) -> SinkDetails:
    return await _set_state(call, name, "paused", f"paused by {call.caller.principal}")


@post("/v1/sinks/{name}/resume", "send a sink's deliveries again", needs="operate")
async def resume(call: Call, name: str) -> SinkDetails:
    return await _set_state(call, name, "on", None)


async def _set_state(
    call: Call, name: str, state: Literal["on", "paused"], reason: str | None
) -> SinkDetails:
    sink = _find_sink(call, name)
    await call.relay.dispatcher.set_state(name, state, reason)
    principal = call.caller.principal
    extra = log_extra(sink=name, state=state, principal=principal)
    _log.warning("sink %s was set to %s by %s", name, state, principal, extra=extra)
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
