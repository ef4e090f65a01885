"""The merger of a hub, with a real store: what it remembers and what the state file has agree."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, cast

import pytest
from typing_extensions import override  # in typing from Python 3.12

from relay.clock import SystemClock
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.events.model import ScheduledEvent
from relay.fleet.hub import merge, merger
from relay.fleet.hub.link import HubLink
from relay.fleet.hub.merge import EventHistory, GoneFromDocument, Word
from relay.fleet.hub.merger import KEYS, EventMerger, Heard
from relay.fleet.hub.roster import Agent, Roster
from relay.ingest import Recorder
from relay.store import StateFileScopeAndVm
from relay.store.rows import PageLimit
from relay.store.sqlite import Store
from relay.store.transaction import Transaction
from tests.background_tasks import BackgroundTasks
from tests.events.strategies import make_event
from tests.eventually import eventually
from tests.store.open_store import open_store_in

SCOPE = "vmss-a-1f0c33ab"
HUB = StateFileScopeAndVm("hub", None, is_hub=True)
EVENT = make_event(event_id="E-1")
"""An event in its first state."""
MOVED = make_event(event_id="E-1", description="it was moved")
"""The same event in another state."""


@dataclass(slots=True)
class Rig:
    """A merger on a store. ``told`` are the names of the events in the journal, oldest first."""

    store: Store
    merger: EventMerger
    link: _LinkOfTests
    began: datetime
    hears: list[bool]
    """Whether agents can be heard, each time that somebody wants to know; then always yes."""
    unheard: set[str]
    """Agents that may yet connect."""

    def word(self, relay: str, word: Word, seconds: float, *, event_id: str = "e-1") -> Heard:
        """Return a report of an agent, so many seconds after the beginning."""
        at = self.began + timedelta(seconds=seconds)
        return Heard(scope=SCOPE, relay=relay, seen=at, words={event_id: word}, is_document=False)

    def document(self, relay: str, seconds: float, *events: ScheduledEvent) -> Heard:
        """Return a pulse of an agent, so many seconds after the beginning."""
        at = self.began + timedelta(seconds=seconds)
        words = {event.lowercase_event_id: event for event in events}
        return Heard(scope=SCOPE, relay=relay, seen=at, words=words, is_document=True)

    def history(self, event_id: str = "e-1") -> EventHistory:
        history = self.merger.history(SCOPE, event_id)
        assert history is not None
        return history

    async def dispute(self) -> None:
        """Let two agents show the event, and one of them say that it is gone."""
        for relay in ("vm-0", "vm-1"):
            await self.merger.merge([self.word(relay, EVENT, 1)])
        await self.merger.merge([self.word("vm-0", GoneFromDocument(), 2)])

    async def forget(self, relay: str, *others: str) -> None:
        """Forget an agent of a scope that has others."""
        agents = [agent_row(name) for name in (relay, *others)]
        for agent in agents:
            self.merger._roster.put(agent)  # noqa: SLF001  # as if it was heard
        await self.merger.forget_agent(agents[0])

    async def told(self, event_id: str = "e-1") -> list[str]:
        key = KEYS.make_key(SCOPE, event_id)
        return await self.store.read(
            lambda tx: [event.name for event in tx.journal.newest_changes(key, PageLimit(1000))]
        )


class _RosterOfTests(Roster):
    """Says what a test wants: all are fresh. ``hears`` and ``unheard`` are those of the rig."""

    def __init__(self, hears: list[bool], unheard: set[str]) -> None:
        super().__init__()
        self._hears = hears
        self._unheard = unheard

    @override
    def may_yet_connect(self, scope: str, now: datetime, relay: str) -> bool:
        return relay in self._unheard

    @override
    def may_speak(self, scope: str, now: datetime, relay: str) -> bool:
        return True

    @override
    def has_listened(self, now: datetime) -> bool:
        return self._hears.pop(0) if self._hears else True


@dataclass(slots=True)
class _LinkOfTests:
    """Notes the scopes that are asked, and answers whether all was read as a test wants it."""

    asked: list[str] = field(default_factory=list)
    reads: list[bool] = field(default_factory=list)
    """What the broker answers each time it is asked whether all was read; then always yes."""
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    """Set unless the broker takes its time."""
    questions: int = 0
    """How often the broker was asked."""

    async def send(self, key: str, _: CloudEvent) -> bool:
        self.asked.append(key)
        return True

    async def has_read_all(self) -> bool:
        self.questions += 1
        await self.may_answer.wait()
        return self.reads.pop(0) if self.reads else True


@asynccontextmanager
async def merging(folder: Path) -> AsyncIterator[Rig]:
    """Open the store of a hub in a folder, with a merger that knows what it holds."""
    async with open_store_in(folder, lambda _: (), HUB) as store:
        hears: list[bool] = []
        unheard: set[str] = set()
        link, roster = _LinkOfTests(), _RosterOfTests(hears, unheard)
        link.may_answer.set()
        origin = Origin("hub", "hub-0")
        merger = EventMerger(origin, store, SystemClock(), roster, cast("HubLink", link))
        await merger.load()
        yield Rig(store, merger, link, datetime.now(UTC) - timedelta(seconds=60), hears, unheard)


@asynccontextmanager
async def held(store: Store) -> AsyncIterator[None]:
    reached, release = threading.Event(), threading.Event()

    def hold(_: Transaction) -> None:
        reached.set()
        release.wait(60)

    holding = store.submit(hold)
    try:
        await eventually(reached.is_set)
        yield
    finally:
        release.set()
        await holding


@pytest.fixture
def quick_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "END_WAIT", timedelta(milliseconds=50))
    monkeypatch.setattr(merger, "END_INTERVAL", 0.05)


async def test_messages_that_come_again_after_a_lost_connection_are_no_news(tmp_path: Path) -> None:
    """The connection ends while the store writes a batch in which the event changes twice."""
    async with merging(tmp_path) as rig:
        await rig.merger.merge([rig.word("vm-0", EVENT, 1)])
        batch = [rig.word("vm-0", MOVED, 2), rig.word("vm-0", EVENT, 3)]
        async with held(rig.store):
            taking = asyncio.create_task(rig.merger.merge(batch))
            await asyncio.sleep(0)  # the store has the work now
            taking.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await taking
        await rig.merger.merge(batch)
        assert await rig.told() == ["event.scheduled", "event.updated", "event.updated"]


async def test_an_unsaved_merge_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a bug the link hands over one message after the other again."""

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    async with merging(tmp_path) as rig:
        with monkeypatch.context() as broken:
            broken.setattr(Recorder, "record_observations", fail)
            with pytest.raises(RuntimeError):
                await rig.merger.merge([rig.word("vm-0", EVENT, 1)])
        await rig.merger.merge([rig.word("vm-0", EVENT, 1)])
        assert await rig.told() == ["event.scheduled"]


