"""Which dead letters are kept if there are too many, and how their loss is reported."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

from relay.events.cloudevent import event_name
from relay.store import StoreSettings
from relay.store.retention import PRUNE_INTERVAL, prune_forever
from relay.store.transaction import Transaction
from tests.clocks import ManualClock
from tests.delivery.running_dispatcher import RunningDispatcher, ScriptedSink, running_dispatcher

MAX_DEAD_LETTERS = 20


async def record_dead_letters(relay: RunningDispatcher, name: str, count: int) -> None:
    await relay.record_events(count, name)
    now = datetime.now(UTC)
    ids = [delivery["id"] for delivery in await relay.deliveries("bus", "waiting")]

    def give_up(tx: Transaction) -> None:
        for entry_id in ids:
            tx.deliveries.store_final_state(entry_id, "parked", "no", now)

    await relay.store.transact(give_up)


async def dead_letter_types(relay: RunningDispatcher) -> list[str]:
    return [event_name(delivery["type"]) for delivery in await relay.deliveries("bus", "parked")]


async def test_a_flood_of_refusals_pushes_no_event_out_of_the_dead_letters(tmp_path: Path) -> None:
    """Of each type the oldest go first, and each report counts what was lost since the start."""
    reports: list[tuple[str, str, str | None, int]] = []

    def report(
        name: str, reason: str, *, sink: str | None = None, count: int = 1, **_: object
    ) -> None:
        reports.append((name, reason, sink, count))

    clock = ManualClock()
    async with running_dispatcher(tmp_path, {"bus": ScriptedSink()}, run=False) as relay:
        relay.store.settings = StoreSettings(path=tmp_path, dead_letters=MAX_DEAD_LETTERS)
        await record_dead_letters(relay, "event.scheduled", 10)
        await record_dead_letters(relay, "approval.granted", 5)
        await record_dead_letters(relay, "approval.refused", 100)
        newest = (await relay.deliveries("bus", "parked"))[-5:]
        task = asyncio.create_task(prune_forever(relay.store, clock, report))
        await clock.forward(1.0, relay.settle)
        assert await dead_letter_types(relay) == [
            *["event.scheduled"] * 10,
            *["approval.granted"] * 5,
            *["approval.refused"] * 5,
        ]
        assert (await relay.deliveries("bus", "parked"))[-5:] == newest
        await record_dead_letters(relay, "event.started", 12)
        await clock.forward(PRUNE_INTERVAL, relay.settle)
        assert await dead_letter_types(relay) == [*["event.scheduled"] * 8, *["event.started"] * 12]
        await clock.forward(PRUNE_INTERVAL, relay.settle)
        task.cancel()
    reason = (
        "{} dead letters were deleted since the relay started, because there were more than "
        "store.dead_letters: {}"
    )
    assert reports == [
        ("relay.dead-lettered", reason.format(95, "95 approval.refused"), None, 95),
        (
            "relay.dead-lettered",
            reason.format(107, "5 approval.granted, 100 approval.refused, 2 event.scheduled"),
            None,
            107,
        ),
    ]
