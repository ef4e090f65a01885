"""Opens stores on real files, makes numbered events and reads what a file holds."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relay.clock import SystemClock
from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import format_sortable
from relay.store import StateFileScopeAndVm, StoreSettings, TrackedEvent
from relay.store.audit import verify_journal
from relay.store.file import StateFile, open_for_reading, open_state_file
from relay.store.journal import Journal, JournalRow, read_all_rows
from relay.store.sqlite import Store, Work, open_store
from relay.store.transaction import Route, Transaction
from tests.builders import DATA, cloudevent

BUS: Route = lambda _: ("bus",)  # noqa: E731  # a route is a function
"""Everything goes to one sink."""
IDENTITY = StateFileScopeAndVm("prod-vmss-a-1f0c33ab", "5d7b8a9e-0000-4000-8000-00000000c0de")
NOW = datetime(2026, 4, 11, 22, 26, 58, tzinfo=UTC)


def numbered_event(
    number: int = 0, name: str = "event.scheduled", subject: str | None = None, **data: Any
) -> CloudEvent:
    subject = subject if subject is not None else f"E-{number}"
    return cloudevent(
        name, subject, {**DATA, "eventId": subject, "notBefore": None, **data}, id=f"{number:032x}"
    )


def record_event(number: int, at: datetime = NOW, **given: Any) -> Work[int]:
    """Return work that records an event and returns its position in the journal."""

    def work(tx: Transaction) -> int:
        tx.record(numbered_event(number, **given), at)
        return tx.recorded[-1].position

    return work


@asynccontextmanager
async def open_store_in(
    folder: Path, route: Route = BUS, identity: StateFileScopeAndVm = IDENTITY
) -> AsyncIterator[Store]:
    async with open_store(
        StoreSettings(path=folder / "relay.db"), identity, SystemClock(), route
    ) as opened:
        yield opened


@contextlib.contextmanager
def blocked(store: Store) -> Iterator[None]:
    """Let the thread of the store wait, so that all that is submitted runs together afterwards."""
    release = threading.Event()
    store.submit(lambda _: release.wait(10))
    yield
    release.set()


@contextlib.contextmanager
def open_file_in(
    path: Path, identity: StateFileScopeAndVm = IDENTITY, now: datetime = NOW
) -> Iterator[StateFile]:
    file = open_state_file(path, identity, now)
    try:
        yield file
    finally:
        file.close()


def append_row(
    journal: Journal,
    at: datetime = NOW,
    kind: str = "event.scheduled",
    body: bytes = b"{}",
    *,
    event_key: str | None = None,
    transition: str | None = None,
) -> int:
    return journal.append_all(at, [(kind, event_key, transition, body)])[0]


def add_occurrence(tx: Transaction, key: str, at: datetime = NOW) -> None:
    time, newest = format_sortable(at), tx.occurrences.newest_occurrence_numbers([key])
    occurrence = TrackedEvent(
        id=tx.occurrences.next_id(),
        scope=IDENTITY.scope,
        key=key,
        number=newest.get(key, 0) + 1,
        position=tx.head().position + 1,
        data={**DATA, "eventId": key.upper()},
        revision=DATA["revision"],
        live=True,
        boot_id=None,
        first_seen=time,
        last_changed=time,
        outcome=None,
        last_event_id=numbered_event().id,
    )
    tx.occurrences.save([occurrence])


def end_occurrence(tx: Transaction, key: str, at: datetime = NOW) -> None:
    (live,) = tx.occurrences.live_occurrences([key])
    time = format_sortable(at)
    ended = replace(live, live=False, outcome="completed", last_changed=time)
    tx.occurrences.save([ended])


def file_names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def read_column(path: Path, query: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return [row[0] for row in connection.execute(query)]


def read_journal(path: Path) -> list[JournalRow]:
    """The journal, read by a connection of its own; its hash chain is checked too."""
    with contextlib.closing(open_for_reading(path)) as reader:
        verify_journal(reader)
        return list(read_all_rows(reader))
