"""The connection of the hub to a real RabbitMQ, with a handler of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from relay.clock import SystemClock
from relay.fleet.hub.link import CumulativeAcknowledger, HubLink
from relay.fleet.settings import HubSettings
from relay.fleet.topology import agent_publish_exchange_name
from tests.eventually import eventually
from tests.fleet.hub_side import HUB, HUB_USER, SCOPE, define_users, unused_exchange
from tests.rabbitmq import Broker
from tests.raw_amqp import RawChannel

UNUSABLE, BUG = b"unusable", b"bug"


class Handler:
    """Rejects what is unusable, fails at a bug, and takes everything else."""

    def __init__(self) -> None:
        self.connections = 0
        self.taken: list[bytes] = []
        self.pulses: list[bytes] = []

    def on_broker_connected(self) -> None:
        """The hub hears its agents."""
        self.connections += 1

    def on_broker_disconnected(self) -> None:
        """The hub does not hear its agents any more."""

    def on_broker_connection_failed(self) -> None:
        """The connection could not be made, or was lost."""

    async def take_messages_except_pulses(
        self, messages: Sequence[DeliveredMessage], settlements: CumulativeAcknowledger
    ) -> None:
        """Settle what can be settled before anything is taken, as the hub does."""
        tags = {message.delivery_tag or 0: message.body for message in messages}
        for tag, body in tags.items():
            if body == UNUSABLE:
                settlements.dead_letter(tag)
        if BUG in tags.values():
            raise RuntimeError("a bug")
        for tag, body in tags.items():
            if body != UNUSABLE:
                self.taken.append(body)
                settlements.acknowledge(tag)

    async def take_pulses(self, messages: Sequence[DeliveredMessage]) -> None:
        """Take what is no bug."""
        bodies = [message.body for message in messages]
        if BUG in bodies:
            raise RuntimeError("a bug")
        self.pulses += bodies


@asynccontextmanager
async def connected(broker: Broker, exchange: str, handler: Handler) -> AsyncIterator[HubLink]:
    """Run a link until the end of the block, from when it is connected."""
    settings = HubSettings.model_validate(
        {
            "role": "hub",
            "url": broker.amqp_url(HUB_USER),
            "exchange": exchange,
            "domains": [{"user": "vmss-a", "scopes": ["vmss-a-*"]}],
        }
    )
    link = HubLink(settings, HUB, handler, SystemClock())
    task = asyncio.create_task(link.run())
    try:
        await eventually(lambda: handler.connections > 0)
        yield link
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def publish(broker: Broker, exchange: str, kind: str, *bodies: bytes) -> None:
    """Publish messages of an agent, one after the other."""
    async with RawChannel(broker.amqp_url(HUB_USER)) as channel:
        for body in bodies:
            key, properties = f"{kind}.{SCOPE}.vm-0", Basic.Properties(message_id="m")
            await channel.publish(agent_publish_exchange_name(exchange), key, body, properties)


async def test_a_message_that_meets_a_bug_loses_neither_the_others_nor_the_connection(
    own_broker: Broker,
) -> None:
    await asyncio.to_thread(own_broker.start)
    exchange = unused_exchange()
    await asyncio.to_thread(define_users, own_broker, exchange)
    async with connected(own_broker, exchange, Handler()):
        pass  # the queues are there
    await publish(own_broker, exchange, "vote", b"1", UNUSABLE, b"2", BUG, b"3")
    handler = Handler()
    async with connected(own_broker, exchange, handler):
        await eventually(lambda: b"3" in handler.taken)
        await publish(own_broker, exchange, "vote", b"4")
        await eventually(lambda: b"4" in handler.taken)
    assert handler.taken == [b"1", b"2", b"3", b"4"]
    assert handler.connections == 1


async def test_a_pulse_that_meets_a_bug_loses_no_other_pulse(own_broker: Broker) -> None:
    await asyncio.to_thread(own_broker.start)
    exchange = unused_exchange()
    await asyncio.to_thread(define_users, own_broker, exchange)
    async with connected(own_broker, exchange, Handler()):
        pass  # the queues are there
    await publish(own_broker, exchange, "pulse", b"1", BUG, b"2")
    handler = Handler()
    async with connected(own_broker, exchange, handler):
        await eventually(lambda: handler.pulses == [b"1", b"2"])
