"""What waits for one sink, in memory: in order within a lane, the oldest first among lanes. No I/O."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from relay.outbox import Entry

AT_HAND = 500
"""So many waiting entries keep their event in memory; the rest read it from the journal when they are sent."""


class Lanes:
    """Entries by lane. A lane is *free*, *busy* (its head is being sent) or *resting* (its head waits for another try)."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[Entry]] = {}
        self._free: list[tuple[int, str]] = []  # heap: id of the head, lane
        self._resting: list[tuple[float, int, str]] = []  # heap: when (monotonic), id of the head, lane
        self._busy: set[str] = set()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def any_free(self) -> bool:
        """Whether some lane's head could be sent now."""
        return any(name in self._lanes and name not in self._busy and self._lanes[name][0].id == id_ for id_, name in self._free)

    def push(self, entry: Entry) -> None:
        """Put an entry behind the others of its lane."""
        if self._count >= AT_HAND:
            entry = replace(entry, event=None)
        self._count += 1
        lane = self._lanes.setdefault(entry.lane, deque())
        lane.append(entry)
        if len(lane) == 1:
            heapq.heappush(self._free, (entry.id, entry.lane))

    def replaceable(self, entry: Entry) -> list[Entry]:
        """Take out what waits in the entry's lane with the same family and is not being sent: it replaces them."""
        family = entry.type.split(".")[0]
        lane = self._lanes.get(entry.lane, deque())
        first = 1 if entry.lane in self._busy else 0
        stale = [old for old in list(lane)[first:] if old.type.split(".")[0] == family]
        for old in stale:
            lane.remove(old)
        self._count -= len(stale)
        if not lane:
            self._lanes.pop(entry.lane, None)
        elif not first and stale:
            heapq.heappush(self._free, (lane[0].id, entry.lane))
        return stale

    def take(self) -> Entry | None:
        """The oldest head of a free lane; the lane is busy until `done` or `rest`. None when no lane is free."""
        while self._free:
            id_, name = heapq.heappop(self._free)
            lane = self._lanes.get(name)
            if lane and lane[0].id == id_ and name not in self._busy:
                self._busy.add(name)
                return lane[0]
        return None

    def done(self, entry: Entry) -> None:
        """The head of a busy lane is settled: the next one is free."""
        self._busy.discard(entry.lane)
        lane = self._lanes[entry.lane]
        lane.popleft()
        self._count -= 1
        if lane:
            heapq.heappush(self._free, (lane[0].id, entry.lane))
        else:
            del self._lanes[entry.lane]

    def rest(self, entry: Entry, until: float) -> None:
        """The head of a busy lane failed: it is free again at that moment (monotonic seconds)."""
        self._busy.discard(entry.lane)
        self._lanes[entry.lane][0] = entry
        heapq.heappush(self._resting, (until, entry.id, entry.lane))

    def wake(self, now: float) -> None:
        """Free the lanes whose rest is over."""
        while self._resting and self._resting[0][0] <= now:
            _, id_, name = heapq.heappop(self._resting)
            heapq.heappush(self._free, (id_, name))

    def wake_all(self) -> None:
        """Free every resting lane: the far side answers again."""
        self.wake(float("inf"))

    def next_wake(self) -> float | None:
        """When the next lane's rest is over (monotonic seconds)."""
        return self._resting[0][0] if self._resting else None

    def heads(self) -> Iterator[Entry]:
        """The head of every lane."""
        return (lane[0] for lane in self._lanes.values())
