"""A program on each VM of a fleet says when the VM is ready: it asks its own agent, as ever."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

from pamqp.commands import Basic

from relay.events.build import Origin
from relay.fleet.hub.votes import ANSWER_RATE
from relay.fleet.messages import VoteMessage
from relay.fleet.routing import command_key, vote_key
from relay.fleet.topology import agent_publish_exchange_name, command_exchange_name
from relay.rate_limits import CALLER_BURST, CALLER_RATE
from relay.simulator import Plan
from tests.eventually import eventually
from tests.fleet.hub_side import AGENT_USER
from tests.fleet.running_fleet import running_fleet
from tests.journey.bus import Bus
from tests.rabbitmq import Broker
from tests.raw_amqp import RawChannel

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


async def test_without_a_hub_the_answer_is_503_and_the_same_id_decides_once(
    own_broker: Broker, tmp_path: Path
) -> None:
    async with running_fleet(
        own_broker, tmp_path, {SCOPE: ["vmss_0", "vmss_1"]}, hub=VOTERS
    ) as fleet:
        event = fleet.azures[SCOPE].schedule(Plan(resources=("vmss_0", "vmss_1"), lasts=None))
        await eventually(lambda: fleet.told(event.event_id) == ["event.scheduled"])
        revision = fleet.inbox.events[0]["data"]["revision"]
        vote = {"eventId": event.event_id, "decision": "approve", "revision": revision}
        headers = {"Idempotency-Key": "drained"}
        await fleet.stop_hub()
        status, problem = await fleet.decide_on_vm(SCOPE, "vmss_0", vote, headers)
        assert status == 503
        assert "the same id" in problem["detail"]
        await fleet.start_hub()
        await fleet.wait_until_connected()
        status, answer = await fleet.decide_on_vm(SCOPE, "vmss_0", vote, headers)
        assert (status, answer["votes"]) == (202, 1)
        await eventually(lambda: "approval.recorded" in fleet.told(event.event_id))
        recorded = [
            each for each in fleet.inbox.events if each["type"].endswith("approval.recorded.v1")
        ]
        assert len(recorded) == 1


async def test_the_flood_of_one_vm_gets_few_answers_and_the_others_get_theirs(
    own_broker: Broker, tmp_path: Path
) -> None:
    """Somebody on the VM has the broker's URL and avoids the agent."""
    vms = {SCOPE: ["vmss_0", "vmss_1"]}
    async with running_fleet(own_broker, tmp_path, vms, hub=VOTERS) as fleet:
        event = fleet.azures[SCOPE].schedule(Plan(resources=("vmss_0", "vmss_1"), lasts=None))
        await eventually(lambda: fleet.told(event.event_id) == ["event.scheduled"])
        revision = fleet.inbox.events[0]["data"]["revision"]
        vote = {"eventId": event.event_id, "decision": "approve", "revision": revision}
        flood = VoteMessage(request_id="flood", user="local:root", body=vote | {"revision": "old"})
        origin = Origin(SCOPE, "vmss_1")
        message = flood.to_event(origin, datetime.now(UTC))
        properties = Basic.Properties(message_id=message.id, user_id=AGENT_USER)
        async with (
            Bus(own_broker, fleet.exchange).channel() as channel,
            RawChannel(own_broker.amqp_url(AGENT_USER)) as flooding,
        ):
            answers = await channel.declare_queue(exclusive=True)
            key = command_key(SCOPE, "vmss_1")
            await answers.bind(command_exchange_name(fleet.exchange), key)
            began = time.monotonic()
            await flooding.publish_all(
                agent_publish_exchange_name(fleet.exchange),
                vote_key(origin),
                message.body,
                [properties] * 2000,
            )
            headers = {"Idempotency-Key": "drained"}
            while (await fleet.decide_on_vm(SCOPE, "vmss_0", vote, headers))[0] != 202:
                assert time.monotonic() - began < 120
            counted = (await channel.declare_queue(answers.name, passive=True)).declaration_result
            allowed = 2 * CALLER_BURST + (CALLER_RATE + ANSWER_RATE) * (time.monotonic() - began)
            assert CALLER_BURST < (counted.message_count or 0) <= allowed