async def test_who_disagrees_has_time_again_when_the_memory_is_read_again(tmp_path: Path) -> None:
    async with merging(tmp_path) as rig:
        await rig.dispute()
    async with merging(tmp_path) as rig:
        assert rig.history().end_due_at is not None


async def test_a_report_that_says_the_same_again_is_stored_with_its_time(tmp_path: Path) -> None:
    """After a restart, what comes again from before it must be a repeat."""
    async with merging(tmp_path) as rig:
        await rig.merger.merge([rig.word("vm-0", EVENT, 1)])
        await rig.merger.merge([rig.word("vm-0", EVENT, 9)])
        await rig.merger.merge([rig.document("vm-0", 20, EVENT)])
        key = KEYS.make_key(SCOPE, "e-1")
        (row,) = await rig.store.read(lambda tx: tx.fleet.sightings([key]))
        assert row.seen == rig.began + timedelta(seconds=9)


async def test_a_forgotten_agent_keeps_no_event_alive_after_a_restart(tmp_path: Path) -> None:
    async with merging(tmp_path) as rig:
        await rig.store.transact(lambda tx: tx.fleet.save_agents(map(agent_row, ("vm-0", "vm-1"))))
        await rig.merger.merge([rig.word("vm-0", EVENT, 1), rig.word("vm-1", EVENT, 1)])
        await rig.forget("vm-0", "vm-1")
        assert await rig.told() == ["event.scheduled"]
    async with merging(tmp_path) as rig:
        await rig.forget("vm-1")
        assert await rig.told() == ["event.scheduled", "event.ended"]
        assert await rig.store.read(lambda tx: tx.fleet.agents()) == []


