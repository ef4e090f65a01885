"""A fleet whose broker is gone for a while, and whose hub is killed again and again.

`make chaos-tests` kills the hub 50 times and the broker, `make test` the hub alone, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections import Counter
from pathlib import Path

import pytest

from relay.approvals.request import Caller, DecisionRequest, Rights
from relay.fleet import link
from relay.fleet.agent import start_orders
from relay.simulator import Plan
from relay.simulator.event import Event
from relay.store.audit import verify_journal
from relay.store.file import open_for_reading
from relay.store.rows import PageLimit
from tests.depth import CHAOS, depth
from tests.eventually import eventually
from tests.fleet.running_fleet import RunningFleet, one_vote, running_fleet
from tests.journey.relay_process import RelayProcess, relay
from tests.rabbitmq import Broker

KILLS = depth(50, 1)
MAX_UNFINISHED = 4
SCOPE = "vmss-a-1f0c33ab"
VMS = ("vm-0", "vm-1", "vm-2")
PAGE = PageLimit(100)
RULE = one_vote("vm:*/*")


@pytest.fixture(autouse=True)
def quick_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let agents come back soon. No agent is restarted here, so none needs to wait for that."""
    monkeypatch.setattr(link, "FIRST_RECONNECT_SPREAD", 0.5)
    monkeypatch.setattr(link, "MAX_RECONNECT_SPREAD", 1.0)
    monkeypatch.setattr(start_orders, "RESTART_PAUSE", 0.0)


@pytest.mark.skipif(not CHAOS, reason="starts the broker again: make chaos-tests")
async def test_what_happens_while_the_broker_is_gone_is_told_afterwards_in_order(
    own_broker: Broker, tmp_path: Path
) -> None:
    async with running_fleet(own_broker, tmp_path, {SCOPE: VMS}) as fleet:
        azure = fleet.azures[SCOPE]
        known = azure.schedule(Plan(resources=("vm-0",)))
        await eventually(lambda: fleet.told(known.event_id) == ["event.scheduled"])
        await asyncio.to_thread(own_broker.kill)
        new = azure.schedule(Plan(resources=("vm-1",)))
        await until_agents_have_recorded(fleet, new, "event.scheduled")
        azure.update_event(known, description="it was moved")
        azure.start(new)
        await until_agents_have_recorded(fleet, known, "event.updated")
        await until_agents_have_recorded(fleet, new, "event.started")
        azure.cancel(known)
        await until_agents_have_recorded(fleet, known, "event.ended")
        await asyncio.to_thread(own_broker.start)
        await eventually(lambda: len(fleet.told(known.event_id)) >= 3)
        await eventually(lambda: len(fleet.told(new.event_id)) >= 2)
        await fleet.wait_until_reported()
        assert fleet.told(known.event_id) == ["event.scheduled", "event.updated", "event.ended"]
        assert fleet.told(new.event_id) == ["event.scheduled", "event.started"]


async def until_agents_have_recorded(fleet: RunningFleet, event: Event, name: str) -> None:
    async def have_recorded() -> bool:
        for agent in fleet.relays.values():
            events = await agent.relay.store.read(
                lambda tx: tx.journal.newest_changes(event.event_id.lower(), PAGE)
            )
            if name not in {each.name for each in events}:
                return False
        return True

    await eventually(have_recorded, every=0.1, what=f"{name} at every agent")


@pytest.mark.timeout(depth(1200, 300))
async def test_a_killed_hub_loses_no_change_and_no_vote(own_broker: Broker, tmp_path: Path) -> None:
    """Nothing is told twice with another id, and nothing is started twice."""
    async with running_fleet(own_broker, tmp_path, {SCOPE: VMS}, hub=RULE) as fleet:
        await fleet.stop_hub()
        state_file = tmp_path / "hub.db"
        chance = random.Random(7)  # noqa: S311  # moments of kills
        async with relay(tmp_path / "hub", fleet.hub_document(state_file)) as hub:
            await hub.start(ready=False)
            events: list[Event] = []
            async with asyncio.TaskGroup() as group:
                stop = asyncio.Event()
                group.create_task(drive(fleet, events, stop))
                for _ in range(KILLS):
                    before = len(fleet.inbox.events)
                    await eventually(lambda before=before: len(fleet.inbox.events) > before)
                    await asyncio.sleep(chance.uniform(0, 1.5))
                    await hub.kill()
                    await hub.start(ready=False)
                await eventually(lambda: len(events) > KILLS)
                stop.set()
            await settle(fleet, hub, events)
        with contextlib.closing(open_for_reading(state_file)) as journal:
            verify_journal(journal)


async def drive(fleet: RunningFleet, events: list[Event], stop: asyncio.Event) -> None:
    """Let events appear, and let a program on a VM vote for each until the hub has the vote."""
    async with asyncio.TaskGroup() as group:
        while not stop.is_set():
            vm = VMS[len(events) % len(VMS)]
            event = fleet.azure.schedule(Plan(resources=(vm,), starts_after=0.3, lasts=2))
            events.append(event)
            group.create_task(vote(fleet, vm, event))
            await asyncio.sleep(1.5)
            # A scope has one order at a time: a slow machine must not pile up events.
            await eventually(lambda: len(unfinished(fleet, events)) < MAX_UNFINISHED)


def unfinished(fleet: RunningFleet, events: list[Event]) -> list[Event]:
    return [event for event in events if "event.ended" not in fleet.told(event.event_id)]


async def vote(fleet: RunningFleet, vm: str, event: Event) -> None:
    """Vote with the same id until the hub has recorded it."""
    agent = fleet.relays[SCOPE, vm].relay
    request_id = secrets.token_hex(8)
    while True:
        known = await agent.store.read(
            lambda tx: tx.occurrences.find_newest_occurrence(event.event_id.lower())
        )
        if known is not None:
            answer = await agent.gate.submit(
                DecisionRequest(
                    caller=Caller("local:root", "local", Rights(frozenset({"approve"}))),
                    event_id=event.event_id,
                    decision="approve",
                    revision=known.revision,
                    at=agent.clock.now(),
                    request_id=request_id,
                )
            )
            if answer.status == 202:
                return
            # The hub may know the event only from the next message.
            assert answer.status in (503, 404), answer
        await asyncio.sleep(0.2)


async def settle(fleet: RunningFleet, hub: RelayProcess, events: list[Event]) -> None:
    """Wait until every event has ended and is told, and check what was told and sent."""
    with contextlib.suppress(TimeoutError):  # the assertion says what was told
        await eventually(
            lambda: not unfinished(fleet, events),
            within=depth(600, 120),  # a scope has one order at a time
        )
    left = {event.event_id: fleet.told(event.event_id) for event in unfinished(fleet, events)}
    assert not left, hub.log
    await fleet.wait_until_reported()
    for event in events:
        told = fleet.told(event.event_id)
        changes = [name for name in told if name.startswith("event.")]
        assert changes == ["event.scheduled", "event.started", "event.ended"], told
        counts = Counter(told)
        assert counts["approval.recorded"] == counts["approval.granted"] == 1, told
        assert counts["startrequest.accepted"] + counts["startrequest.failed"] == 1, told
    posts = Counter(each for call in fleet.azure.start_requests for each in call.event_ids)
    assert set(posts) == {event.event_id for event in events}
    # A hub that is killed before it has recorded an answer asks what the event is, and may order
    # another one after the first can no longer be sent.
    assert max(posts.values()) <= 2
    assert "Traceback" not in hub.log
