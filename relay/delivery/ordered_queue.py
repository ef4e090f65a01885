"""The waiting entries of one sink, in memory, and their events.

The worker takes the next entry from it. Entries with the same ordering key leave in order, one at a
time. Among the keys, the one with the most important entry comes first, and of equal ones the one
with the oldest first entry. An entry supersedes those of its key and family that were recorded
before it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, islice, zip_longest
from typing import Literal

from relay.errors import StoreUnavailable
from relay.events.cloudevent import PRIORITIES, CloudEvent
from relay.store import Entry
from relay.store.sqlite import Store

MAX_EVENTS_IN_MEMORY = 1000
"""Entries of each priority that keep their event in memory.

The events of later ones are read from the journal when they are sent.
"""

MAX_OUTDATED_ITEMS = 100
"""Items in the heap of ready keys, beyond two for each key, after which it is made anew."""


@dataclass(slots=True, kw_only=True)
class _KeyQueue:
    """The entries of one ordering key.

    State of the head: ``ready`` to be sent, ``in_flight``, or ``delayed`` until ``release_at``
    (monotonic seconds). ``is_individual``: it is delayed for a reason that concerns it alone.
    """

    entries: list[Entry]
    """A deque of the one entry that nearly every key has would take ten times as much memory."""
    priority: int
    """That of its most important entry: the less important before it make way for it."""
    state: Literal["ready", "in_flight", "delayed"] = "ready"
    release_at: float = 0.0
    is_individual: bool = False

    @property
    def heap_item(self) -> tuple[int, int, str]:
        head = self.entries[0]
        return (self.priority, head.id, head.ordering_key)

    def lower_priority(self) -> None:
        """Lower it to that of the most important entry that is left."""
        while all(entry.priority != self.priority for entry in self.entries):
            self.priority += 1


class OrderedQueue:
    """Entries by ordering key. Heaps can hold outdated items: the `_KeyQueue` decides."""

    def __init__(self) -> None:
        self._queues: dict[str, _KeyQueue] = {}
        # Heap of (priority of the key, id of its head, ordering key):
        self._ready: list[tuple[int, int, str]] = []
        self._in_flight: dict[str, _KeyQueue] = {}  # those whose head is in flight
        self._delayed: list[tuple[float, str]] = []  # heap of (release_at, ordering key)
        self._count = 0
        self._in_memory = [0] * PRIORITIES  # entries with their event, by priority

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry]:
        """All entries, those in flight included."""
        return (entry for key_queue in self._queues.values() for entry in key_queue.entries)

    @property
    def has_ready(self) -> bool:
        return any(key_queue.state == "ready" for key_queue in self._queues.values())

    def earliest_not_before_after(self, now: datetime) -> datetime | None:
        """Return the first NotBefore after ``now`` of all entries, those in flight included."""
        ahead = (entry.not_before for entry in self if entry.not_before and entry.not_before > now)
        return min(ahead, default=None)

    def push(self, entry: Entry) -> None:
        """Add an entry behind the others of its ordering key."""
        if entry.event is not None and self._in_memory[entry.priority] >= MAX_EVENTS_IN_MEMORY:
            entry = replace(entry, event=None)
        self._count_entry(entry, 1)
        key_queue = self._queues.get(entry.ordering_key)
        if key_queue is None:
            key_queue = _KeyQueue(entries=[entry], priority=entry.priority)
            self._queues[entry.ordering_key] = key_queue
            self._push_ready(key_queue)
            return
        key_queue.entries.append(entry)
        if entry.priority < key_queue.priority:
            key_queue.priority = entry.priority
            if key_queue.state == "ready":
                self._push_ready(key_queue)

    def remove_superseded(self, entry: Entry) -> list[Entry]:
        """Remove and return the entries that this new one supersedes. Entries in flight stay.

        A redelivered entry can be older than others that wait. It supersedes none of those.
        """
        key_queue = self._queues.get(entry.ordering_key)
        if key_queue is None:
            return []
        head = key_queue.entries[0]
        removed = [
            old
            for old in key_queue.entries
            if _supersedes(entry, old) and not (old is head and key_queue.state == "in_flight")
        ]
        removed_ids = {old.id for old in removed}
        key_queue.entries = [old for old in key_queue.entries if old.id not in removed_ids]
        for old in removed:
            self._count_entry(old, -1)
        if not key_queue.entries:
            del self._queues[entry.ordering_key]
            return removed
        key_queue.lower_priority()
        if key_queue.state == "ready" or key_queue.entries[0] is not head:
            self._make_ready(key_queue)
        return removed

    def is_superseded(self, head: Entry) -> bool:
        """Whether an entry behind the head of its ordering key supersedes it."""
        entries = iter(self._queues[head.ordering_key].entries)
        next(entries)
        return any(_supersedes(newer, head) for newer in entries)

    def mark_next_entry_in_flight(
        self, least_tried: Literal["of all", "of the most important"] | None = None
    ) -> Entry | None:
        """Return the ready entry that is next, now in flight; None if there is none.

        ``least_tried``: take the entry with the fewest attempts. For each entry that was taken,
        call `remove_head` or `delay_head`.
        """
        if least_tried is None:
            key_queue = self._pop_ready_queue()
        else:
            key_queue = self._find_least_tried(of_all=least_tried == "of all")
        if key_queue is None:
            return None
        head = key_queue.entries[0]
        key_queue.state = "in_flight"
        self._in_flight[head.ordering_key] = key_queue
        return head

    def upcoming_entries_without_event(self, limit: int) -> list[Entry]:
        """Return entries that are probably next and not in memory: in flight, and first ready."""
        ready: dict[str, _KeyQueue] = {}
        while len(ready) < limit and (key_queue := self._pop_ready_queue()) is not None:
            ready[key_queue.entries[0].ordering_key] = key_queue
        for key_queue in ready.values():
            self._push_ready(key_queue)
        entries_by_key = [
            *(islice(key_queue.entries, 1, None) for key_queue in self._in_flight.values()),
            *(iter(key_queue.entries) for key_queue in ready.values()),
        ]
        entries = chain.from_iterable(zip_longest(*entries_by_key))
        return list(islice((entry for entry in entries if entry and not entry.event), limit))

    def _pop_ready_queue(self) -> _KeyQueue | None:
        """Take the next ready key from the heap. Whoever leaves it ready must push it again."""
        while self._ready:
            priority, entry_id, key = heapq.heappop(self._ready)
            key_queue = self._queues.get(key)
            if key_queue is None or key_queue.state != "ready":
                continue
            if key_queue.entries[0].id == entry_id and key_queue.priority == priority:
                return key_queue
        return None

    def _find_least_tried(self, *, of_all: bool) -> _KeyQueue | None:
        def rank(key_queue: _KeyQueue) -> tuple[int, int, int]:
            head, priority = key_queue.entries[0], key_queue.priority
            if of_all:
                return head.attempts, priority, head.id
            return priority, head.attempts, head.id

        ready = (key_queue for key_queue in self._queues.values() if key_queue.state == "ready")
        return min(ready, key=rank, default=None)

    def remove_head(self, entry: Entry) -> None:
        """Remove an entry that was in flight; the next one of its ordering key becomes ready."""
        key_queue = self._in_flight.pop(entry.ordering_key)
        head = key_queue.entries.pop(0)
        self._count_entry(head, -1)
        if key_queue.entries:
            if head.priority == key_queue.priority:  # else the most important one is still there
                key_queue.lower_priority()
            self._make_ready(key_queue)
        else:
            del self._queues[entry.ordering_key]

    def delay_head(self, entry: Entry, until: float, *, is_individual: bool = False) -> None:
        """Replace the head; ready at ``until`` (monotonic). ``is_individual``: its own reason."""
        key_queue = self._in_flight.pop(entry.ordering_key)
        key_queue.entries[0] = entry
        key_queue.state, key_queue.release_at = "delayed", until
        key_queue.is_individual = is_individual
        heapq.heappush(self._delayed, (until, entry.ordering_key))

    def release_due(self, now: float) -> None:
        while self._delayed and self._delayed[0][0] <= now:
            release_at, key = heapq.heappop(self._delayed)
            key_queue = self._queues.get(key)
            if key_queue is None or key_queue.state != "delayed":
                continue
            if key_queue.release_at == release_at:
                self._make_ready(key_queue)

    def release_all_delayed(self, *, include_individual: bool) -> None:
        """Make all delayed entries ready, or those that are not delayed individually."""
        for key_queue in self._queues.values():
            if key_queue.state == "delayed" and (include_individual or not key_queue.is_individual):
                self._make_ready(key_queue)

    def next_release_at(self) -> float | None:
        """When to call `release_due` next (monotonic seconds)."""
        return self._delayed[0][0] if self._delayed else None

    def _make_ready(self, key_queue: _KeyQueue) -> None:
        key_queue.state = "ready"
        self._push_ready(key_queue)

    def _push_ready(self, key_queue: _KeyQueue) -> None:
        if len(self._ready) >= 2 * len(self._queues) + MAX_OUTDATED_ITEMS:
            # A sink that is paused takes nothing, so nothing else removes outdated items.
            queues = self._queues.values()
            self._ready = [queue.heap_item for queue in queues if queue.state == "ready"]
            heapq.heapify(self._ready)
        else:
            heapq.heappush(self._ready, key_queue.heap_item)

    def _count_entry(self, entry: Entry, change: Literal[1, -1]) -> None:
        self._count += change
        if entry.event is not None:
            self._in_memory[entry.priority] += change


def _supersedes(newer: Entry, entry: Entry) -> bool:
    # What follows an end is another stay of the EventId, which has a chat message of its own.
    is_newer = newer.position >= entry.position and newer.type_family == entry.type_family
    return is_newer and entry.type != "event.ended"


MAX_READ = 256
"""Events that are read at once."""


class EventReadAhead:
    """Reads the events of one sink's entries, as far as they are not in memory.

    It keeps their bytes, which take a quarter of the memory of parsed events. A sink that is down
    keeps them until it is up again.
    """

    def __init__(self, store: Store, queue: OrderedQueue) -> None:
        self._store = store
        self._queue = queue
        self._bodies: dict[int, bytes] = {}  # by position
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
        return CloudEvent.parse(self._bodies.pop(entry.position))  # KeyError: it was pruned

    async def _read_bodies(self, entry: Entry) -> dict[int, bytes]:
        upcoming = self._queue.upcoming_entries_without_event(MAX_READ - len(self._wanted))
        positions = {entry.position for entry in (*self._wanted.values(), *upcoming)}
        try:
            return await self._store.read(lambda tx: tx.journal.bodies_at_positions(positions))
        except StoreUnavailable:  # perhaps only the row of another entry cannot be read
            alone = [entry.position]
            return await self._store.read(lambda tx: tx.journal.bodies_at_positions(alone))
