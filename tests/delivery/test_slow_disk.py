"""A slow disk does not slow deliveries down to a few for each commit."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from relay.delivery.worker import MAX_OPEN_DELIVERIES
from relay.store.sqlite import Store
from relay.store.transaction import Transaction
from tests.delivery.running_dispatcher import ScriptedSink, hangs, running_dispatcher
from tests.eventually import eventually
from tests.store.open_store import read_column

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
async def test_a_commit_makes_room_for_as_many_deliveries_as_may_be_open(
    tmp_path: Path, event_ids: int
) -> None:
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
