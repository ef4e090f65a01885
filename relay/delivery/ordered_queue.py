"""The waiting entries of one sink, in memory. No I/O.

Entries with the same ordering key leave in order. Among the keys, the oldest entry leaves first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from relay.outbox import Entry

MAX_EVENTS_IN_MEMORY = 500
"""Entries that keep their event in memory. Later ones read it from the journal when it is sent."""


@dataclass(slots=True, kw_only=True)
class _KeyQueue:
    """The entries of one ordering key.

    State of the head: ``ready`` to be sent, ``in_flight``, or ``delayed`` until ``release_at``
    (monotonic seconds). ``is_individual``: it is delayed for a reason that concerns it alone.
    """

    entries: deque[Entry] = field(default_factory=deque)
    state: Literal["ready", "in_flight", "delayed"] = "ready"
    release_at: float = 0.0
    is_individual: bool = False


class OrderedQueue:
    """Entries by ordering key.

    The heaps can hold outdated items. The state of the `_KeyQueue` decides.
    """

    def __init__(self) -> None:
        self._queues: dict[str, _KeyQueue] = {}
        self._ready: list[tuple[int, str]] = []  # heap of (id of the head, ordering key)
        self._delayed: list[tuple[float, str]] = []  # heap of (release_at, ordering key)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry]:
        """All entries, those in flight included."""
        return (entry for key_queue in self._queues.values() for entry in key_queue.entries)

    @property
    def has_ready(self) -> bool:
        """Whether an entry could be sent now."""
        return any(key_queue.state == "ready" for key_queue in self._queues.values())

    def push(self, entry: Entry) -> None:
        """Add an entry behind the others of its ordering key."""
        if self._count >= MAX_EVENTS_IN_MEMORY:
            entry = replace(entry, event=None)
        self._count += 1
        key_queue = self._queues.setdefault(entry.ordering_key, _KeyQueue())
        key_queue.entries.append(entry)
        if len(key_queue.entries) == 1:
            self._make_ready(entry.ordering_key, key_queue)

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
        key_queue.entries = deque(old for old in key_queue.entries if old.id not in removed_ids)
        self._count -= len(removed)
        if not key_queue.entries:
            del self._queues[entry.ordering_key]
        elif key_queue.entries[0] is not head:
            self._make_ready(entry.ordering_key, key_queue)
        return removed

    def is_superseded(self, head: Entry) -> bool:
        """Whether an entry behind the head of its ordering key supersedes it."""
        entries = iter(self._queues[head.ordering_key].entries)
        next(entries)
        return any(_supersedes(newer, head) for newer in entries)

    def take_next(
        self, *, least_tried: bool = False, among: Container[int] | None = None
    ) -> Entry | None:
        """Return the oldest ready entry, now in flight; None if there is none.

        ``least_tried``: prefer the entries with the fewest attempts. ``among``: take only an entry
        with one of these ids. For each entry that was taken, call `remove_head` or `delay_head`.
        """
        if least_tried or among is not None:
            return self._take_from_all(least_tried=least_tried, among=among)
        return self._take_oldest()

    def _take_oldest(self) -> Entry | None:
        while self._ready:
            entry_id, key = heapq.heappop(self._ready)
            key_queue = self._queues.get(key)
            if key_queue is None or key_queue.state != "ready":
                continue
            if key_queue.entries[0].id == entry_id:
                key_queue.state = "in_flight"
                return key_queue.entries[0]
        return None

    def _take_from_all(self, *, least_tried: bool, among: Container[int] | None) -> Entry | None:
        heads = [
            key_queue.entries[0]
            for key_queue in self._queues.values()
            if key_queue.state == "ready"
        ]
        self._ready = [(head.id, head.ordering_key) for head in heads]
        heapq.heapify(self._ready)
        head = min(
            (head for head in heads if among is None or head.id in among),
            key=lambda head: (head.attempts if least_tried else 0, head.id),
            default=None,
        )
        if head is not None:
            self._queues[head.ordering_key].state = "in_flight"
        return head

    def remove_head(self, entry: Entry) -> None:
        """Remove an entry that was in flight; the next one of its ordering key becomes ready."""
        key_queue = self._queues[entry.ordering_key]
        key_queue.entries.popleft()
        self._count -= 1
        if key_queue.entries:
            self._make_ready(entry.ordering_key, key_queue)
        else:
            del self._queues[entry.ordering_key]

    def delay_head(self, entry: Entry, until: float, *, is_individual: bool = False) -> None:
        """Replace the head by this version of it, which is ready again at ``until``.

        ``until`` is in monotonic seconds. ``is_individual``: the reason concerns this entry alone.
        """
        key_queue = self._queues[entry.ordering_key]
        key_queue.entries[0] = entry
        key_queue.state, key_queue.release_at = "delayed", until
        key_queue.is_individual = is_individual
        heapq.heappush(self._delayed, (until, entry.ordering_key))

    def release_due(self, now: float) -> None:
        """Make the entries ready whose delay is over."""
        while self._delayed and self._delayed[0][0] <= now:
            release_at, key = heapq.heappop(self._delayed)
            key_queue = self._queues.get(key)
            if key_queue is None or key_queue.state != "delayed":
                continue
            if key_queue.release_at == release_at:
                self._make_ready(key, key_queue)

    def release_all(self, *, include_individual: bool) -> None:
        """Make all delayed entries ready, or those that are not delayed individually."""
        for key, key_queue in self._queues.items():
            if key_queue.state == "delayed" and (include_individual or not key_queue.is_individual):
                self._make_ready(key, key_queue)

    def next_release_at(self) -> float | None:
        """When to call `release_due` next (monotonic seconds)."""
        return self._delayed[0][0] if self._delayed else None

    def _make_ready(self, key: str, key_queue: _KeyQueue) -> None:
        key_queue.state = "ready"
        heapq.heappush(self._ready, (key_queue.entries[0].id, key))


def _supersedes(newer: Entry, entry: Entry) -> bool:
    return newer.position >= entry.position and newer.family == entry.family
