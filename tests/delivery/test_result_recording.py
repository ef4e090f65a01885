"""Deliveries are recorded together: a commit costs the same for one as for many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from relay.clock import SystemClock
from relay.delivery.result_recording import FULL_BATCH, ResultRecorder
from relay.store import Attempt, StoreSettings
from relay.store.sqlite import Store, open_store
from tests.eventually import eventually
from tests.store.open_store import IDENTITY, NOW, connection_of, numbered_event

DELIVERED = Attempt(at=NOW, elapsed=0.1, outcome="delivered", status=200)
NEVER = 86400.0
EVENTS = 2 * FULL_BATCH


@asynccontextmanager
async def store_with_entries(folder: Path) -> AsyncIterator[tuple[Store, list[str]]]:
    """Yield a store with entries 1 to `EVENTS`, and the commits that follow."""
    settings = StoreSettings(path=folder / "relay.db")
    async with open_store(settings, IDENTITY, SystemClock(), lambda _: ["bus"]) as store:
        events = [(numbered_event(number), None) for number in range(EVENTS)]
        await store.transact(lambda tx: tx.record_all(events, NOW))
        commits: list[str] = []

        def note(statement: str) -> None:
            if statement == "COMMIT":
                commits.append(statement)

        await store.read(lambda tx: connection_of(tx).set_trace_callback(note))
        commits.clear()  # that of the line before
        yield store, commits


async def delivered_count(store: Store) -> int:
    """Return how many entries are recorded as delivered."""
    return len(await store.read(lambda tx: tx.deliveries.page(states=["delivered"])))


async def test_a_full_batch_is_written_at_once_and_fewer_deliveries_wait(tmp_path: Path) -> None:
    async with store_with_entries(tmp_path) as (store, commits):
        results = ResultRecorder(store, pause=NEVER)
        written: list[int] = []
        for entry_id in range(1, FULL_BATCH):
            results.record_delivery(entry_id, DELIVERED, lambda: written.append(1))
            await asyncio.sleep(0)
        assert await delivered_count(store) == 0
        commits.clear()
        results.record_delivery(FULL_BATCH, DELIVERED, lambda: written.append(1))
        await eventually(lambda: len(written) == FULL_BATCH)
        assert len(commits) == 1
        assert await delivered_count(store) == FULL_BATCH


async def test_a_stop_and_a_failure_wait_for_no_pause(tmp_path: Path) -> None:
    """The failure of an entry is recorded after the deliveries that ended before it."""
    async with store_with_entries(tmp_path) as (store, _):
        results = ResultRecorder(store, pause=NEVER)
        results.record_delivery(1, DELIVERED, lambda: None)
        results.record_end_without_delivery(2, "parked", "too big", NOW, None)
        assert await delivered_count(store) == 1
        results.record_delivery(3, DELIVERED, lambda: None)
        results.submit()
        assert await delivered_count(store) == 2


async def test_a_single_delivery_is_recorded_after_the_pause(tmp_path: Path) -> None:
    async with store_with_entries(tmp_path) as (store, _):
        results = ResultRecorder(store, pause=0.001)
        written = asyncio.Event()
        results.record_delivery(1, DELIVERED, written.set)
        await asyncio.wait_for(written.wait(), 60)
        assert await delivered_count(store) == 1
