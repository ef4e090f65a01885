"""In order per EventId, concurrent across them, and every sink by itself."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import defaultdict
from itertools import groupby
from pathlib import Path

import pytest

from relay.delivery.worker import MAX_BATCH, MAX_OPEN_DELIVERIES
from relay.errors import Deferred, Rejected
from relay.events.cloudevent import CloudEvent
from relay.sinks import Receipt
from tests.delivery.running_dispatcher import Answer, Far, going, hangs, takes
from tests.outbox.open_store import until


async def test_every_event_arrives_once_in_order_per_event_id_with_many_under_way(
    tmp_path: Path,
) -> None:
    """Whatever takes how long, and whatever fails in between."""
    chance = random.Random(7)  # noqa: S311  # the same in every run

    async def moody(_: CloudEvent) -> Receipt:
        await asyncio.sleep(chance.random() * 0.004)
        if chance.random() < 0.15:
            raise Deferred("not now")
        return Receipt(200)

    far = Far(moody, concurrency=8, longest_pause=0.02)
    async with going(tmp_path, {"bus": far}) as relay:
        expected: dict[str, list[str]] = defaultdict(list)
        for _ in range(20):
            for subject in (f"E-{number}" for number in range(15)):
                expected[subject].append(
                    await relay.tell(
                        subject, chance.choice(["event.scheduled", "approval.recorded"])
                    )
                )
        await until(lambda: len(far.got) == 300)
        assert {subject: far.ids(subject) for subject in expected} == expected
        assert 2 <= far.most_under_way <= 8
        await relay.settled()
        assert {one.state for one in await relay.deliveries("bus")} == {"delivered"}


async def test_a_sink_that_hangs_delays_no_other(tmp_path: Path) -> None:
    """Promise 5."""
    hung, well = Far(hangs, concurrency=2), Far()
    async with going(tmp_path, {"hung": hung, "well": well}) as relay:
        ids = [await relay.tell(f"E-{number}") for number in range(50)]
        await until(lambda: len(well.got) == 50)
        assert well.ids() == ids
        assert len(hung.tried) == 2
        assert [one.waiting for one in relay.dispatcher.status()] == [50, 0]


async def test_one_event_that_waits_holds_back_no_other_event(tmp_path: Path) -> None:
    async def not_the_first(event: CloudEvent) -> Receipt:
        if event.subject == "E-0":
            raise Deferred("not this one")
        return Receipt()

    far = Far(not_the_first, longest_pause=300.0)
    async with going(tmp_path, {"bus": far}) as relay:
        for number in range(3):
            await relay.tell(f"E-{number}")
            await relay.tell(f"E-{number}", "event.started")
        await until(lambda: len(far.got) == 4)
        assert {event.subject for event in far.got} == {"E-1", "E-2"}


async def test_what_is_parked_blocks_nothing_behind_it(tmp_path: Path) -> None:
    async def never_scheduled(event: CloudEvent) -> Receipt:
        if event.name == "event.scheduled":
            raise Rejected("it is too big", status=413, answer="no")
        return Receipt()

    far = Far(never_scheduled)
    async with going(tmp_path, {"bus": far}) as relay:
        await relay.tell("E-1")
        await relay.tell("E-1", "event.started")
        await until(lambda: far.names() == ["event.started"])
        await relay.settled()
        parked, delivered = await relay.deliveries("bus")
        assert (parked.state, parked.reason, parked.last_status) == ("parked", "it is too big", 413)
        assert delivered.state == "delivered"
        assert await relay.attempts("bus") == [
            (parked.id, "parked", 413, "it is too big"),
            (delivered.id, "delivered", None, None),
        ]


@pytest.mark.parametrize("most", [1, 3])
async def test_a_sinks_own_limit_is_used_and_kept(tmp_path: Path, most: int) -> None:
    release = asyncio.Event()

    async def when_told(_: CloudEvent) -> Receipt:
        await release.wait()
        return Receipt()

    far = Far(when_told, concurrency=most)
    async with going(tmp_path, {"bus": far}) as relay:
        for number in range(30):
            await relay.tell(f"E-{number}")
        await until(lambda: far.under_way == most)
        await relay.settled()
        release.set()
        await until(lambda: len(far.got) == 30)
        assert far.most_under_way == most


async def test_a_newer_state_takes_the_place_of_queued_ones_where_the_sink_has_stale_drop(
    tmp_path: Path,
) -> None:
    """For people; programs get the whole history.

    See docs/protocol.md#people-want-the-newest-state.
    """
    chat, bus = Far(), Far()
    async with going(tmp_path, {"chat": chat, "bus": bus}, chat={"stale": "drop"}) as relay:
        await relay.dispatcher.set_state("chat", "paused", "lunch")
        for name in (
            "event.scheduled",
            "event.updated",
            "approval.recorded",
            "event.updated",
            "event.started",
        ):
            await relay.tell("E-1", name)
        await relay.tell("E-2")
        await relay.dispatcher.set_state("chat", "on", None)
        await until(lambda: len(chat.got) == 3 and len(bus.got) == 6)
        assert [event.name for event in chat.got if event.subject == "E-1"] == [
            "approval.recorded",
            "event.started",
        ]
        await relay.settled()
        assert [
            (one.type, one.state, one.reason)
            for one in await relay.deliveries("chat", "superseded")
        ] == [
            ("event.scheduled", "superseded", "replaced by a newer event.updated"),
            ("event.updated", "superseded", "replaced by a newer event.updated"),
            ("event.updated", "superseded", "replaced by a newer event.started"),
        ]


async def test_a_state_that_fails_while_a_newer_one_waits_is_not_tried_again_where_stale_is_drop(
    tmp_path: Path,
) -> None:
    goes = asyncio.Event()

    async def scheduled_fails(event: CloudEvent) -> Receipt:
        if event.name == "event.scheduled":
            await goes.wait()
            raise Deferred("not now")
        return Receipt()

    chat = Far(scheduled_fails)
    async with going(tmp_path, {"chat": chat}, chat={"stale": "drop"}) as relay:
        await relay.tell("E-1")
        await until(lambda: len(chat.tried) == 1)
        await relay.tell("E-1", "event.ended")
        goes.set()
        await until(lambda: chat.names() == ["event.ended"])
        await relay.settled()
        assert [(one.type, one.state) for one in await relay.deliveries("chat")] == [
            ("event.scheduled", "superseded"),
            ("event.ended", "delivered"),
        ]
        assert len(chat.tried) == 2


async def test_of_what_the_relay_says_of_itself_one_waits_for_each_kind_and_sink_meant(
    tmp_path: Path,
) -> None:
    bus = Far()
    async with going(tmp_path, {"bus": bus}) as relay:
        await relay.dispatcher.set_state("bus", "paused", None)
        told = [
            await relay.tell(about, name)
            for name, about in [
                ("relay.sink-failing", "a"),
                ("relay.sink-failing", "b"),
                ("relay.sink-recovered", "a"),
                ("relay.sink-failing", "a"),
                ("relay.source-lost", ""),
                ("relay.source-lost", ""),
            ]
        ]
        assert relay.dispatcher.status()[0].waiting == 4
        await relay.dispatcher.set_state("bus", "on", None)
        await until(lambda: len(bus.got) == 4)
        assert sorted(bus.ids()) == sorted(told[number] for number in (1, 2, 3, 5))


async def test_a_sink_that_never_waits_leaves_others_their_turn(tmp_path: Path) -> None:
    """However much waits for it: tasks take turns only where one waits, or ends."""
    turns: list[str] = []

    def at_once(name: str) -> Answer:
        async def answer(_: CloudEvent) -> Receipt:
            turns.append(name)
            return Receipt()

        return answer

    sinks = {name: Far(at_once(name), concurrency=1) for name in ("bus", "chat")}
    async with going(tmp_path, sinks) as relay:
        for name in sinks:
            await relay.dispatcher.set_state(name, "paused", None)
        for number in range(100):
            await relay.tell(f"E-{number}")
        for name in sinks:
            relay.dispatcher.worker(name).set_state("on", None)
        await until(lambda: len(turns) == 200)
    assert max(len(list(run)) for _, run in groupby(turns)) <= 2 * MAX_BATCH


async def test_no_more_is_sent_than_a_crash_may_repeat_while_the_disk_is_slow(
    tmp_path: Path,
) -> None:
    """What got through and is not written down as delivered yet is sent again after a crash: that are 64 at the most."""
    free, far = threading.Event(), Far(hangs)
    async with going(tmp_path, {"bus": far}) as relay:
        relay.dispatcher.worker("bus").set_state("paused", "until all are there")
        for number in range(200):
            await relay.tell(f"E-{number}")
        far.answer = takes
        blocked = relay.store.submit(lambda _: free.wait())
        relay.dispatcher.worker("bus").set_state("on", None)
        await until(lambda: len(far.got) == MAX_OPEN_DELIVERIES)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(far.got) == MAX_OPEN_DELIVERIES
        free.set()
        await blocked
        await until(lambda: len(far.got) == 200)
