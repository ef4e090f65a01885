"""A crash repeats at most 64 deliveries of a sink, also if the answers of the sink come late.

See docs/guarantees.md#a-crash-repeats-at-most-64-deliveries-per-sink.
"""

from __future__ import annotations

from pathlib import Path

from relay.delivery.worker import MAX_OPEN_DELIVERIES
from relay.errors import Deferred
from relay.events.cloudevent import CloudEvent
from relay.sinks import Receipt
from tests.delivery.running_dispatcher import (
    RunningDispatcher,
    ScriptedSink,
    SteppedClock,
    accepts,
    running_dispatcher,
)

EVENTS = 3 * MAX_OPEN_DELIVERIES


async def answers_late(_: CloudEvent) -> Receipt:
    """Stop the wait for an answer that can still come."""
    raise Deferred("no answer in time", unanswered=True)


def slow_sink(clock: SteppedClock) -> ScriptedSink:
    """Return a sink that answers nothing in time. Its concurrency is the limit."""
    return ScriptedSink(
        answers_late, concurrency=MAX_OPEN_DELIVERIES, longest_pause=5.0, clock=clock
    )


async def record_events(
    relay: RunningDispatcher, name: str = "event.scheduled", count: int = EVENTS
) -> None:
    """Record an event for each of more EventIds than may be open, and then turn the sink on."""
    await relay.dispatcher.set_state("bus", "paused", "until everything is recorded")
    for number in range(count):
        await relay.record_event(f"E-{number}", name)
    await relay.dispatcher.set_state("bus", "on", None)


def sent_ids(sink: ScriptedSink) -> set[str]:
    """Return the ids of the events that the sink was given."""
    return {event.id for _, event in sink.attempts}


async def test_no_more_is_sent_than_a_crash_may_repeat_while_answers_come_late(
    tmp_path: Path,
) -> None:
    """A sink that is failing is also probed with new events, one at a time."""
    clock = SteppedClock()
    sink = slow_sink(clock)
    async with running_dispatcher(tmp_path, {"bus": sink}, clock=clock) as relay:
        await record_events(relay)
        await relay.forward(1.0)
        assert len(sent_ids(sink)) == MAX_OPEN_DELIVERIES
        await relay.forward(120.0)
        await relay.record_event("E-new")
        await relay.forward(120.0)
        assert relay.dispatcher.status()[0].failing
        probes = len(sink.attempts) - MAX_OPEN_DELIVERIES
        assert 0 < len(sent_ids(sink)) - MAX_OPEN_DELIVERIES <= probes < MAX_OPEN_DELIVERIES
        sink.answer = accepts
        await relay.forward(60.0)
        assert len(sink.delivered) == len(set(sink.ids())) == EVENTS + 1


async def test_a_superseded_delivery_makes_room_for_others(tmp_path: Path) -> None:
    clock = SteppedClock()
    sink = slow_sink(clock)
    async with running_dispatcher(
        tmp_path, {"bus": sink}, clock=clock, bus={"stale": "drop"}
    ) as relay:
        await record_events(relay)
        await relay.forward(1.0)
        await record_events(relay, "event.started")
        await relay.forward(60.0)
        assert len(sent_ids(sink)) > MAX_OPEN_DELIVERIES
