"""A whole fleet: what a hub tells about what its agents see."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from relay.fleet.hub import merge
from relay.simulator import Plan
from tests.eventually import eventually
from tests.fleet.running_fleet import running_fleet
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
        assert len(azure.start_requests) == 1
        await eventually(lambda: "event.started" in fleet.told(event.event_id))
        (started,) = (
            each for each in fleet.inbox.events if each["type"].endswith("event.started.v1")
        )
        assert started["data"]["approvedByRelay"] is True


async def test_an_agent_whose_vm_azure_deleted_is_forgotten(
    own_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The VM is gone before the event is. So the hub waits for its agent, and ends the event."""
    monkeypatch.setattr(merge, "END_WAIT", timedelta(seconds=1))
    vms = ["vm-0", "vm-1"]
    async with running_fleet(own_broker, tmp_path, {SCOPE: vms}) as fleet:
        azure = fleet.azures[SCOPE]
        event = azure.schedule(Plan(type="Terminate", resources=("vm-0",)))
        await eventually(lambda: len(fleet.told(event.event_id)) == 1)
        azure.start(event)
        await eventually(lambda: len(fleet.told(event.event_id)) == 2)
        await fleet.stop_agent(SCOPE, "vm-0")
        azure.end(event)
        await eventually(lambda: fleet.told(event.event_id)[-1] == "event.ended")
        await eventually(lambda: [agent.relay for agent in fleet.roster] == ["vm-1"])
