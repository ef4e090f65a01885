"""Ordered queues against a simple model: a list for each ordering key, scanned from the start."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relay.delivery.ordered_queue import MAX_EVENTS_IN_MEMORY, OrderedQueue
from relay.events.cloudevent import delivery_priority
from relay.store import Entry
from tests.depth import depth
from tests.store.open_store import NOW, numbered_event

LANES = st.sampled_from(["a", "b", "c"])
PRIORITIES = {
    "event.scheduled": 0,
    "event.updated": 0,
    "approval.granted": 1,
    "relay.ping": 2,
    "approval.refused": 3,
}
TYPES = st.sampled_from(list(PRIORITIES))

OLDER = st.sampled_from([0, 0, 1, 4])
NOT_BEFORES = st.none() | st.integers(-3, 3).map(lambda minutes: NOW + timedelta(minutes=minutes))
NEW = st.fixed_dictionaries(
    {"lane": LANES, "type_": TYPES, "older": OLDER, "not_before": NOT_BEFORES}
)
"""What differs between new entries."""


def entry(
    id_: int,
    lane: str = "a",
    type_: str = "event.scheduled",
    attempts: int = 0,
    older: int = 0,
    *,
    in_memory: bool = True,
    not_before: datetime | None = None,
) -> Entry:
    """An entry that waits. ``older``: it is sent once more, and was said so many before.

    ``in_memory``: its event need not be read from the journal.
    """
    return Entry(
        id=id_,
        sink="bus",
        position=id_ - older,
        ordering_key=lane,
        type=type_,
        event_key=lane,
        not_before=not_before,
        attempts=attempts,
        next_at=None,
        recorded=NOW,
        event=numbered_event(id_) if in_memory else None,
    )


@dataclass(slots=True)
class Modelled:
    """A lane: what waits, and whether its head is free, busy or resting, until then."""

    waiting: list[Entry] = field(default_factory=list)
    state: str = "free"
    until: float = 0.0
    alone: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Which lane is first: that with the most important entry, then that with the oldest."""
        return (min(PRIORITIES[entry.type] for entry in self.waiting), self.waiting[0].id)


