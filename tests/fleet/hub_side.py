"""The hub as the agents of a fleet see it: real exchanges and queues on a real RabbitMQ.

It decides nothing. A test reads what agents publish, and sends them what a hub sends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from pamqp.commands import Basic

from relay.amqp.topology import declare_topology
from relay.app import RunningRelay, start_relay
from relay.clock import SystemClock
from relay.config import Config
from relay.events.build import Origin
from relay.fleet.messages import Message, Pulse, PulseRequest, StartOrder, StartResult, read_message
from relay.fleet.rabbitmq_definitions import fleet_definitions
from relay.fleet.routing import (
    agent_publish_exchange_name,
    command_exchange_name,
    command_key,
    fleet_topology,
    report_queue_name,
    scope_key,
)
from relay.fleet.settings import HubSettings
from tests.eventually import eventually
from tests.rabbitmq import Broker
from tests.raw_amqp import RawChannel

SCOPE = "vmss-a-1f0c33ab"
AGENT_USER = "vmss-a"
HUB_USER = "imds-hub"
STRANGER = "stranger"
"""A RabbitMQ user with every right, whom agents do not obey."""
HUB = Origin("hub", "hub-0")
_grants = itertools.count(1)
_exchanges = itertools.count(1)
M = TypeVar("M")


def unused_exchange() -> str:
    """Return the name of an exchange that no other test uses."""
    return f"fleet.test.{next(_exchanges)}"


def hub_settings(url: str, exchange: str) -> HubSettings:
    domains = [{"user": AGENT_USER, "scopes": ["vmss-a-*"]}]
    return HubSettings.model_validate(
        {"role": "hub", "url": url, "exchange": exchange, "domains": domains}
    )


def define_users(broker: Broker, exchange: str, *, with_exchanges: bool = True) -> None:
    """Make the users: the hub's, and that of the agents with no more than its rights.

    Without its exchanges nobody has rights on topics: RabbitMQ 4.3 takes none on what is missing.
    """
    settings = hub_settings("amqp://127.0.0.1/", exchange)
    made = fleet_definitions(settings, HUB_USER, "/", {})
    everything = {"vhost": "/", "configure": ".*", "write": ".*", "read": ".*"}
    users = [
        {"name": user, "password": user, "tags": ""} for user in (AGENT_USER, HUB_USER, STRANGER)
    ]
    rights = [each for each in made["permissions"] if each["user"] == AGENT_USER]
    rights += [{"user": user, **everything} for user in (HUB_USER, STRANGER)]
    broker.define({"users": users, "permissions": rights})
    if with_exchanges:
        names = agent_publish_exchange_name(exchange), command_exchange_name(exchange)
        broker.define({"exchanges": [each for each in made["exchanges"] if each["name"] in names]})
        topics = [each for each in made["topic_permissions"] if each["user"] == AGENT_USER]
        broker.define({"topic_permissions": topics})


def agent_document(broker: Broker, exchange: str, **more: Any) -> dict[str, Any]:
    return {
        "scope": SCOPE,
        "relay": "vm-0",
        "fleet": {"role": "agent", "url": broker.amqp_url(AGENT_USER), "exchange": exchange},
        "api": {"listen": "127.0.0.1:0"},
        **more,
    }


@asynccontextmanager
async def running_agent(
    hub: HubSide, url: str, folder: Path, relay: str = "vm-0", **more: Any
) -> AsyncIterator[RunningRelay]:
    """Run an agent that reads the document at a URL. Its state file is in the folder."""
    more |= {"relay": relay, "store": {"path": str(folder / f"{relay}.db")}}
    source = {"url": url, "interval": "500ms"}
    document = agent_document(hub.broker, hub.exchange, source=source, **more)
    async with start_relay(Config.model_validate(document), SystemClock()) as running:
        yield running


async def publish_as(
    broker: Broker, user: str, exchange: str, key: str, body: bytes, **more: Any
) -> None:
    usual = {"message_id": "m", "user_id": user, "content_type": "application/json"}
    async with RawChannel(broker.amqp_url(user)) as channel:
        await channel.publish(exchange, key, body, Basic.Properties(**usual | more))


@dataclass(slots=True)
class Received:
    key: str
    user: str | None
    content: Any
    message: AbstractIncomingMessage


@dataclass(slots=True)
class HubSide:
    """What arrived from agents, and a way to send to them."""

    broker: Broker
    exchange: str
    channel: AbstractChannel
    received: list[Received] = field(default_factory=list)
    """What arrived, in order."""

    @property
    def reports(self) -> list[Received]:
        return [each for each in self.received if not isinstance(each.content, Pulse)]

    @property
    def pulses(self) -> list[Received]:
        return [each for each in self.received if isinstance(each.content, Pulse)]

    def contents(self, kind: type[M]) -> list[M]:
        everything = (received.content for received in self.received)
        return [content for content in everything if isinstance(content, kind)]

    @property
    def results(self) -> list[StartResult]:
        return self.contents(StartResult)

    async def wait_for(self, kind: type[M], count: int = 1) -> list[M]:
        await eventually(lambda: len(self.contents(kind)) >= count, what=f"{count} {kind}")
        return self.contents(kind)

    async def wait_for_listener(self, count: int = 1) -> Pulse:
        """Wait until an agent hears the hub, which its pulse shows."""
        return (await self.wait_for(Pulse, count))[-1]

    async def send(self, message: Message, *, relay: str = "vm-0", scope: str = SCOPE) -> None:
        """Send a message of the hub to one agent; a request for pulses to its scope."""
        event = message.to_event(HUB, datetime.now(UTC))
        key = scope_key(scope) if isinstance(message, PulseRequest) else command_key(scope, relay)
        name = command_exchange_name(self.exchange)
        exchange = await self.channel.get_exchange(name, ensure=False)
        sent = aio_pika.Message(event.body, message_id=event.id, user_id=HUB_USER)
        await exchange.publish(sent, key, mandatory=False)

    async def publish(self, body: bytes, key: str, *, user: str = HUB_USER) -> None:
        exchange = command_exchange_name(self.exchange)
        await publish_as(self.broker, user, exchange, key, body)


def make_order(event_id: str, revision: str, *, seconds: float = 5.0, **changes: Any) -> StartOrder:
    """Return an order with a new grant. Its deadline is ``seconds`` away."""
    fields: dict[str, Any] = {
        "grant": next(_grants),
        "attempt": 1,
        "event_id": event_id,
        "revision": revision,
        "deadline": datetime.now(UTC) + timedelta(seconds=seconds),
    }
    return StartOrder(**{**fields, **changes})


async def carry_out(hub: HubSide, order: StartOrder, relay: str = "vm-0") -> StartResult:
    await hub.send(order, relay=relay)

    def results() -> list[StartResult]:
        return [each for each in hub.results if each.grant == order.grant]

    return (await eventually(results))[0]


async def wait_until_old_enough(hub: HubSide, relay: str = "vm-0") -> None:
    """Wait until the agent carries out orders: not before it has run for a while."""
    await eventually(
        lambda: carry_out(hub, make_order("no-such-event", "none"), relay),
        lambda result: result.result == "changed",
        every=0.5,
    )


@asynccontextmanager
async def hub_side(broker: Broker, exchange: str | None = None) -> AsyncIterator[HubSide]:
    """Make exchanges, queues and users, and receive what agents publish."""
    exchange = exchange or unused_exchange()
    await asyncio.to_thread(broker.start)
    await asyncio.to_thread(define_users, broker, exchange)
    connection = await aio_pika.connect(broker.amqp_url(HUB_USER))
    async with connection:
        await declare_topology(connection, fleet_topology(exchange), declare=True)
        channel = await connection.channel()
        hub = HubSide(broker, exchange, channel)
        queue = await channel.get_queue(report_queue_name(exchange), ensure=False)

        async def keep(message: AbstractIncomingMessage) -> None:
            content = read_message(message.body).content
            key = message.routing_key or ""
            hub.received.append(Received(key, message.user_id, content, message))

        await queue.consume(keep, no_ack=True)
        yield hub
