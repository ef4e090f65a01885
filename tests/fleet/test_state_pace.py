"""How often the hub tells a scope what it knows, and what of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.hub.histories import EventHistoryCache
from relay.fleet.hub.hub_state_sender import MIN_STATE_INTERVAL, HubStateSender
from relay.fleet.hub.merge import EventHistory, PublishedState
from relay.store import EventKeyFormat
from tests.approvals.manual_clock import NOON, ManualClock

SCOPE = "vmss-a"


@asynccontextmanager
async def states(clock: ManualClock) -> AsyncIterator[tuple[HubStateSender, list[CloudEvent]]]:
    """Run the states of one scope. The list holds those that were sent."""
    sent: list[CloudEvent] = []
    told = HubStateSender(
        Origin("hub", "hub-0"),
        EventKeyFormat(with_scope=True),
        clock,
        lambda _, event: sent.append(event),
        lambda _: [],
        lambda _: [],
    )
    run = asyncio.create_task(told.run(lambda: [SCOPE]))
    try:
        yield told, sent
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


async def pass_time(clock: ManualClock, seconds: float) -> None:
    """Let time pass in small steps, and after each what follows from it."""
    for _ in range(round(seconds / 0.05)):
        clock.advance(0.05)
        for _ in range(5):
            await asyncio.sleep(0)


async def test_the_first_state_goes_at_once_and_many_become_a_few() -> None:
    clock = ManualClock()
    async with states(clock) as (told, sent):
        await pass_time(clock, 1)
        before = len(sent)
        told.send_soon(SCOPE)
        assert len(sent) == before + 1
        for _ in range(20):
            told.send_soon(SCOPE)
            await pass_time(clock, 0.1)
        await pass_time(clock, 1)
        expected = 2 / MIN_STATE_INTERVAL
        assert expected - 1 <= len(sent) - before - 1 <= expected + 1


def test_an_event_that_nobody_told_of_is_not_asked_for_again() -> None:
    histories, name = EventHistoryCache(), (SCOPE, "e")
    assert histories.event_names_to_load([name]) == {name}
    histories.put(name, None)
    assert histories.event_names_to_load([name]) == set()
    assert histories.get(name) is None
    assert histories.histories_in_memory_of_scope(SCOPE) == {}
    known = EventHistory(path=(PublishedState("s", NOON),), started=False)
    histories.put(name, known)
    assert histories.get(name) is known
    assert histories.histories_in_memory_of_scope(SCOPE) == {"e": known}
    histories.put(name, EventHistory(path=known.path, started=False, ended_at=NOON))
    for number in range(10_000):
        histories.put((SCOPE, f"other-{number}"), None)
    histories.evict_surplus_ended_events()
    assert histories.event_names_to_load([name]) == {name}, (
        "those that ended longest ago are dropped"
    )
