"""Approvals that come over RabbitMQ, from publish to StartRequest, and those that must not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aio_pika
import orjson
import pytest

from relay.simulator import VM, Event, Plan, Setup, Simulator
from tests.journey.process import RelayProcess, client, eventually, name_of, relay
from tests.rabbitmq import Broker

EXCHANGE = "journey.approvals"
SCOPE = "journey"


@dataclass(slots=True)
class Bus:
    """What a service on the queue has: a channel of its own user, and everything that the relay says."""

    broker: Broker
    said: list[dict[str, Any]] = field(default_factory=list)

    async def send(self, body: bytes, *, user: str = "drain", vouched: bool = True, **properties: Any) -> None:
        """Publish to the approvals exchange as this user."""
        confirms = "message_id" in properties  # with confirms the library makes up an id
        async with (
            await aio_pika.connect(self.broker.amqp_url(user)) as connection,
            connection.channel(publisher_confirms=confirms) as channel,
        ):
            exchange = await channel.get_exchange(f"{EXCHANGE}.approvals", ensure=False)
            message = aio_pika.Message(body, user_id=user if vouched else None, delivery_mode=2, **properties)
            await exchange.publish(message, f"approve.{SCOPE}")

    async def depth(self, queue: str) -> int:
        """How many messages wait in a queue."""
        async with await aio_pika.connect(self.broker.amqp_url()) as connection, connection.channel() as channel:
            declared = await channel.declare_queue(queue, passive=True)
            return declared.declaration_result.message_count or 0

    def told(self, name: str) -> list[dict[str, Any]]:
        """The events of one type that the relay said."""
        return [event for event in self.said if name_of(event) == name]


@asynccontextmanager
async def stage(broker: Broker, directory: Path, **approvals: Any) -> AsyncIterator[tuple[RelayProcess, Simulator, Bus]]:
    """A relay that takes approvals from RabbitMQ, and a consumer of all that it says."""
    for user in ("drain", "stranger"):
        broker.add_user(user, user)
    bus = Bus(broker)
    url = broker.amqp_url()
    document = {
        "scope": SCOPE,
        "relay": "vm-0",
        "sinks": [{"kind": "rabbitmq", "name": "bus", "url": url, "exchange": EXCHANGE}],
        "approvals": {
            "amqp": {"url": url},
            "rules": [{"name": "reboots", "match": {"event_type": ["Reboot"]}, "approve": {"votes": 1, "from": ["client:drain"]}}],
            **approvals,
        },
        "api": {"clients": [client("drain", amqp_user="drain", resources=["vm-*"])]},
    }
    async with Simulator(Setup(vms=(VM("vm-0"),))) as sim, relay(directory, {**document, "source": {"url": sim.url}}) as process:
        await process.start()
        await eventually(lambda: "approvals over AMQP: connected" in process.log)
        async with await aio_pika.connect(url) as connection, connection.channel() as channel:
            queue = await channel.declare_queue(exclusive=True)
            await queue.bind(EXCHANGE, "#")

            async def note(message: aio_pika.abc.AbstractIncomingMessage) -> None:
                bus.said.append(orjson.loads(message.body))

            await queue.consume(note, no_ack=True)
            yield process, sim, bus


async def _scheduled(bus: Bus, sim: Simulator, **plan: Any) -> tuple[Event, dict[str, Any]]:
    event = sim.schedule(Plan(**{"type": "Reboot", "resources": ("vm-0",), "lasts": None, **plan}))
    await eventually(lambda: any(one["subject"] == event.event_id for one in bus.told("event.scheduled")))
    seen = next(one["data"] for one in bus.told("event.scheduled") if one["subject"] == event.event_id)
    return event, {"eventId": seen["eventId"], "decision": "approve", "revision": seen["revision"]}


async def test_a_message_of_the_right_user_starts_the_event_once_and_is_answered(own_broker: Broker, tmp_path: Path) -> None:
    """Bare and as a CloudEvent, and again; the answers name the message as their cause."""
    async with stage(own_broker, tmp_path) as (_, sim, bus):
        event, wish = await _scheduled(bus, sim)
        cloud = {"specversion": "1.0", "id": "1", "type": "drained", "source": "/db", "data": wish}
        for _ in range(2):
            await bus.send(orjson.dumps(cloud), message_id="m-1")
        await sim.started(event, within=15)
        await eventually(lambda: bool(bus.told("startrequest.accepted")))
        assert len(sim.start_requests) == 1
        assert len(bus.told("approval.recorded")) == len(bus.told("approval.granted")) == 1
        for name in ("approval.recorded", "approval.granted", "startrequest.accepted"):
            assert [one["causationid"] for one in bus.told(name)] == ["m-1"]
        assert bus.told("approval.recorded")[0]["data"]["principal"] == "client:drain"
        assert await bus.depth(f"{EXCHANGE}.approvals.{SCOPE}") == 0


@pytest.mark.parametrize(
    ("body", "properties"),
    [
        (None, {"vouched": False, "message_id": "m"}),
        (None, {"user": "stranger", "message_id": "m"}),
        (None, {}),
        (b"no json", {"message_id": "m"}),
        (b'{"eventId": "x", "decision": "approve"}', {"message_id": "m"}),
        (b"[" * 70_000, {"message_id": "m"}),
    ],
    ids=["no user_id", "a stranger", "no message_id", "not JSON", "no revision", "too large"],
)
async def test_what_cannot_be_used_is_dead_lettered_and_is_no_event(
    own_broker: Broker, tmp_path: Path, body: bytes | None, properties: dict[str, Any]
) -> None:
    """It starts nothing and stops nobody behind it."""
    async with stage(own_broker, tmp_path) as (_, sim, bus):
        event, wish = await _scheduled(bus, sim)
        before = await bus.depth(f"{EXCHANGE}.dead")
        await bus.send(orjson.dumps(wish) if body is None else body, **properties)
        await eventually(lambda: _deeper(bus, before), every=0.2)
        assert not [one for one in bus.said if name_of(one).startswith("approval.")]
        assert not sim.start_requests
        await bus.send(orjson.dumps(wish), message_id="good")
        await sim.started(event, within=15)


async def _deeper(bus: Bus, before: int) -> bool:
    return await bus.depth(f"{EXCHANGE}.dead") == before + 1


async def test_what_is_refused_to_a_known_client_is_acknowledged_and_told(own_broker: Broker, tmp_path: Path) -> None:
    """For a machine that is not its own; the refusal names the message."""
    async with stage(own_broker, tmp_path) as (_, sim, bus):
        _, wish = await _scheduled(bus, sim, resources=("vm-0", "db-7"))
        dead = await bus.depth(f"{EXCHANGE}.dead")
        await bus.send(orjson.dumps(wish), message_id="m-1")
        await eventually(lambda: bool(bus.told("approval.refused")))
        refused = bus.told("approval.refused")[0]
        assert (refused["causationid"], refused["data"]["principal"]) == ("m-1", "client:drain")
        assert await bus.depth(f"{EXCHANGE}.approvals.{SCOPE}") == 0
        assert await bus.depth(f"{EXCHANGE}.dead") == dead
        assert not sim.start_requests


async def test_while_approvals_are_off_messages_wait(own_broker: Broker, tmp_path: Path) -> None:
    """Turned on, the waiting one counts."""
    async with stage(own_broker, tmp_path) as (process, sim, bus):
        event, wish = await _scheduled(bus, sim)
        assert (await process.call("PUT", "/v1/approvals/mode", {"mode": "off"}))[0] == 200
        await bus.send(orjson.dumps(wish), message_id="m-1")
        await asyncio.sleep(2.5)  # nothing happens: there is no sign to wait for
        assert not [one for one in bus.said if name_of(one).startswith("approval.")]
        assert (await process.call("PUT", "/v1/approvals/mode", {"mode": "on"}))[0] == 200
        await sim.started(event, within=15)
        assert len(bus.told("approval.recorded")) == 1


async def test_a_killed_broker_costs_no_approval(own_broker: Broker, tmp_path: Path) -> None:
    """The relay comes back to its queue by itself."""
    async with stage(own_broker, tmp_path) as (_, sim, bus):
        event, wish = await _scheduled(bus, sim)
        own_broker.kill()
        own_broker.start()
        await bus.send(orjson.dumps(wish), message_id="m-1")
        await sim.started(event, within=25)