class LanesLaw(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.lanes = OrderedQueue()
        self.model: dict[str, Modelled] = {}
        self.next_id = 1
        self.now = 0.0

    def fresh(self, **given: Any) -> Entry:
        self.next_id += 1
        return entry(self.next_id, **given)

    def of(self, state: str) -> dict[str, Modelled]:
        """The lanes in which something waits, in that state."""
        return {
            name: lane for name, lane in self.model.items() if lane.waiting and lane.state == state
        }

    @rule(given=NEW, attempts=st.integers(0, 3), in_memory=st.booleans())
    def push(self, given: dict[str, Any], attempts: int, in_memory: bool) -> None:
        new = self.fresh(**given, attempts=attempts, in_memory=in_memory)
        self.lanes.push(new)
        self.model.setdefault(new.ordering_key, Modelled()).waiting.append(new)

    @rule(given=NEW)
    def push_in_the_place_of_older_ones(self, given: dict[str, Any]) -> None:
        """A new entry replaces the waiting entries, but no entry in flight and no newer entry."""
        new = self.fresh(**given)
        modelled = self.model.setdefault(new.ordering_key, Modelled())
        head = modelled.waiting[0] if modelled.waiting else None
        family = new.type.split(".", maxsplit=1)[0]
        replaced = [
            old
            for old in modelled.waiting
            if old.type.startswith(family)
            and old.position <= new.position
            and old.type != "event.ended"
        ]
        stale = [old for old in replaced if not (old is head and modelled.state == "busy")]
        assert self.lanes.remove_superseded(new) == stale
        modelled.waiting = [old for old in modelled.waiting if old not in stale]
        if head in stale:
            modelled.state = "free"
        self.lanes.push(new)
        modelled.waiting.append(new)

    @rule()
    def take_the_most_important(self) -> None:
        first = min(self.of("free").values(), key=lambda lane: lane.rank, default=None)
        assert self.lanes.mark_next_entry_in_flight() == (first.waiting[0] if first else None)
        if first is not None:
            first.state = "busy"

    @rule(of_all=st.booleans())
    def take_the_least_tried(self, *, of_all: bool) -> None:
        first = min(
            self.of("free").values(),
            key=lambda lane: (0 if of_all else lane.rank[0], lane.waiting[0].attempts, lane.rank),
            default=None,
        )
        probe = self.lanes.mark_next_entry_in_flight(
            "of all" if of_all else "of the most important"
        )
        assert probe == (first.waiting[0] if first else None)
        if first is not None:
            first.state = "busy"

    @rule(limit=st.integers(0, 10))
    def look_ahead(self, limit: int) -> None:
        """The events of the next entries are read, as far as they are not in memory."""
        lanes = [lane.waiting[1:] for lane in self.of("busy").values()]
        lanes += [lane.waiting for lane in self.of("free").values()]
        expected = {entry.id for lane in lanes for entry in lane if entry.event is None}
        upcoming = [entry.id for entry in self.lanes.upcoming_entries_without_event(limit)]
        assert len(upcoming) == len(set(upcoming))
        if limit >= len(lanes):
            assert len(upcoming) == min(limit, len(expected))
        assert expected.issuperset(upcoming)

    @precondition(lambda self: self.of("busy"))
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        lane = self.of("busy")[data.draw(st.sampled_from(sorted(self.of("busy"))))]
        self.lanes.remove_head(lane.waiting[0])
        lane.waiting.pop(0)
        lane.state = "free"

    @precondition(lambda self: self.of("busy"))
    @rule(data=st.data(), pause=st.sampled_from([0.0, 1.0, 2.0, 5.0]), alone=st.booleans())
    def rest(self, data: st.DataObject, pause: float, alone: bool) -> None:
        """It failed, and will be tried again."""
        lane = self.of("busy")[data.draw(st.sampled_from(sorted(self.of("busy"))))]
        head = lane.waiting[0]
        newer = [
            waiting_entry
            for waiting_entry in lane.waiting[1:]
            if waiting_entry.type.split(".")[0] == head.type.split(".")[0]
            and waiting_entry.position >= head.position
            and head.type != "event.ended"
        ]
        assert self.lanes.is_superseded(head) == bool(newer)
        tried = replace(lane.waiting[0], attempts=lane.waiting[0].attempts + 1)
        self.lanes.delay_head(tried, self.now + pause, is_individual=alone)
        lane.waiting[0] = tried
        lane.state, lane.until, lane.alone = "resting", self.now + pause, alone

    @rule(passed=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def wake(self, passed: float) -> None:
        self.now += passed
        self.lanes.release_due(self.now)
        for lane in self.of("resting").values():
            if lane.until <= self.now:
                lane.state = "free"

    @rule(alone=st.booleans())
    def wake_all(self, alone: bool) -> None:
        """The receiver answers again, or may."""
        self.lanes.release_all_delayed(include_individual=alone)
        for lane in self.of("resting").values():
            if alone or not lane.alone:
                lane.state = "free"

    @invariant()
    def what_waits_is_the_same(self) -> None:
        """Nothing is lost, doubled or reordered."""
        assert len(self.lanes) == sum(len(lane.waiting) for lane in self.model.values())
        for name, lane in self.model.items():
            of_lane = [entry for entry in self.lanes if entry.ordering_key == name]
            assert of_lane == lane.waiting
        assert self.lanes.has_ready == bool(self.of("free"))

    @invariant()
    def the_next_not_before_is_that_of_an_entry(self) -> None:
        """At any time, also at one before an earlier one: the clock can be set back."""
        not_befores = [entry.not_before for entry in self.lanes if entry.not_before is not None]
        for minutes in (1, -4, 3, 0):
            now = NOW + timedelta(minutes=minutes)
            ahead = [not_before for not_before in not_befores if not_before > now]
            assert self.lanes.earliest_not_before_after(now) == min(ahead, default=None)

    @invariant()
    def nobody_oversleeps(self) -> None:
        """`next_release_at` is early at times, for a lane that was freed otherwise; never late."""
        resting = [lane.until for lane in self.of("resting").values()]
        moment = self.lanes.next_release_at()
        assert not resting or (moment is not None and moment <= min(resting))


TestLanes = LanesLaw.TestCase
TestLanes.settings = settings(max_examples=depth(150, 25), stateful_step_count=60)


def test_only_so_many_events_are_kept_at_hand() -> None:
    """Ten thousand that wait cost their entries, not their bodies."""
    lanes = OrderedQueue()
    for id_ in range(10_000):
        lanes.push(entry(id_, f"lane-{id_}"))
    at_hand = [waiting_entry.id for waiting_entry in lanes if waiting_entry.event is not None]
    assert at_hand == list(range(MAX_EVENTS_IN_MEMORY))


def test_an_event_stays_at_hand_however_many_refusals_wait() -> None:
    """It can still be sent while the state file can be neither written nor read."""
    lanes = OrderedQueue()
    for id_ in range(2 * MAX_EVENTS_IN_MEMORY):
        lanes.push(entry(id_, f"lane-{id_}", "approval.refused"))
    lanes.push(entry(id_ + 1, "lane"))
    first = lanes.mark_next_entry_in_flight()
    assert first is not None
    assert (first.type, first.event is not None) == ("event.scheduled", True)
    for _ in range(2):  # what leaves makes room, and what was not counted does not
        refusals = [lanes.mark_next_entry_in_flight() for _ in range(MAX_EVENTS_IN_MEMORY)]
        for refusal in refusals:
            assert refusal is not None
            lanes.remove_head(refusal)
    for id_ in range(2 * MAX_EVENTS_IN_MEMORY):
        lanes.push(entry(id_, f"lane-{id_}", "approval.refused"))
    kept = [refusal for refusal in lanes if refusal.type == "approval.refused" and refusal.event]
    assert len(kept) == MAX_EVENTS_IN_MEMORY


def test_an_event_behind_many_refusals_of_its_lane_makes_none_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[str] = []

    def look_at(type_: str) -> int:
        looked_at.append(type_)
        return delivery_priority(type_)

    monkeypatch.setattr("relay.store.delivery_priority", look_at)
    lanes = OrderedQueue()
    for id_ in range(1000):
        lanes.push(entry(id_, "lane", "approval.refused"))
    lanes.push(entry(1000, "lane"))
    looked_at.clear()
    for id_ in range(1000):
        refusal = lanes.mark_next_entry_in_flight()
        assert refusal is not None
        assert refusal.id == id_
        lanes.remove_head(refusal)
    assert len(looked_at) < 10_000
