"""Reads the events of entries from the journal, those of the next entries with them.

While the disk is slow, a read waits for the commit before it. If each entry were read by itself, a
sink would get no more than its ``concurrency`` of events for each commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from relay.delivery.ordered_queue import OrderedQueue
from relay.errors import StoreUnavailable
from relay.events.cloudevent import CloudEvent
from relay.store import Entry
from relay.store.sqlite import Store
from relay.store.transaction import Transaction

MAX_READ = 256
"""Events that are read at once."""

_Bodies = dict[int, bytes | None]
"""The bytes of the events by position; None if the row was pruned."""


class EventReadAhead:
    """Reads the events of one sink's entries, as far as they are not in memory.

    It keeps their bytes, which take a quarter of the memory of parsed events. A sink that is down
    keeps them until it is up again.
    """

    def __init__(self, store: Store, queue: OrderedQueue) -> None:
        self._store = store
        self._queue = queue
        self._bodies: _Bodies = {}
        self._wanted: dict[int, Entry] = {}  # by id
        self._lock = asyncio.Lock()

    async def event(self, entry: Entry) -> CloudEvent:
        """Return the event of an entry in flight. Raises StoreUnavailable, or what is wrong."""
        if entry.position not in self._bodies:
            self._wanted[entry.id] = entry
            try:
                async with self._lock:
                    if entry.position not in self._bodies:
                        self._bodies = await self._read_bodies(entry)
            finally:
                del self._wanted[entry.id]
        body = self._bodies.pop(entry.position)
        if body is None:
            raise KeyError(entry.position)
        return CloudEvent.parse(body)

    async def _read_bodies(self, entry: Entry) -> _Bodies:
        upcoming = self._queue.upcoming_entries_without_event(MAX_READ - len(self._wanted))
        positions = {entry.position for entry in (*self._wanted.values(), *upcoming)}
        try:
            return await self._store.read(lambda tx: _read_event_bodies(tx, positions))
        except StoreUnavailable:  # perhaps only the row of another entry cannot be read
            return await self._store.read(lambda tx: _read_event_bodies(tx, [entry.position]))


def _read_event_bodies(tx: Transaction, positions: Collection[int]) -> _Bodies:
    bodies = tx.journal.bodies_at_positions(positions)
    return {position: bodies.get(position) for position in positions}
