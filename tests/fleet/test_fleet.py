"""A whole fleet: agents die, lag behind or see another document, and the hub tells one story."""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from relay.api.metrics import read_metrics
from relay.fleet.agent import start_orders
from relay.fleet.hub import merge
from relay.simulator import Plan, Setup
from tests.eventually import eventually
from tests.fleet.running_fleet import one_vote, running_fleet
from tests.journey.relay_process import inbox
from tests.rabbitmq import Broker

SCOPE = "vmss-a-1f0c33ab"
WHOLE_STORY = ["event.scheduled", "event.started", "event.ended"]


async def test_an_event_that_one_vm_alone_sees_is_told_from_beginning_to_end(
    own_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU VMs of a scale set with one fault domain see only the events that name them."""
    monkeypatch.setattr(merge, "END_WAIT", merge.END_WAIT * 100)  # nobody disagrees
    vms = ["vm-0", "vm-1", "vm-2"]
    async with running_fleet(
        own_broker, tmp_path, {SCOPE: vms}, setup=Setup(broadcast=False)
    ) as fleet:
        azure = fleet.azure
        events = [azure.schedule(Plan(resources=(vm,))) for vm in vms]
        await eventually(lambda: all(len(fleet.told(each.event_id)) == 1 for each in events))
        for event in events:
            azure.start(event)
        await eventually(lambda: all(len(fleet.told(each.event_id)) == 2 for each in events))
        for event in events:
            azure.end(event)
        await eventually(lambda: all(fleet.told(each.event_id) == WHOLE_STORY for each in events))
        await fleet.wait_until_reported()
        assert all(fleet.told(each.event_id) == WHOLE_STORY for each in events)


async def test_an_agent_loses_nothing_as_a_plain_relay(own_broker: Broker, tmp_path: Path) -> None:
    """Both use the same state file. The hub hears of what happened meanwhile from the pulse."""
    async with running_fleet(own_broker, tmp_path, {SCOPE: ["vm-0"]}) as fleet, inbox() as alone:
        azure, event = fleet.azure, await fleet.scheduled("vm-0")
        await fleet.stop_agent(SCOPE, "vm-0")
        async with AsyncExitStack() as stack:
            await fleet.start_plain_relay(stack, SCOPE, "vm-0", alone.url)
            azure.start(event)
            await eventually(lambda: "event.started" in alone.types_of(event.event_id))
        await fleet.start_agent(SCOPE, "vm-0")
        await eventually(lambda: fleet.told(event.event_id) == WHOLE_STORY[:2])
        azure.end(event)
        await eventually(lambda: fleet.told(event.event_id) == WHOLE_STORY)
        ids = {each["id"] for each in fleet.inbox.events if each["type"].endswith("started.v1")}
        assert ids == {each["id"] for each in alone.events if each["type"].endswith("started.v1")}


async def test_an_agent_whose_vm_azure_deleted_is_forgotten(
    own_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The VM is gone before the event is. So the hub waits for its agent, and ends the event."""
    monkeypatch.setattr(merge, "END_WAIT", timedelta(seconds=1))
    vms = ["vm-0", "vm-1"]
    async with running_fleet(own_broker, tmp_path, {SCOPE: vms}) as fleet:
        azure, event = fleet.azure, await fleet.scheduled("vm-0", type="Terminate")
        azure.start(event)
        await eventually(lambda: len(fleet.told(event.event_id)) == 2)
        await fleet.stop_agent(SCOPE, "vm-0")
        azure.end(event)
        await eventually(lambda: fleet.told(event.event_id)[-1] == "event.ended")
        await eventually(lambda: [agent.relay for agent in fleet.roster] == ["vm-1"])


async def test_an_order_for_an_agent_that_is_gone_goes_to_the_next_agent_at_once(
    own_broker: Broker,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start_orders, "RESTART_PAUSE", 0.0)  # no agent is restarted here
    vms = ("vm-0", "vm-1")
    async with running_fleet(
        own_broker, tmp_path, {SCOPE: vms}, hub=one_vote("client:ops")
    ) as fleet:
        azure, hub = fleet.azure, fleet.running_hub.relay
        event = azure.schedule(Plan(resources=vms))  # both report it, as it names both
        await eventually(lambda: fleet.told(event.event_id) == ["event.scheduled"])
        key = f"{event.event_id.lower()}@{SCOPE}"
        seen = partial(hub.store.read, lambda tx: tx.fleet.sightings([key]))
        await eventually(seen, lambda rows: len(rows) == 2)
        assert hub.roster is not None
        chosen, other = sorted(hub.roster, key=lambda agent: agent.candidate_rank)
        await fleet.stop_agent(SCOPE, chosen.relay)
        assert (await fleet.approve(SCOPE, event.event_id))[0] == 202
        await eventually(lambda: "startrequest.accepted" in fleet.told(event.event_id))
        (post,) = azure.start_requests
        assert post.vm == other.relay
        returned = [text for text in caplog.messages if "the order was returned" in text]
        assert [chosen.relay in text for text in returned] == [True]
        metrics = await read_metrics(hub, fleet.running_hub.server.state)
        samples = metrics.families["hub_orders_total"].samples
        ended = {each.labels["result"]: each.value for each in samples if each.value}
        assert ended == {"returned": 1, "accepted": 1}
