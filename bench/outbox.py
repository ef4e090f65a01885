"""The relay's store and dispatcher inside the process of a measurement, and state files with rows.

It is for what a whole relay cannot be brought to in seconds: a flood of refusals, a long journal, a
large backlog.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson

from bench.imds import VM_ID, event_id
from relay import sinks
from relay.clock import SystemClock
from relay.config import sink_modules
from relay.delivery.dispatcher import Dispatcher
from relay.events.cloudevent import CloudEvent
from relay.store import StateFileScopeAndVm, StoreSettings
from relay.store.journal import NewRow
from relay.store.sqlite import Store, open_store
from relay.store.transaction import Transaction
from tests.builders import cloudevent

OWNER = StateFileScopeAndVm("bench", VM_ID)
BATCH = 5000
"""Rows in one transaction while a state file is filled."""
_AGE = timedelta(hours=2)
"""How old the rows are."""


@dataclass(frozen=True, slots=True)
class Outbox:
    """A store, and a dispatcher that delivers its events."""

    store: Store
    dispatcher: Dispatcher

    def record(self, events: Sequence[CloudEvent]) -> asyncio.Future[None]:
        """Record events in one transaction, as the recorder does with those of a poll."""
        now = datetime.now(UTC)
        return self.store.submit(lambda tx: tx.record_all([(event, None) for event in events], now))


@asynccontextmanager
async def open_outbox(sections: Sequence[dict[str, Any]]) -> AsyncIterator[Outbox]:
    """Yield an outbox with these sinks."""
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        settings = [
            sink_modules()[section["kind"]].Settings.model_validate(section) for section in sections
        ]
        names = [sink.name for sink in settings]
        file = StoreSettings(path=Path(directory) / "bench.db")
        store = await stack.enter_async_context(open_store(file, OWNER, clock, lambda _: names))
        connected: dict[str, tuple[sinks.SinkSettings, sinks.Sink]] = {}
        for sink in settings:
            context = sink_modules()[sink.kind].connect(sink, clock)
            connected[sink.name] = (sink, await stack.enter_async_context(context))
        dispatcher = Dispatcher(connected, store, clock, lambda *_, **__: None)
        await dispatcher.load_waiting_and_listen()
        running = asyncio.create_task(dispatcher.run())
        yield Outbox(store, dispatcher)
        running.cancel()
        await asyncio.wait({running})


async def until(condition: Callable[[], bool]) -> None:
    """Poll until a condition holds."""
    while not condition():  # noqa: ASYNC110  # nothing signals it
        await asyncio.sleep(0.002)


async def fill_backlog(path: Path, run: int, count: int, sink: str) -> None:
    """Make a state file with so many events of a run that wait for a sink."""

    def work(first: int, last: int) -> Callable[[Transaction], None]:
        events = [(cloudevent(subject=event_id(run, n)), None) for n in range(first, last)]
        return lambda tx: tx.record_all(events, datetime.now(UTC), to=[sink])

    async with open_store(StoreSettings(path=path), OWNER, SystemClock(), lambda _: ()) as store:
        await store.transact(lambda tx: tx.deliveries.set_sink_state(sink, "on"))
        for first in range(0, count, BATCH):
            await store.transact(work(first, min(first + BATCH, count)))


async def fill_journal(path: Path, count: int) -> None:
    """Make a state file whose journal has so many rows, about events that have ended.

    The chain of hashes is valid, and each event has its row among the occurrences. Deliveries are
    kept for less long than the journal, so there are none.
    """
    template = cloudevent(subject="SUBJECT").body
    at = datetime.now(UTC) - _AGE

    def row(number: int) -> NewRow:
        identifier = event_id(number >> 32, number // 2)
        kind = "event.scheduled" if number % 2 == 0 else "event.ended"
        body = template.replace(b"SUBJECT", identifier.encode())
        return kind, identifier.lower(), f"{number:032x}", body

    def work(first: int, last: int) -> Callable[[Transaction], object]:
        return lambda tx: tx.journal.append_all(at, [row(n) for n in range(first, last)])

    async with open_store(StoreSettings(path=path), OWNER, SystemClock(), lambda _: ()) as store:
        for first in range(0, count, BATCH):
            await store.transact(work(first, min(first + BATCH, count)))
    await asyncio.to_thread(_fill_occurrences, path, count // 2, at)


def _fill_occurrences(path: Path, count: int, at: datetime) -> None:
    data = orjson.dumps({"eventId": "SUBJECT", "resources": ["vm-0", "vm-1"], "x": "x" * 300})
    moment = at.isoformat()
    with closing(sqlite3.connect(path)) as connection:
        connection.executemany(
            "INSERT INTO occurrence (key, number, data, revision, live, boot_id, first_seen, "
            "last_changed, outcome, told) VALUES (?, 1, ?, '', 0, NULL, ?, ?, 'completed', '')",
            (
                (event_id(0, number).lower(), data.decode(), moment, moment)
                for number in range(count)
            ),
        )
        connection.commit()
