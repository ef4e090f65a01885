"""Agents of a scope tell each change once, as one relay: 50 for `make chaos-tests`, else eight."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from relay.simulator import Plan, Simulator
from tests.depth import CHAOS, depth
from tests.eventually import eventually
from tests.fleet.running_fleet import running_fleet
from tests.journey.relay_process import Inbox, inbox, name_of
from tests.rabbitmq import Broker

AGENTS = depth(50, 8)
SCOPE = "vmss-a-1f0c33ab"
PLAIN = "vm-plain"


def histories(box: Inbox) -> dict[str, list[tuple[str, str]]]:
    """Return the changes of each EventId with their ids, in order of arrival, with repeats."""
    found: dict[str, list[tuple[str, str]]] = {}
    for each in box.events:
        if name_of(each).startswith("event."):
            found.setdefault(each["subject"], []).append((name_of(each), each["id"]))
    return found


def changes(box: Inbox) -> int:
    return sum(map(len, histories(box).values()))


class Story:
    """Changes of the simulated Azure, in steps between which each agent polls."""

    def __init__(self, azure: Simulator) -> None:
        self.azure = azure
        self.expected = 0

    def begin(self) -> None:
        schedule = self.azure.schedule
        self.moved = schedule(Plan(resources=("vm-0", "vm-1")))
        self.frozen = schedule(Plan(type="Freeze", duration=5, resources=("vm-1",)))
        self.flapping = schedule(Plan(type="Redeploy", resources=("vm-2",), description="A"))
        self.canceled = schedule(Plan(source="User", resources=("vm-3",)))
        self.failed = schedule(Plan(started=True, lasts=None, resources=("vm-4",)))
        self.odd = schedule(Plan(fields={"EventType": "Quake", "NotBefore": None}))
        self.evicted = schedule(Plan(type="Preempt", resources=("vm-5",), notice=600))
        self.expected += 7

    def change(self) -> None:
        self.azure.update_event(self.moved, resources=("vm-0",))
        self.azure.start(self.frozen)
        self.azure.update_event(self.flapping, description="B")
        self.azure.cancel(self.canceled)
        self.azure.update_event(self.evicted, notice=900)
        self.expected += 5

    def return_to_before(self) -> None:
        self.azure.start(self.moved)
        self.azure.update_event(self.flapping, description="A")
        self.azure.schedule(Plan(id=self.canceled.event_id, resources=("vm-3",)))
        self.azure.end(self.frozen)
        self.azure.update_event(self.odd, fields={"EventType": "Quake", "Description": "more"})
        self.expected += 5

    def end(self) -> None:
        self.azure.end(self.moved)
        self.azure.end(self.failed)
        for event in (self.flapping, self.canceled, self.odd, self.evicted):
            self.azure.cancel(event.event_id)
        self.expected += 6


@pytest.mark.timeout(depth(480, 180))
async def test_agents_tell_changes_once_as_one_relay(own_broker: Broker, tmp_path: Path) -> None:
    """A plain relay runs beside them, as another VM of the same scope."""
    vms = [f"vm-{number}" for number in range(AGENTS)]
    running = running_fleet(
        own_broker,
        tmp_path,
        {SCOPE: [*vms, PLAIN]},
        without_agents=[PLAIN],
        interval="3s" if CHAOS else "500ms",
    )
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running)
        alone = await stack.enter_async_context(inbox())
        await fleet.start_plain_relay(stack, SCOPE, PLAIN, alone.url)
        story = Story(fleet.azure)
        for step in (story.begin, story.change, story.return_to_before, story.end):
            step()
            await eventually(lambda: changes(alone) >= story.expected)
            await eventually(lambda: changes(fleet.inbox) >= story.expected)
            await fleet.wait_until_reported()
        assert histories(fleet.inbox) == histories(alone)
