"""A vote, wherever it is given, makes one VM of the scope send one StartRequest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aio_pika
import aiohttp
import orjson
import pytest
from standardwebhooks import Webhook

from relay.fleet.agent import start_orders
from relay.simulator import Plan
from tests.eventually import eventually
from tests.fleet.hub_side import HUB_USER, STRANGER
from tests.fleet.running_fleet import RunningFleet, one_vote, running_fleet
from tests.journey.relay_process import CLIENT_SECRET, client
from tests.rabbitmq import Broker

SCOPE = "vmss-a-1f0c33ab"
OTHER = "vmss-a-2e1d44bc"
VMS = ("vm-0", "vm-1", "vm-2")


def hub_with_all_ways(port: int) -> dict[str, Any]:
    """Return the sections of a hub that takes votes in every way, and of RabbitMQ at this port."""
    sections = one_vote("client:ops", "vm:*/*")
    sections["approvals"]["amqp"] = {"url": f"amqp://{HUB_USER}:{HUB_USER}@127.0.0.1:{port}/"}
    ops = client("ops", secrets=[CLIENT_SECRET], amqp_user=STRANGER)
    return sections | {"api": {"listen": "127.0.0.1:0", "clients": [ops]}}


async def vote_by_callback(fleet: RunningFleet, vote: dict[str, str]) -> None:
    body = orjson.dumps(vote | {"scope": SCOPE}).decode()
    at = fleet.running_hub.relay.clock.now()
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": Webhook(CLIENT_SECRET).sign("msg_1", at, body),
        "content-type": "application/json",
    }
    url = f"http://127.0.0.1:{fleet.running_hub.server.port}/v1/callbacks/ops"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=body, headers=headers) as answer,
    ):
        assert answer.status == 202, await answer.text()


async def vote_over_amqp(fleet: RunningFleet, vote: dict[str, str]) -> None:
    """The routing key says the scope."""
    connection = await aio_pika.connect(fleet.broker.amqp_url(STRANGER))
    async with connection, connection.channel() as channel:
        exchange = await channel.get_exchange(f"{fleet.exchange}.approvals", ensure=False)
        message = aio_pika.Message(orjson.dumps(vote), message_id="vote-1", user_id=STRANGER)
        await exchange.publish(message, f"approve.{SCOPE}")


async def vote_on_vm(fleet: RunningFleet, vote: dict[str, str]) -> None:
    """Vote as a program on the VM does, which asks its own agent; and twice."""
    status, problem = await fleet.decide_on_vm(SCOPE, "vm-0", vote | {"revision": "old"})
    assert (status, problem["revision"]) == (409, vote["revision"])
    headers = {"Idempotency-Key": "drained"}
    first = await fleet.decide_on_vm(SCOPE, "vm-0", vote, headers)
    assert (first[0], first[1]["state"]) == (202, "granted")
    assert await fleet.decide_on_vm(SCOPE, "vm-0", vote, headers) == first


async def test_each_way_to_vote_gives_one_start_request_in_the_scope(
    own_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same EventIds are in another scope, where nobody votes."""
    monkeypatch.setattr(start_orders, "RESTART_PAUSE", 0.0)  # no agent is restarted here
    scopes, hub = {SCOPE: VMS, OTHER: ["vm-0"]}, hub_with_all_ways(own_broker.port)
    async with running_fleet(own_broker, tmp_path, scopes, hub=hub) as fleet:
        ways = ("http", "callback", "amqp", "vm")
        for scope in fleet.azures.values():
            for way in ways:
                scope.schedule(Plan(id=f"E-{way}", resources=("vm-0",)))
        # Each of both scopes has told it.
        await eventually(lambda: all(len(fleet.told(f"E-{way}")) == 2 for way in ways))
        status, _ = await fleet.approve(SCOPE, "E-http")
        assert status == 202
        await vote_by_callback(fleet, await fleet.vote_for(SCOPE, "E-callback"))
        await vote_over_amqp(fleet, await fleet.vote_for(SCOPE, "E-amqp"))
        await vote_on_vm(fleet, await fleet.vote_for(SCOPE, "E-vm"))
        end = "startrequest.accepted"
        await eventually(lambda: all(end in fleet.told(f"E-{way}") for way in ways))
        posts = sorted(call.event_ids for call in fleet.azure.start_requests)
        assert posts == sorted((f"E-{way}",) for way in ways)
        assert {call.vm for call in fleet.azure.start_requests} <= {"vm-1", "vm-2"}
        assert fleet.azures[OTHER].start_requests == ()
