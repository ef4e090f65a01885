"""What a restart takes up: waiting entries, new sinks, removed sinks, redelivered dead letters."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path

from relay.clock import SystemClock
from relay.delivery.dispatcher import Dispatcher
from relay.errors import Deferred, Rejected, StoreUnavailable
from relay.events.cloudevent import CloudEvent
from relay.sinks import Receipt, SinkSettings
from tests.builders import DATA, cloudevent
from tests.delivery.running_dispatcher import (
    ScriptedSink,
    accepts,
    gives,
    hangs,
    running_dispatcher,
)
from tests.eventually import eventually
from tests.store.open_store import NOW, add_occurrence, end_occurrence, open_store_in


async def test_what_was_not_settled_goes_out_again_with_its_ids_in_order(tmp_path: Path) -> None:
    far = ScriptedSink(hangs, concurrency=3)
    names = ("event.scheduled", "approval.recorded", "event.started")
    async with running_dispatcher(tmp_path, {"bus": far}) as relay:
        expected = await relay.record_events(10, *names)
        await eventually(lambda: far.in_flight == 3)
    far.answer = accepts
    async with running_dispatcher(tmp_path, {"bus": far}) as relay:
        await eventually(lambda: len(far.delivered) == 30)
        assert {subject: far.ids(subject) for subject in expected} == expected
        await relay.settle()
        done = {(each["state"], each["attempts"]) for each in await relay.deliveries("bus")}
        assert done == {("delivered", 1)}, "what a stop cuts off is no failed try"
    async with running_dispatcher(tmp_path, {"bus": far}) as relay:
        await relay.settle()
        assert len(far.delivered) == 30


async def test_a_new_sink_is_told_every_live_event_that_it_wants_once(tmp_path: Path) -> None:
    """As it now stands; nothing that has ended, and nothing of what the relay said of itself."""
    bus, chat, pager = ScriptedSink(), ScriptedSink(), ScriptedSink()
    async with running_dispatcher(tmp_path, {"bus": bus}) as relay:
        for subject in ("E-1", "E-2", "E-3"):
            await relay.record_event(subject, eventType="Reboot" if subject == "E-1" else "Freeze")
        await relay.record_event("E-1", "event.started", eventType="Reboot")
        await relay.record_event("E-1", "approval.recorded", eventType="Reboot")
        await relay.record_event("E-3", "event.ended")
        await relay.record_event("drain", "relay.sink-failing")
        for subject in ("e-1", "e-2", "e-3"):
            await relay.store.transact(partial(add_occurrence, key=subject))
        await relay.store.transact(partial(end_occurrence, key="e-3"))
        await eventually(lambda: len(bus.delivered) == 7)
    for _ in range(2):
        async with running_dispatcher(
            tmp_path,
            {"bus": bus, "chat": chat, "pager": pager},
            chat={"events": ["event.*"]},
            pager={"match": {"event_type": ["reboot"]}},
        ) as relay:
            await eventually(lambda: len(chat.delivered) == 2 and len(pager.delivered) == 1)
            await relay.settle()
        assert [(event.subject, event.name) for event in chat.delivered] == [
            ("E-1", "event.started"),
            ("E-2", "event.scheduled"),
        ]
        (paged,) = pager.delivered
        assert (paged.subject, paged.name) == ("E-1", "event.started")
        assert len(bus.delivered) == 7


async def test_what_waits_for_a_sink_that_is_gone_or_unknown_is_parked(tmp_path: Path) -> None:
    """Else it would wait for ever, and hold up StartRequests and pruning."""
    bus, chat = ScriptedSink(hangs), ScriptedSink()
    async with running_dispatcher(tmp_path, {"bus": bus, "chat": chat}) as relay:
        await relay.record_events(2)
        await relay.store.transact(lambda tx: tx.record(cloudevent(), NOW, to=["nobody"]))
        await eventually(lambda: len(chat.delivered) == 2)
        assert not relay.task.done()
    bus.answer = accepts
    async with running_dispatcher(tmp_path, {"chat": chat}) as relay:
        for sink, count in (("bus", 2), ("nobody", 1)):
            reason = f"the sink {sink} is not in the configuration any more"
            left = await relay.deliveries(sink)
            assert [(each["state"], each["reason"]) for each in left] == [
                ("parked", reason)
            ] * count
        assert not await relay.redeliver(1, NOW)
    async with running_dispatcher(tmp_path, {"bus": bus, "chat": chat}) as relay:
        await relay.settle()
        assert not bus.delivered, "parked is parked, until somebody sends it again"
        for delivery in await relay.deliveries("bus", "parked"):
            assert await relay.redeliver(delivery["id"], NOW)
        await eventually(lambda: len(bus.delivered) == 2)


async def test_a_dead_letter_goes_out_again_with_its_id_and_a_new_life(tmp_path: Path) -> None:
    """Its old age and tries count no more, after a restart neither."""
    later = Deferred("not yet")
    by_and_by = gives(Rejected("no"), later, later, Receipt())
    far = ScriptedSink(by_and_by, give_up_after=3600.0, longest_pause=300.0)
    async with running_dispatcher(tmp_path, {"bus": far}) as relay:
        told = await relay.record_event("E-1")
        await eventually(lambda: relay.dispatcher.workers[0].waiting == 0)
        long_ago = "UPDATE entry SET recorded = '2020-01-01T00:00:00.000000Z'"
        await relay.store.transact(lambda tx: tx.connection.execute(long_ago))
        assert await relay.redeliver(1, relay.clock.now())
        await eventually(lambda: len(far.attempts) == 2)
        assert not await relay.redeliver(1, relay.clock.now()), "it waits already"
        await relay.settle()
        assert [delivery["state"] for delivery in await relay.deliveries("bus")] == ["waiting"]
    async with running_dispatcher(tmp_path, {"bus": far}) as relay:
        await eventually(lambda: len(far.delivered) == 1)
        assert far.ids() == [told]
        await relay.settle()
        (delivery,) = await relay.deliveries("bus")
        assert (delivery["state"], delivery["attempts"]) == ("delivered", 4)


async def test_a_ping_goes_to_the_pinged_sink_alone(tmp_path: Path) -> None:
    bus, chat = ScriptedSink(), ScriptedSink()
    async with running_dispatcher(
        tmp_path, {"bus": bus, "chat": chat}, bus={"events": ["event.*"]}
    ) as relay:
        ping = cloudevent("relay.ping", "bus", {"sink": "bus", "reason": "asked for", "count": 1})
        await relay.store.transact(lambda tx: tx.record(ping, NOW, to=["bus"]))
        await eventually(lambda: len(bus.delivered) == 1)
        await relay.settle()
        assert not chat.delivered


async def test_what_is_at_hand_goes_out_without_a_store(tmp_path: Path) -> None:
    """And what is not at hand is no mistake of the sink: it waits."""
    far = ScriptedSink()
    async with running_dispatcher(tmp_path, {"bus": far}) as relay:
        await relay.dispatcher.set_state("bus", "paused", None)
        await relay.record_event("E-1")
    async with running_dispatcher(tmp_path, {"bus": far}) as relay:
        await relay.record_event("E-2")
        read = relay.store.read
        failures = 0

        async def broken(_: object) -> object:
            nonlocal failures
            failures += 1
            if failures > 2:
                return await read(_)  # type: ignore[arg-type]  # work
            raise StoreUnavailable("the disk is gone")

        relay.store.read = broken  # type: ignore[method-assign,assignment]  # a disk that cannot be read, and a process that goes on
        await relay.dispatcher.set_state("bus", "on", None)
        await eventually(lambda: bool(far.delivered))
        assert [event.subject for event in far.delivered] == ["E-2"]
        assert not relay.dispatcher.workers[0].failing
        await eventually(lambda: len(far.delivered) == 2)
        relay.store.read = read  # type: ignore[method-assign]  # as it was
        await relay.settle()
        assert [delivery["attempts"] for delivery in await relay.deliveries("bus")] == [1, 1]


async def test_an_event_that_cannot_be_read_is_parked_and_the_others_go(tmp_path: Path) -> None:
    far = ScriptedSink()
    async with running_dispatcher(tmp_path, {"bus": far}, run=False) as relay:
        await relay.record_events(3)
        await relay.store.transact(
            lambda tx: tx.connection.execute("DROP TRIGGER journal_is_append_only")
        )
        await relay.store.transact(
            lambda tx: tx.connection.execute("UPDATE journal SET body = x'7b' WHERE position = 2")
        )
    async with running_dispatcher(tmp_path, {"bus": far}) as relay:
        await eventually(lambda: len(far.delivered) == 2)
        await relay.settle()
        deliveries = await relay.deliveries("bus")
        assert [each["state"] for each in deliveries] == ["delivered", "parked", "delivered"]
        reason = deliveries[1]["reason"] or ""
        assert reason.startswith("its event could not be read from the journal")


async def test_what_is_recorded_during_the_start_is_sent_once(tmp_path: Path) -> None:
    """A chat sink refreshes messages once connected, which is before the dispatcher starts."""
    far, clock = ScriptedSink(accepts, concurrency=3), SystemClock()
    settings = SinkSettings(kind="test", name="bus")
    async with open_store_in(tmp_path) as store:
        dispatcher = Dispatcher({"bus": (settings, far)}, store, clock, lambda *_, **__: None)
        starting = asyncio.create_task(dispatcher.begin())
        told: list[str] = []
        while not starting.done():
            if len(told) < 500:  # the slower the disk, the longer the start takes
                event_id = f"{len(told):032x}"
                event = cloudevent("event.scheduled", f"E-{len(told)}", DATA, id=event_id)
                store.submit(lambda tx, event=event: tx.record(event, NOW))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
                told.append(event.id)
            await asyncio.sleep(0)
        await starting
        task = asyncio.create_task(dispatcher.run())
        await eventually(lambda: len(far.delivered) >= len(told))
        await dispatcher.drain()
        task.cancel()
        await asyncio.wait({task})
        assert sorted(event.id for event in far.delivered) == told


async def test_what_was_taken_before_an_orderly_stop_is_not_sent_again(tmp_path: Path) -> None:
    """Also what was taken while the store was busy, and not written down yet."""
    go, busy = asyncio.Event(), threading.Event()

    async def when_told(_: CloudEvent) -> Receipt:
        await go.wait()
        return Receipt()

    far = ScriptedSink(when_told, concurrency=20)
    async with running_dispatcher(tmp_path, {"bus": far}) as relay:
        await relay.record_events(20)
        await eventually(lambda: far.in_flight == 20)
        relay.store.submit(lambda _: busy.wait(10))
        go.set()
        await eventually(lambda: len(far.delivered) == 20)
        relay.task.cancel()
        await asyncio.wait({relay.task})
        busy.set()
    async with running_dispatcher(tmp_path, {"bus": far}) as relay:
        await relay.settle()
        assert len(far.delivered) == 20


async def test_a_redelivered_old_state_does_not_replace_newer_ones(tmp_path: Path) -> None:
    """Not even where the sink has stale: drop: somebody asked for it."""
    chat = ScriptedSink(gives(Rejected("no"), to=lambda event: event.name == "event.scheduled"))
    async with running_dispatcher(tmp_path, {"chat": chat}, chat={"stale": "drop"}) as relay:
        await relay.record_event("E-1")
        await eventually(lambda: relay.dispatcher.workers[0].waiting == 0)
        await relay.dispatcher.set_state("chat", "paused", None)
        await relay.record_event("E-1", "event.started")
        chat.answer = accepts
        assert await relay.redeliver(1, NOW)
        await relay.dispatcher.set_state("chat", "on", None)
        await eventually(lambda: len(chat.delivered) == 2)
        assert chat.names() == ["event.started", "event.scheduled"]
