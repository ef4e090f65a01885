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


RULE = {
    "approvals": {
        "rules": [{"name": "ops", "approve": {"votes": 1, "from": ["client:ops"]}}],
    }
}


async def test_a_vote_at_the_hub_gives_one_start_request_in_the_scope(
    own_broker: Broker, tmp_path: Path
) -> None:
    vms = ["vm-0", "vm-1", "vm-2"]
    async with running_fleet(own_broker, tmp_path, {SCOPE: vms}, hub=RULE) as fleet:
        azure = fleet.azures[SCOPE]
        event = azure.schedule(Plan(resources=("vm-0",)))
        await eventually(lambda: fleet.told(event.event_id) == ["event.scheduled"])
        status, answer = await fleet.approve(SCOPE, event.event_id)
        assert (status, answer["state"]) == (202, "granted")
        await eventually(lambda: "startrequest.accepted" in fleet.told(event.event_id))
        assert [call.vm for call in azure.start_requests] != ["vm-0"]
        assert len(azure.start_requests) == 1
        await eventually(lambda: "event.started" in fleet.told(event.event_id))
        (started,) = (
            each for each in fleet.inbox.events if each["type"].endswith("event.started.v1")
        )
        assert started["data"]["approvedByRelay"] is True
