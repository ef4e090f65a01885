"""In order per EventId, the important first, concurrent, and every sink by itself."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from itertools import groupby
from pathlib import Path

import pytest

from relay.delivery.ordered_queue import MAX_EVENTS_IN_MEMORY
from relay.delivery.worker import MAX_BATCH
from relay.errors import Deferred, Rejected
from relay.events.cloudevent import CloudEvent, event_name
from relay.sinks import Receipt
from tests.clocks import ManualClock
from tests.delivery.running_dispatcher import (
    Answer,
    ScriptedSink,
    accepts,
    gives,
    hangs,
    refuses,
    running_dispatcher,
)
from tests.eventually import eventually


async def test_every_event_arrives_once_and_in_order_with_many_under_way(tmp_path: Path) -> None:
    """Whatever takes how long, and whatever fails in between."""
    chance = random.Random(7)  # noqa: S311  # the same in every run

    async def moody(_: CloudEvent) -> Receipt:
        await asyncio.sleep(chance.random() * 0.004)
        if chance.random() < 0.15:
            raise Deferred("not now")
        return Receipt(200)

    far = ScriptedSink(moody, concurrency=8, longest_pause=0.02)
    async with running_dispatcher(tmp_path, {"bus": far}) as relay:
        expected: dict[str, list[str]] = defaultdict(list)
        for number in range(300):
            subject = f"E-{number % 15}"
            name = chance.choice(["event.scheduled", "approval.recorded"])
            expected[subject].append(await relay.record_event(subject, name))
        await eventually(lambda: len(far.delivered) == 300)
        assert {subject: far.ids(subject) for subject in expected} == expected
        assert 2 <= far.max_in_flight <= 8
        await relay.settle()
        assert {delivery["state"] for delivery in await relay.deliveries("bus")} == {"delivered"}


async def test_a_sink_that_hangs_delays_no_other(tmp_path: Path) -> None:
    """Promise 5."""
    hung, well = ScriptedSink(hangs, concurrency=2), ScriptedSink()
    async with running_dispatcher(tmp_path, {"hung": hung, "well": well}) as relay:
        ids = [await relay.record_event(f"E-{number}") for number in range(50)]
        await eventually(lambda: len(well.delivered) == 50)
        assert well.ids() == ids
        assert len(hung.attempts) == 2
        assert [delivery.waiting for delivery in relay.dispatcher.workers] == [50, 0]


async def test_a_newer_state_replaces_queued_ones_where_stale_is_drop(tmp_path: Path) -> None:
    """Programs get the whole history (docs/protocol.md#people-want-the-newest-state)."""
    chat, bus = ScriptedSink(), ScriptedSink()
    async with running_dispatcher(
        tmp_path, {"chat": chat, "bus": bus}, chat={"stale": "drop"}
    ) as relay:
        await relay.dispatcher.set_state("chat", "paused", "lunch")
        for name in (
            "event.scheduled",
            "event.updated",
            "approval.recorded",
            "event.updated",
            "event.started",
        ):
            await relay.record_event("E-1", name)
        await relay.record_event("E-2")
        await relay.dispatcher.set_state("chat", "on", None)
        await eventually(lambda: len(chat.delivered) == 3 and len(bus.delivered) == 6)
        told = [event.name for event in chat.delivered if event.subject == "E-1"]
        assert told == ["approval.recorded", "event.started"]
        await relay.settle()
        superseded = await relay.deliveries("chat", "superseded")
        assert [(event_name(each["type"]), each["reason"]) for each in superseded] == [
            ("event.scheduled", "replaced by a newer event.updated"),
            ("event.updated", "replaced by a newer event.updated"),
            ("event.updated", "replaced by a newer event.started"),
        ]


async def test_a_failed_state_gives_way_to_a_newer_one_where_stale_is_drop(tmp_path: Path) -> None:
    goes = asyncio.Event()

    async def scheduled_fails(event: CloudEvent) -> Receipt:
        if event.name == "event.scheduled":
            await goes.wait()
            raise Deferred("not now")
        return Receipt()

    chat = ScriptedSink(scheduled_fails)
    async with running_dispatcher(tmp_path, {"chat": chat}, chat={"stale": "drop"}) as relay:
        await relay.record_event("E-1")
        await eventually(lambda: len(chat.attempts) == 1)
        await relay.record_event("E-1", "event.ended")
        goes.set()
        await eventually(lambda: chat.names() == ["event.ended"])
        await relay.settle()
        left = await relay.deliveries("chat")
        assert [event_name(each["type"]) for each in left] == ["event.scheduled", "event.ended"]
        assert [each["state"] for each in left] == ["superseded", "delivered"]
        assert len(chat.attempts) == 2


async def test_dead_letters_that_are_redelivered_replace_each_other_nowhere(tmp_path: Path) -> None:
    """Whoever sends them again wants all of them, also where stale is drop."""
    chat = ScriptedSink(gives(Rejected("no")))
    async with running_dispatcher(tmp_path, {"chat": chat}, chat={"stale": "drop"}) as relay:
        for name in ("event.scheduled", "event.updated"):
            await relay.record_event("E-1", name)
            await relay.settle()
        chat.answer = accepts
        await relay.dispatcher.set_state("chat", "paused", "lunch")
        for delivery in await relay.deliveries("chat", "parked"):
            assert await relay.redeliver(delivery["id"], relay.clock.now())
        await relay.dispatcher.set_state("chat", "on", None)
        await eventually(lambda: chat.names() == ["event.scheduled", "event.updated"])


async def test_of_news_of_the_relay_one_waits_for_each_kind_and_sink_meant(tmp_path: Path) -> None:
    bus = ScriptedSink()
    async with running_dispatcher(tmp_path, {"bus": bus}) as relay:
        await relay.dispatcher.set_state("bus", "paused", None)
        told = [
            await relay.record_event(about, name)
            for name, about in [
                ("relay.sink-failing", "a"),
                ("relay.sink-failing", "b"),
                ("relay.sink-recovered", "a"),
                ("relay.sink-failing", "a"),
                ("relay.source-lost", ""),
                ("relay.source-lost", ""),
            ]
        ]
        assert relay.dispatcher.workers[0].waiting == 4
        await relay.dispatcher.set_state("bus", "on", None)
        await eventually(lambda: len(bus.delivered) == 4)
        assert sorted(bus.ids()) == sorted(told[number] for number in (1, 2, 3, 5))


async def test_a_sink_that_never_waits_leaves_others_their_turn(tmp_path: Path) -> None:
    """However much waits for it: tasks take turns only where one waits, or ends."""
    turns: list[str] = []

    def at_once(name: str) -> Answer:
        async def answer(_: CloudEvent) -> Receipt:
            turns.append(name)
            return Receipt()

        return answer

    sinks = {name: ScriptedSink(at_once(name), concurrency=1) for name in ("bus", "chat")}
    async with running_dispatcher(tmp_path, sinks) as relay:
        for name in sinks:
            await relay.dispatcher.set_state(name, "paused", None)
        await relay.record_events(100)
        for name in sinks:
            relay.dispatcher.get_worker(name).set_sink_state("on", None)
        await eventually(lambda: len(turns) == 200)
    assert max(len(list(run)) for _, run in groupby(turns)) <= 2 * MAX_BATCH


# --- what is important comes first

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