async def test_a_batch_may_exceed_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that have ended it holds the last, and reads the others again."""
    monkeypatch.setattr(merger, "MAX_ENDED", 20)
    monkeypatch.setattr(merger, "MAX_WORDS", 10)
    async with merging(tmp_path) as rig:
        events = [make_event(event_id=f"E-{number}") for number in range(50)]
        names = [event.lowercase_event_id for event in events]
        gone = [rig.word("vm-0", GoneFromDocument(), 2, event_id=name) for name in names]
        await rig.merger.merge(gone)
        await rig.merger.merge([rig.document("vm-0", 1, *events), *gone])
        known = [name for name in names if rig.merger.history(SCOPE, name) is not None]
        assert known == names[-20:]
        await rig.merger.merge([rig.document("vm-0", 3, events[0])])
        assert await rig.told("e-0") == ["event.scheduled", "event.ended", "event.scheduled"]


async def test_who_disagrees_has_time_again_when_the_hub_was_deaf(tmp_path: Path) -> None:
    """The agents are asked at once whether the event is still there."""
    async with merging(tmp_path) as rig:
        async with ending(rig):
            await rig.dispute()
            await eventually(lambda: rig.link.asked == [f"scope.{SCOPE}"])
            before = rig.history().end_due_at
            assert before is not None
            rig.link.asked.clear()
            rig.merger.restart_end_waits()
            await eventually(lambda: rig.link.asked == [f"scope.{SCOPE}"])
        after = rig.history()
        assert after.end_due_at is not None
        assert after.end_due_at > before
        assert after.ended_at is None


async def test_a_hub_that_restarts_while_an_event_ends_still_waits_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with merging(tmp_path) as rig:
        await rig.dispute()
    monkeypatch.setattr(merge, "END_WAIT", timedelta(milliseconds=200))
    async with merging(tmp_path) as rig:
        async with ending(rig):
            rig.merger.restart_end_waits()
            await eventually(lambda: has_ended(rig))
        assert await rig.told() == ["event.scheduled", "event.ended"]
        await rig.merger.merge(
            [rig.word("vm-1", GoneFromDocument(), 3), rig.word("vm-0", EVENT, 1)]
        )
        assert await rig.told() == ["event.scheduled", "event.ended"]


@pytest.mark.usefixtures("quick_ends")
@pytest.mark.parametrize("answers", ["reads", "hears"])
async def test_an_event_ends_only_once_agents_are_heard_and_the_broker_says_that_all_was_read(
    tmp_path: Path, answers: Literal["reads", "hears"]
) -> None:
    """That somebody still shows it can wait in the queue behind much else."""
    async with merging(tmp_path) as rig:
        await rig.dispute()
        left = rig.link.reads if answers == "reads" else rig.hears
        left += [False] * 5
        async with ending(rig):
            rig.merger.restart_end_waits()
            await eventually(lambda: len(left) < 4)
            assert await rig.told() == ["event.scheduled"]
            await eventually(lambda: has_ended(rig))
        assert not left


@pytest.mark.usefixtures("quick_ends")
async def test_an_event_does_not_end_before_who_showed_it_could_connect_again(
    tmp_path: Path,
) -> None:
    """After an outage of the broker, agents connect again over a minute."""
    async with merging(tmp_path) as rig:
        await rig.dispute()
        rig.unheard.add("vm-1")
        async with ending(rig):
            rig.merger.restart_end_waits()
            await eventually(lambda: rig.link.questions > 3)
            assert await rig.told() == ["event.scheduled"]
            rig.unheard.clear()
            await eventually(lambda: has_ended(rig))


@pytest.mark.usefixtures("quick_ends")
async def test_what_is_due_during_a_question_waits_for_the_next_answer(tmp_path: Path) -> None:
    other = make_event(event_id="E-2")
    async with merging(tmp_path) as rig:
        rig.link.may_answer.clear()
        for vm in ("vm-0", "vm-1"):
            await rig.merger.merge([rig.document(vm, 1, EVENT, other)])
        await rig.merger.merge([rig.word("vm-0", GoneFromDocument(), 2)])
        async with ending(rig):
            await eventually(lambda: rig.link.questions == 1)
            await rig.merger.merge([rig.word("vm-0", GoneFromDocument(), 2, event_id="e-2")])
            due = rig.history("e-2").end_due_at
            assert due is not None
            await eventually(lambda: datetime.now(UTC) > due)
            rig.link.may_answer.set()
            await eventually(lambda: has_ended(rig, "e-2"))
        assert rig.link.questions > 1


async def test_a_pulse_speaks_of_what_reports_before_it_in_its_batch_told(tmp_path: Path) -> None:
    """Of an event that it does not list, the agent says that it is gone."""
    other = make_event(event_id="E-2")
    async with merging(tmp_path) as rig:
        await rig.merger.merge(
            [rig.word("vm-0", EVENT, 1), rig.document("vm-0", 2, other), rig.document("vm-1", 3)]
        )
        assert await rig.told() == ["event.scheduled", "event.ended"]
        assert await rig.told("e-2") == ["event.scheduled"]


def ending(rig: Rig) -> BackgroundTasks:
    return BackgroundTasks(rig.merger.end_events_when_due())


def has_ended(rig: Rig, event_id: str = "e-1") -> bool:
    return rig.history(event_id).ended_at is not None


def agent_row(relay: str) -> Agent:
    """Return an agent of which only its name is known."""
    at = datetime.now(UTC)
    return Agent(scope=SCOPE, relay=relay, user="vmss-a", name=relay, first_heard=at)
