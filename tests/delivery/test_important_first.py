"""Refusals and ``relay.*`` never delay what happens to events, whatever waits in front."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from relay.delivery.ordered_queue import MAX_EVENTS_IN_MEMORY
from relay.errors import Deferred
from relay.events.cloudevent import CloudEvent
from relay.sinks import Receipt
from tests.clocks import ManualClock
from tests.delivery.running_dispatcher import (
    ScriptedSink,
    accepts,
    gives,
    refuses,
    running_dispatcher,
)
from tests.eventually import eventually

FLOOD = MAX_EVENTS_IN_MEMORY + 100


@pytest.mark.parametrize("concurrency", [1, 16, 64], ids=["chat", "webhook", "bus"])
async def test_an_event_waits_for_deliveries_in_flight_and_for_no_refusal_behind_them(
    tmp_path: Path, concurrency: int
) -> None:
    answered = asyncio.Event()

    async def answers_later(_: CloudEvent) -> Receipt:
        await answered.wait()
        return Receipt()

    sink = ScriptedSink(answers_later, concurrency=concurrency)
    async with running_dispatcher(tmp_path, {"bus": sink}) as relay:
        await relay.record_events(FLOOD, "approval.refused")
        event = await relay.record_event("E-new")
        answered.set()
        await eventually(lambda: len(sink.delivered) == FLOOD + 1)
        sent = [event.id for _, event in sink.attempts]
        assert sent.index(event) <= concurrency


async def test_events_come_before_decisions_and_these_before_all_else(tmp_path: Path) -> None:
    """What precedes them in the order of their EventId comes with them."""
    sink = ScriptedSink(concurrency=1)
    async with running_dispatcher(tmp_path, {"bus": sink}) as relay:
        await relay.dispatcher.set_state("bus", "paused", None)
        for subject, name in [
            ("E-5", "approval.refused"),
            ("E-1", "approval.refused"),
            ("chat", "relay.sink-failing"),
            ("E-1", "approval.recorded"),
            ("E-1", "approval.refused"),
            ("E-2", "startrequest.accepted"),
            ("E-2", "event.started"),
            ("E-1", "approval.granted"),
            ("E-3", "approval.voided"),
            ("E-3", "event.updated"),
            ("E-4", "event.scheduled"),
            ("E-4", "event.started"),
        ]:
            await relay.record_event(subject, name)
        await relay.dispatcher.set_state("bus", "on", None)
        await eventually(lambda: len(sink.delivered) == 12)
        assert [(event.subject, event.name) for event in sink.delivered] == [
            ("E-2", "startrequest.accepted"),
            ("E-2", "event.started"),
            ("E-3", "approval.voided"),
            ("E-3", "event.updated"),
            ("E-4", "event.scheduled"),
            ("E-4", "event.started"),
            ("E-1", "approval.refused"),
            ("E-1", "approval.recorded"),
            ("E-1", "approval.refused"),
            ("E-1", "approval.granted"),
            ("chat", "relay.sink-failing"),
            ("E-5", "approval.refused"),
        ]


async def test_a_new_event_is_the_next_probe_of_a_failing_sink(tmp_path: Path) -> None:
    clock = ManualClock()
    sink = ScriptedSink(refuses, longest_pause=5.0, clock=clock)
    async with running_dispatcher(tmp_path, {"bus": sink}, clock=clock) as relay:
        await relay.record_events(100, "approval.refused")
        await relay.forward(60.0)
        assert relay.dispatcher.workers[0].failing
        before = len(sink.attempts)
        await relay.record_event("E-new")
        await relay.forward(30.0)
        probes = [event.name for _, event in sink.attempts[before:]]
        assert probes[0] == "event.scheduled"
        assert "approval.refused" in probes
        sink.answer = accepts
        await relay.forward(60.0)
        assert len(sink.delivered) == 101


async def test_new_refusals_that_fail_keep_no_event_from_being_probed(tmp_path: Path) -> None:
    clock = ManualClock()
    sink = ScriptedSink(refuses, clock=clock)
    async with running_dispatcher(tmp_path, {"bus": sink}, clock=clock) as relay:
        await relay.record_event("E-1", not_before=900.0)
        await relay.forward(30.0)
        assert relay.dispatcher.workers[0].failing
        down = Deferred("it refused the connection")
        sink.answer = gives(down, to=lambda event: event.name == "approval.refused")
        for number in range(20):
            await relay.record_event(f"R-{number}", "approval.refused")
            await relay.forward(0.5)
        assert sink.names()[:1] == ["event.scheduled"]
