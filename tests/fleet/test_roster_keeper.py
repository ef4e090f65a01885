"""What the hub reports about its agents: who is silent, who is back, and whose clock is wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from relay.events.build import Origin
from relay.fleet.hub.hub import UPKEEP_INTERVAL
from relay.fleet.hub.roster_keeper import RosterKeeper
from relay.fleet.messages import Pulse
from relay.fleet.routing import AuthorizedSender
from relay.store import RecordedEvent, StateFileScopeAndVm
from relay.store.sqlite import Store
from tests.clocks import ManualClock
from tests.store.open_store import open_store_in

SCOPE = "vmss-a-1f0c33ab"
SENDER = AuthorizedSender(SCOPE, "vm-0", "vmss-a")


@dataclass
class Rig:
    """A keeper whose clock a test advances. ``told`` are the names of the events it records."""

    clock: ManualClock
    store: Store
    told: list[str]
    lost: list[str] = field(default_factory=list)
    is_connected: bool = True
    keeper: RosterKeeper = field(init=False)

    def __post_init__(self) -> None:
        self.keeper = RosterKeeper(Origin("hub", "hub-0"), self.store)

    def listen(self) -> None:
        """Do what the hub does at each look at the roster."""
        now, roster = self.clock.now(), self.keeper.roster
        if self.is_connected:
            roster.note_listening(now)
        else:
            roster.note_connection_lost()
        self.keeper.tell(now)
        for agent in roster.agents_to_forget(now):
            self.lost.append(agent.relay)
            roster.forget(agent)
        self.keeper.save()

    def hear(self, clock_offset: float = 0.0) -> None:
        pulse = Pulse(version="1", names=(), live=(), clock_offset=clock_offset)
        self.keeper.roster.note_message(SENDER, "vm-0", self.clock.now(), pulse)

    async def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / UPKEEP_INTERVAL)):
            self.clock.advance(UPKEEP_INTERVAL)
            self.listen()
        await self.store.read(lambda _: None)  # what was submitted before is recorded


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A keeper that knows an agent, which it has heard."""
    async with open_store_in(
        tmp_path, lambda _: (), StateFileScopeAndVm("hub", None, is_hub=True)
    ) as store:
        told: list[str] = []

        def note(events: Any) -> None:
            told.extend(event.name for event in events if isinstance(event, RecordedEvent))

        store.listeners.recorded.append(note)
        clock = ManualClock()
        made = Rig(clock, store, told)
        await made.keeper.load()
        made.listen()
        made.hear()
        yield made


async def test_a_silent_scope_is_told_once_and_so_is_its_return(rig: Rig) -> None:
    await rig.pass_time(400)
    assert rig.told == ["relay.silent"]
    rig.hear()
    await rig.pass_time(20)
    assert rig.told == ["relay.silent", "relay.source-recovered"]


async def test_a_scope_does_not_come_back_because_the_hub_hears_nobody(rig: Rig) -> None:
    await rig.pass_time(200)
    rig.is_connected = False
    await rig.pass_time(200)
    rig.is_connected = True
    await rig.pass_time(400)
    assert rig.told == ["relay.silent"]


async def test_a_scope_does_not_come_back_because_its_agents_are_forgotten(rig: Rig) -> None:
    await rig.pass_time(24 * 3600 + 60)
    assert rig.lost == ["vm-0"]
    assert rig.told == ["relay.silent"]


async def test_a_wrong_clock_is_told_once_until_it_is_right_again(rig: Rig) -> None:
    rig.hear(clock_offset=9.0)
    await rig.pass_time(30)
    rig.hear(clock_offset=8.0)
    await rig.pass_time(30)
    assert rig.told == ["relay.clock-skewed"]
    rig.hear(clock_offset=0.1)
    await rig.pass_time(10)
    rig.hear(clock_offset=9.0)
    await rig.pass_time(10)
    assert rig.told == ["relay.clock-skewed"] * 2


async def test_the_agents_are_known_after_a_restart(rig: Rig) -> None:
    await rig.pass_time(UPKEEP_INTERVAL)
    again = RosterKeeper(Origin("hub", "hub-0"), rig.store)
    await again.load()
    assert [agent.relay for agent in again.roster] == ["vm-0"]
