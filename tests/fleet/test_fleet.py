"""A whole fleet: what a hub tells about what its agents see."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from relay.fleet.hub import merge
from relay.simulator import Plan
from tests.eventually import eventually
from tests.fleet.running_fleet import RunningFleet, running_fleet
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


async def test_what_a_deleted_vm_alone_had_reported_does_not_end_while_others_show_it(
    own_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other agents saw that the hub knew the event, and reported no copy of it."""
    monkeypatch.setattr(merge, "END_WAIT", timedelta(seconds=1))
    vms = ["vm-0", "vm-1", "vm-2"]
    async with running_fleet(own_broker, tmp_path, {SCOPE: vms}) as fleet:
        azure = fleet.azures[SCOPE]
        shared = azure.schedule(Plan(resources=("vm-0",)))
        await eventually(lambda: fleet.told(shared.event_id) == ["event.scheduled"])
        deletion = azure.schedule(Plan(type="Terminate", resources=("vm-0",)))
        await eventually(lambda: len(fleet.told(deletion.event_id)) == 1)
        azure.start(deletion)
        await eventually(lambda: len(fleet.told(deletion.event_id)) == 2)
        await fleet.stop_agent(SCOPE, "vm-0")
        azure.end(deletion)
        await eventually(lambda: "vm-0" not in [agent.relay for agent in fleet.roster])
        azure.update_event(shared, description="still there")
        await eventually(lambda: len(fleet.told(shared.event_id)) > 1)
        assert fleet.told(shared.event_id) == ["event.scheduled", "event.updated"]


async def test_a_limit_of_one_machine_holds_across_scopes(
    own_broker: Broker, tmp_path: Path
) -> None:
    """Three scopes have events at the same moment; Azure starts none of them by itself."""
    scopes = {f"vmss-a-{number}": [f"db-{number}", f"web-{number}"] for number in (1, 2, 3)}
    hub = {
        "approvals": {
            "rules": [{"name": "databases", "approve": "automatic"}],
            "limits": [
                {"name": "one-database", "match": {"resources": ["db-*"]}, "max": 1, "rest": "0s"}
            ],
        }
    }
    async with running_fleet(own_broker, tmp_path, scopes, hub=hub) as fleet:
        events = {
            scope: fleet.azures[scope].schedule(Plan(resources=(vms[0],)))
            for scope, vms in scopes.items()
        }
        left = dict(events)
        while left:
            await eventually(lambda: any(_is_sent(fleet, scope) for scope in left))
            sent = [scope for scope in left if _is_sent(fleet, scope)]
            assert len(sent) == 1, "two machines of the limit were started together"
            event_id = left.pop(sent[0]).event_id
            waiting = [each.event_id for each in left.values()]
            for other in waiting:
                _, shown = await fleet.call("GET", f"/v1/events/{other}")
                assert shown["approval"]["state"] == "waiting"
                assert "one-database" in str(shown["approval"]["waitingFor"])
            azure = fleet.azures[sent[0]]
            await azure.wait_until_started(event_id, within=60)
            azure.end(event_id)
            await eventually(lambda event_id=event_id: "event.ended" in fleet.told(event_id))
        assert [len(azure.start_requests) for azure in fleet.azures.values()] == [1, 1, 1]


def _is_sent(fleet: RunningFleet, scope: str) -> bool:
    return bool(fleet.azures[scope].start_requests)
