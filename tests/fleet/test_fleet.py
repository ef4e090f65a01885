"""A whole fleet: agents die, lag behind or see another document, and the hub tells one story."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import aio_pika
import aiohttp
import orjson
import pytest

from relay.api.metrics import read_metrics
from relay.app import start_relay
from relay.clock import SystemClock
from relay.fleet.agent import start_orders
from relay.fleet.hub import link, merge
from relay.fleet.routing import report_queue_name
from relay.simulator import Plan, Setup
from tests.eventually import eventually
from tests.fleet.hub_side import HUB_USER, STRANGER
from tests.fleet.running_fleet import AUTOMATIC, RunningFleet, one_vote, running_fleet
from tests.journey.relay_process import CLIENT_SECRET, client, inbox, signed_headers
from tests.rabbitmq import Broker
from tests.store.conftest import SmallDisk, small_disk

SCOPE = "vmss-a-1f0c33ab"
OTHER = "vmss-a-2e1d44bc"
WHOLE_STORY = ["event.scheduled", "event.started", "event.ended"]


@pytest.fixture(autouse=True)
def agents_obey_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent is restarted here."""
    monkeypatch.setattr(start_orders, "RESTART_PAUSE", 0.0)


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
    own_broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


# --- a vote, wherever it is given, makes one VM of the scope send one StartRequest


def hub_with_all_ways(port: int) -> dict[str, Any]:
    """Return the sections of a hub that takes votes in every way, and of RabbitMQ at this port."""
    sections = one_vote("client:ops", "vm:*/*")
    sections["approvals"]["amqp"] = {"url": f"amqp://{HUB_USER}:{HUB_USER}@127.0.0.1:{port}/"}
    ops = client("ops", secrets=[CLIENT_SECRET], amqp_user=STRANGER)
    return sections | {"api": {"listen": "127.0.0.1:0", "clients": [ops]}}


async def vote_by_callback(fleet: RunningFleet, vote: dict[str, str]) -> None:
    body = orjson.dumps(vote | {"scope": SCOPE})
    headers = {**signed_headers(body), "content-type": "application/json"}
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
    own_broker: Broker, tmp_path: Path
) -> None:
    """The same EventIds are in another scope, where nobody votes."""
    scopes, hub = (
        {SCOPE: ["vm-0", "vm-1", "vm-2"], OTHER: ["vm-0"]},
        hub_with_all_ways(own_broker.port),
    )
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


# --- a hub beside another, and a hub whose disk is full


async def test_a_second_hub_tells_nothing_and_starts_nothing_until_the_first_is_gone(
    own_broker: Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(link, "LOST_AFTER", 1.0)
    async with running_fleet(
        own_broker, tmp_path, {SCOPE: ["vm-0", "vm-1"]}, hub=AUTOMATIC
    ) as fleet:
        second = fleet.hub_config(tmp_path / "second.db")
        async with start_relay(second, SystemClock()) as other:
            await eventually(lambda: "another hub reads" in caplog.text)
            await eventually(lambda: other.relay.source.lost)
            await eventually(lambda: "relay.source-lost" in names(fleet))
            event = fleet.azure.schedule(Plan(resources=("vm-0",)))
            await eventually(lambda: "event.started" in fleet.told(event.event_id))
            ids = [each["id"] for each in fleet.inbox.events]
            assert len(set(ids)) == len(ids)
            assert len(fleet.azure.start_requests) == 1
            assert await other.relay.store.read(lambda tx: tx.occurrences.live_occurrences()) == []
            await fleet.stop_hub()
            await eventually(lambda: not other.relay.source.lost)
            await eventually(lambda: "relay.source-recovered" in names(fleet))


def names(fleet: RunningFleet) -> list[str]:
    return [each["type"].split(".", 2)[2][:-3] for each in fleet.inbox.events]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as made:
        yield made


async def test_a_hub_with_a_full_disk_tells_from_memory_and_approves_nothing(
    own_broker: Broker, tmp_path: Path, disk: SmallDisk
) -> None:
    """Reports are acknowledged when they are on disk. The next start of the hub has the others."""
    scopes = {SCOPE: ["vm-0", "vm-1"]}
    async with running_fleet(own_broker, tmp_path, scopes, hub=one_vote("client:ops")) as fleet:
        await fleet.stop_hub()
        fleet.hub_file = disk.folder / "hub.db"
        await fleet.start_hub()
        azure, first = fleet.azure, await fleet.scheduled("vm-0")
        await fleet.wait_until_reported()
        disk.fill()
        second = azure.schedule(Plan(resources=("vm-1",)))
        azure.start(first)
        await eventually(lambda: fleet.told(first.event_id)[-1] == "event.started")
        await eventually(lambda: fleet.told(second.event_id) == ["event.scheduled"])
        status, _ = await fleet.approve(SCOPE, second.event_id)
        assert status == 503
        assert azure.start_requests == ()
        await fleet.stop_hub()
        waiting = report_queue_name(fleet.exchange)
        # The broker puts back what was not acknowledged when it notices that the hub is gone.
        await eventually(lambda: fleet.count_waiting(waiting), lambda count: count >= 2)
        disk.free()
        await fleet.start_hub()
        await fleet.wait_until_reported()
        await eventually(lambda: fleet.told(second.event_id) != [])
        status, _ = await fleet.approve(SCOPE, second.event_id)
        assert status == 202
        azure.end(first)
        await eventually(lambda: fleet.told(first.event_id)[-1] == "event.ended")
        told = fleet.told(first.event_id)
        assert told == ["event.scheduled", "event.started", "event.ended"]
        await fleet.stop_hub()
        assert await fleet.count_waiting(waiting) == 0
