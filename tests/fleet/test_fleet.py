"""A whole fleet: what a hub tells about what its agents see."""

from __future__ import annotations

from pathlib import Path

from relay.simulator import Plan
from tests.fleet.running_fleet import running_fleet
from tests.journey.relay_process import eventually
from tests.rabbitmq import Broker

SCOPE = "vmss-a-1f0c33ab"


async def test_each_change_that_three_agents_see_is_told_once(
    own_broker: Broker, tmp_path: Path
) -> None:
    vms = ["vm-0", "vm-1", "vm-2"]
    async with running_fleet(own_broker, tmp_path, {SCOPE: vms}) as fleet:
        azure = fleet.azures[SCOPE]
        event = azure.schedule(Plan(resources=("vm-0",)))
        await eventually(lambda: len(fleet.told(event.event_id)) == 1)
        azure.start(event)
        await eventually(lambda: len(fleet.told(event.event_id)) == 2)
        azure.end(event)
        await eventually(lambda: len(fleet.told(event.event_id)) == 3)
        changes = ["event.scheduled", "event.started", "event.ended"]
        assert [each["type"].split(".", 2)[2][:-3] for each in fleet.inbox.events] == changes
        assert {each["scope"] for each in fleet.inbox.events} == {SCOPE}
