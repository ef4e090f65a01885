"""What waits for one sink, in memory: in order within a lane, the oldest first among lanes. No I/O."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from relay.outbox import Entry

MAX_EVENTS_IN_MEMORY = 500
"""So many waiting entries keep their event in memory; the rest read it from the journal when they are sent."""


@dataclass(slots=True)
class _Lane:
    """``busy``: the head is being sent. ``resting``: it waits for another try, until then (monotonic seconds)."""

    waiting: deque[Entry] = field(default_factory=deque)
    state: Literal["free", "busy", "resting"] = "free"
    until: float = 0.0
    alone: bool = False


class OrderedQueue:
    """Entries by lane. The state of a lane is the truth; the heaps may hold lines that are out of date."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._free: list[tuple[int, str]] = []  # heap: id of the head, lane
        self._resting: list[tuple[float, str]] = []  # heap: until when, lane
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry]:
        """Everything that waits or is being sent."""
        return (entry for lane in self._lanes.values() for entry in lane.waiting)

    @property
    def has_ready(self) -> bool:
        """Whether some lane's head could be sent now."""
        return any(lane.state == "free" for lane in self._lanes.values())

    def push(self, entry: Entry) -> None:
        """Put an entry behind the others of its lane."""
        if self._count >= MAX_EVENTS_IN_MEMORY:
            entry = replace(entry, event=None)
        self._count += 1
        lane = self._lanes.setdefault(entry.ordering_key, _Lane())
        lane.waiting.append(entry)
        if len(lane.waiting) == 1:
            self._set_free(entry.ordering_key, lane)

    def remove_superseded(self, entry: Entry) -> list[Entry]:
        """Take out what waits in the entry's lane with the same family, is no newer and is not being sent: it replaces them.

        What is sent once more can be older than what waits already, and replaces nothing newer.
        """
        lane = self._lanes.get(entry.ordering_key)
        if lane is None:
            return []
        head = lane.waiting[0]
        stale = [
            old
            for old in lane.waiting
            if _takes_the_place_of(entry, old) and not (old is head and lane.state == "busy")
        ]
        gone = {old.id for old in stale}
        lane.waiting = deque(old for old in lane.waiting if old.id not in gone)
        self._count -= len(stale)
        if not lane.waiting:
            del self._lanes[entry.ordering_key]
        elif lane.waiting[0] is not head:
            self._set_free(entry.ordering_key, lane)
        return stale

    def is_superseded(self, entry: Entry) -> bool:
        """Whether a newer one of the same family waits behind the head of a lane."""
        waiting = iter(self._lanes[entry.ordering_key].waiting)
        next(waiting)
        return any(_takes_the_place_of(newer, entry) for newer in waiting)

    def take_next(self, *, least_tried: bool = False) -> Entry | None:
        """The oldest head of a free lane; the lane is busy until `done` or `rest`. None when no lane is free.

        ``least_tried``: of the heads that were tried least.
        """
        if least_tried:
            self._free = [
                (lane.waiting[0].id, name)
                for name, lane in self._lanes.items()
                if lane.state == "free"
            ]
            heapq.heapify(self._free)
            heads = (self._lanes[name].waiting[0] for _, name in self._free)
            head = min(heads, key=lambda one: (one.attempts, one.id), default=None)
            if head is not None:
                self._lanes[head.ordering_key].state = "busy"
            return head
        while self._free:
            id_, name = heapq.heappop(self._free)
            lane = self._lanes.get(name)
            if lane is not None and lane.state == "free" and lane.waiting[0].id == id_:
                lane.state = "busy"
                return lane.waiting[0]
        return None

    def remove_head(self, entry: Entry) -> None:
        """The head of a busy lane is settled: the next one is free."""
        lane = self._lanes[entry.ordering_key]
        lane.waiting.popleft()
        self._count -= 1
        if lane.waiting:
            self._set_free(entry.ordering_key, lane)
        else:
            del self._lanes[entry.ordering_key]

    def delay_head(self, entry: Entry, until: float, *, alone: bool = False) -> None:
        """The head of a busy lane failed: it is free again at that moment (monotonic seconds).

        ``alone``: it failed for a reason of its own, and rests however the others fare.
        """
        lane = self._lanes[entry.ordering_key]
        lane.waiting[0] = entry
        lane.state, lane.until, lane.alone = "resting", until, alone
        heapq.heappush(self._resting, (until, entry.ordering_key))

    def release_due(self, now: float) -> None:
        """Free the lanes whose rest is over."""
        while self._resting and self._resting[0][0] <= now:
            until, name = heapq.heappop(self._resting)
            lane = self._lanes.get(name)
            if lane is not None and lane.state == "resting" and lane.until == until:
                self._set_free(name, lane)

    def release_all(self, *, alone: bool) -> None:
        """Free every resting lane; ``alone``: also those that rest for a reason of their own."""
        for name, lane in self._lanes.items():
            if lane.state == "resting" and (alone or not lane.alone):
                self._set_free(name, lane)

    def next_release_at(self) -> float | None:
        """When to call `wake` next (monotonic seconds)."""
        return self._resting[0][0] if self._resting else None

    def _set_free(self, name: str, lane: _Lane) -> None:
        lane.state = "free"
        heapq.heappush(self._free, (lane.waiting[0].id, name))


def _takes_the_place_of(newer: Entry, entry: Entry) -> bool:
    return newer.position >= entry.position and newer.type.split(".")[0] == entry.type.split(".")[0]
