"""Which agent of a whole fleet gets an order, on a real RabbitMQ."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from relay.fleet.agent.start_orders import RESTART_PAUSE
from relay.simulator import Plan
from tests.eventually import eventually
from tests.fleet.running_fleet import RunningFleet, running_fleet
from tests.rabbitmq import Broker

SCOPE = "vmss-a-1f0c33ab"
RULE = {
    "approvals": {
        "rules": [{"name": "ops", "approve": {"votes": 1, "from": ["client:ops"]}}],
    }
}


async def wait_until_agents_obey() -> None:
    """Wait until agents that have just started carry out orders."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    await eventually(lambda: loop.time() > started + RESTART_PAUSE)


async def approve_when_told(fleet: RunningFleet, event_id: str) -> None:
    """Vote for an event as soon as it was told."""
    await eventually(lambda: fleet.told(event_id) == ["event.scheduled"])
    status, answer = await fleet.approve(SCOPE, event_id)
    assert (status, answer["state"]) == (202, "granted")


async def test_an_order_for_an_agent_that_is_gone_goes_to_the_next_agent_at_once(
    own_broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vms = ("vm-0", "vm-1")
    async with running_fleet(own_broker, tmp_path, {SCOPE: vms}, hub=RULE) as fleet:
        azure, hub = fleet.azures[SCOPE], fleet.running_hub.relay
        await wait_until_agents_obey()
        event = azure.schedule(Plan(resources=vms))  # both report it, as it names both
        await eventually(lambda: fleet.told(event.event_id) == ["event.scheduled"])
        key = f"{event.event_id.lower()}@{SCOPE}"

        async def show_both() -> bool:
            return len(await hub.store.read(lambda tx: tx.fleet.sightings([key]))) == 2

        await eventually(show_both)
        assert hub.roster is not None
        chosen, other = sorted(hub.roster, key=lambda agent: agent.candidate_rank)
        await fleet.stop_agent(SCOPE, chosen.relay)
        await approve_when_told(fleet, event.event_id)
        await eventually(lambda: "startrequest.accepted" in fleet.told(event.event_id))
        (post,) = azure.start_requests
        assert post.vm == other.relay
        returned = [text for text in caplog.messages if "the order was returned" in text]
        assert [chosen.relay in text for text in returned] == [True]
