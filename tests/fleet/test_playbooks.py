"""The playbooks of the simulator, each step seen by all agents: each change is told once."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from relay.app import RunningRelay
from relay.clock import SystemClock
from relay.simulator import InvalidTransition, Simulator, load_packaged_playbooks, perform_action
from relay.simulator.playbook import Action
from tests.depth import CHAOS
from tests.eventually import eventually
from tests.fleet.running_fleet import RunningFleet, running_fleet
from tests.fleet.test_one_scope import PLAIN, SCOPE, changes, histories
from tests.journey.relay_process import inbox
from tests.rabbitmq import Broker

AGENTS = 10
CHANGES = {"schedule", "start", "end", "cancel", "update", "skip_incarnations"}
"""The actions that change the document. Faults and waiting are tests of the source."""


async def wait_until_seen(fleet: RunningFleet, plain: RunningRelay) -> None:
    """Wait until every relay has read the document as it is now."""
    clock = SystemClock()
    since = clock.monotonic()
    relays = [plain, *fleet.relays.values()]

    def has_read() -> bool:
        ages = [each.relay.polling.read_age for each in relays if each.relay.polling is not None]
        passed = clock.monotonic() - since
        return len(ages) == len(relays) and all(age is not None and age < passed for age in ages)

    await eventually(has_read, what="a poll of each relay")


def apply(azure: Simulator, action: Action) -> bool:
    """Perform an action if it changes the document. Return whether it did."""
    if action.approve is not None:
        action = Action(start=action.approve.event)
    if CHANGES.isdisjoint(action.given_keys()):
        return False
    try:
        perform_action(azure, action)
    except InvalidTransition:
        return False  # the action waits for something that Azure does by itself later
    return True


def end_all(azure: Simulator) -> None:
    """End what is live."""
    for shown in azure.document()["Events"]:
        event = azure.event(shown["EventId"])
        if event.status == "Scheduled":
            azure.start(event)
        azure.end(event)


@pytest.mark.skipif(not CHAOS, reason="takes minutes: make chaos-tests")
@pytest.mark.timeout(1200)
async def test_each_change_of_each_playbook_is_told_once(
    own_broker: Broker, tmp_path: Path
) -> None:
    """A plain relay runs beside the agents, and its ids are the same."""
    vms = [f"vm-{number}" for number in range(AGENTS)]
    running = running_fleet(own_broker, tmp_path, {SCOPE: [*vms, PLAIN]}, without_agents=[PLAIN])
    async with running as fleet, inbox() as alone, AsyncExitStack() as stack:
        plain = await fleet.start_plain_relay(stack, SCOPE, PLAIN, alone.url)
        azure = fleet.azures[SCOPE]
        for name, playbook in load_packaged_playbooks().items():
            before = len(changes(alone))
            for step in playbook.steps:
                if apply(azure, step):
                    await wait_until_seen(fleet, plain)
            end_all(azure)
            await wait_until_seen(fleet, plain)
            await eventually(
                lambda: len(changes(fleet.inbox)) >= len(changes(alone)), what=f"all of {name}"
            )
            await fleet.wait_until_reported()
            assert changes(fleet.inbox) == changes(alone), name
            assert len(changes(alone)) > before, name
        assert histories(fleet.inbox) == histories(alone)
