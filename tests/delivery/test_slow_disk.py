"""A slow disk, or a bad page, does not slow deliveries down to a few for each commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from relay.delivery.result_recording import FULL_BATCH, ResultRecorder
from relay.delivery.worker import MAX_OPEN_DELIVERIES
from relay.errors import StoreUnavailable
from relay.store import Attempt
from relay.store.sqlite import Store, Work
from relay.store.transaction import Transaction
from tests.clocks import ManualClock
from tests.delivery.running_dispatcher import ScriptedSink, hangs, running_dispatcher
from tests.eventually import eventually
from tests.store.open_store import NOW, numbered_event, open_store_in, read_column

EVENTS = 4 * MAX_OPEN_DELIVERIES
CONCURRENCY = 3


class HeldTransaction:
    """A transaction that is not committed before the test says so."""

    def __init__(self, store: Store) -> None:
        self._is_running, self._is_free = threading.Event(), threading.Event()
        store.submit(self._wait)

    def _wait(self, _: Transaction) -> None:
        self._is_running.set()
        self._is_free.wait()

    async def until_running(self) -> None:
        """Wait until everything before it is committed, and until the loop has handled that."""
        await eventually(self._is_running.is_set)
        for _ in range(2000):
            await asyncio.sleep(0)

    def commit(self) -> None:
        """Let it end, with everything that was queued behind it when it began."""
        self._is_free.set()


@pytest.mark.parametrize("event_ids", [1, EVENTS])
async def test_a_commit_makes_room_for_all_that_may_be_open(tmp_path: Path, event_ids: int) -> None:
    """Events that are not in memory are read ahead, so that slots do not wait for reads."""
    async with running_dispatcher(tmp_path, {"bus": ScriptedSink(hangs)}, run=False) as relay:
        ids = [await relay.record_event(f"E-{number % event_ids}") for number in range(EVENTS)]
    sink = ScriptedSink(concurrency=CONCURRENCY)
    async with running_dispatcher(tmp_path, {"bus": sink}) as relay:
        held, commits, recorded = HeldTransaction(relay.store), 0, 0
        while len(sink.delivered) < EVENTS:
            await held.until_running()
            assert len(sink.delivered) - recorded <= MAX_OPEN_DELIVERIES
            following = HeldTransaction(relay.store)
            held.commit()
            held, commits = following, commits + 1
            await held.until_running()
            query = "SELECT count(*) FROM entry WHERE state = 'delivered'"
            (recorded,) = read_column(tmp_path / "relay.db", query)
        held.commit()
        assert commits <= 8 * EVENTS / MAX_OPEN_DELIVERIES  # one by one, it would take EVENTS / 3
        for number in range(event_ids):
            assert sink.ids(f"E-{number}") == ids[number::event_ids]


async def record_events(folder: Path, count: int = 10) -> None:
    async with running_dispatcher(folder, {"bus": ScriptedSink(hangs)}, run=False) as relay:
        await relay.record_events(count)
        await relay.dispatcher.set_state("bus", "paused", None)


async def test_an_event_is_read_by_itself_if_others_cannot_be_read_with_it(tmp_path: Path) -> None:
    """No entry waits for a later try: time does not pass."""
    await record_events(tmp_path)
    sink = ScriptedSink(concurrency=1)
    async with running_dispatcher(tmp_path, {"bus": sink}, clock=ManualClock()) as relay:
        read, together = relay.store.read, 0

        async def reads_one(work: Work[object]) -> object:
            nonlocal together
            result = await read(work)
            if isinstance(result, dict) and len(result) > 1:
                together += 1
                raise StoreUnavailable("one of these pages cannot be read")
            return result

        relay.store.read = reads_one  # type: ignore[method-assign,assignment]  # a bad page
        await relay.dispatcher.set_state("bus", "on", None)
        await eventually(lambda: len(sink.delivered) == 10)
        assert together


# --- deliveries are recorded together

DELIVERED = Attempt(at=NOW, elapsed=0.1, outcome="delivered", status=200)
NEVER = 86400.0


@asynccontextmanager
async def store_with_entries(folder: Path) -> AsyncIterator[tuple[Store, list[str]]]:
    """Yield a store with its entries, and the commits that follow."""
    async with open_store_in(folder) as store:
        events = [(numbered_event(number), None) for number in range(2 * FULL_BATCH)]
        await store.transact(lambda tx: tx.record_all(events, NOW))
        commits: list[str] = []

        def note(statement: str) -> None:
            if statement == "COMMIT":
                commits.append(statement)

        await store.read(lambda tx: tx.connection.set_trace_callback(note))
        commits.clear()  # that of the line before
        yield store, commits


async def delivered_count(store: Store) -> int:
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
        results.record(lambda tx: tx.deliveries.store_final_state(2, "parked", "too big", NOW))
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
