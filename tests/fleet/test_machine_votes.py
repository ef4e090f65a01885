"""A program on each VM of a fleet says when the VM is ready: it asks its own agent, as ever."""

from __future__ import annotations

from pathlib import Path

from relay.simulator import Plan
from tests.eventually import eventually
from tests.fleet.running_fleet import running_fleet
from tests.rabbitmq import Broker

SCOPE, OTHER = "vmss-a-1f0c33ab", "vmss-a-9d2e77c0"
VOTERS = {
    "approvals": {
        "rules": [
            {"name": "drained", "approve": {"each_resource": True, "from": ["vm:vmss-a-*/*"]}}
        ]
    }
}


async def test_an_event_starts_once_a_program_on_each_of_its_vms_has_said_that_it_is_ready(
    own_broker: Broker, tmp_path: Path
) -> None:
    """The relays have names in both notations of scale sets. Nobody has a key."""
    vms = {SCOPE: ["vmss_0", "vmss000001", "vmss_2"], OTHER: ["vmss_0"]}
    async with running_fleet(own_broker, tmp_path, vms, hub=VOTERS) as fleet:
        azure = fleet.azures[SCOPE]
        event = azure.schedule(Plan(resources=("vmss_0", "vmss_1"), lasts=None))
        await eventually(lambda: fleet.told(event.event_id) == ["event.scheduled"])
        revision = fleet.inbox.events[0]["data"]["revision"]
        vote = {"eventId": event.event_id, "decision": "approve", "revision": revision}

        status, answer = await fleet.decide_on_vm(SCOPE, "vmss_0", vote)
        assert (status, answer["state"], answer["votes"]) == (202, "pending", 1)
        status, problem = await fleet.decide_on_vm(SCOPE, "vmss_2", vote)
        assert status == 403
        assert problem["detail"].endswith("itself only, and the event does not name it")
        status, problem = await fleet.decide_on_vm(OTHER, "vmss_0", vote)
        assert status == 404
        assert (await fleet.decide_on_vm(OTHER, "vmss_0", vote | {"scope": SCOPE}))[0] == 404
        status, problem = await fleet.decide_on_vm(SCOPE, "vmss_0", vote | {"revision": "old"})
        assert (status, problem["revision"]) == (409, revision)
        assert not azure.start_requests

        headers = {"Idempotency-Key": "drained"}
        first = await fleet.decide_on_vm(SCOPE, "vmss000001", vote, headers)
        assert (first[0], first[1]["state"]) == (202, "granted")
        assert await fleet.decide_on_vm(SCOPE, "vmss000001", vote, headers) == first
        await eventually(lambda: "startrequest.accepted" in fleet.told(event.event_id))
        assert len(azure.start_requests) == 1
        recorded = [
            (each["data"]["principal"], each["data"]["channel"], each["scope"])
            for each in fleet.inbox.events
            if each["type"].endswith("approval.recorded.v1")
        ]
        assert recorded == [
            (f"vm:{SCOPE}/vmss_0", "fleet", SCOPE),
            (f"vm:{SCOPE}/vmss000001", "fleet", SCOPE),
        ]
