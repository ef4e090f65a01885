"""Orders of anybody but the hub: an agent obeys none of them, whatever way they come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import aio_pika
import pytest

from relay.app import start_relay
from relay.clock import SystemClock
from relay.events.cloudevent import CloudEvent
from relay.fleet.agent import start_orders
from relay.fleet.messages import StartOrder
from relay.fleet.routing import command_key
from relay.fleet.topology import command_exchange_name
from relay.simulator import VM, Plan, Setup, Simulator
from tests.eventually import eventually
from tests.fleet.hub_side import (
    HUB,
    SCOPE,
    STRANGER,
    HubSide,
    agent_config,
    hub_side,
    make_order,
)
from tests.rabbitmq import Broker

KEY = command_key(SCOPE, "vm-0")


@dataclass
class Target:
    """An agent that would carry out an order of the hub for the event that it sees."""

    hub: HubSide
    azure: Simulator
    revision: str
    event_id: str

    def order(self) -> StartOrder:
        """Return an order that the agent would carry out, if it came from the hub."""
        return make_order(self.event_id, self.revision)

    def body(self) -> bytes:
        """Return the body of such an order."""
        return self.order().to_event(HUB, datetime.now(UTC)).body

    async def assert_unmoved(self, orders: int = 0) -> None:
        """Assert that nothing that was sent so far was obeyed, and that the hub still is.

        Messages to the agent arrive in order, so a result shows what became of those before it.
        """
        assert len(self.hub.results) == orders
        order = self.order()
        await self.hub.send(order)
        await eventually(lambda: len(self.hub.results) > orders)
        (result,) = self.hub.results[orders:]
        assert (result.grant, result.result) == (order.grant, "accepted")
        assert len(self.azure.start_requests) == orders + 1


@pytest.fixture
async def target(
    own_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Target]:
    """A running agent that has seen an event."""
    # Nothing here restarts an agent, so it need not wait before it obeys.
    monkeypatch.setattr(start_orders, "RESTART_PAUSE", 0.0)
    async with (
        hub_side(own_broker) as hub,
        Simulator(Setup(vms=(VM("vm-0"),), rate_limit=None)) as azure,
    ):
        event = azure.schedule(Plan(resources=("vm-0",)))
        config = agent_config(
            own_broker,
            hub.exchange,
            source={"url": azure.url, "interval": "500ms"},
            store={"path": str(tmp_path / "relay.db")},
        )
        async with start_relay(config, SystemClock()):
            (reported,) = await hub.wait_for(CloudEvent)
            await hub.wait_for_listener()
            yield Target(hub, azure, reported.data["revision"], event.event_id)


async def test_a_user_with_every_right_is_not_the_hub(target: Target) -> None:
    await target.hub.publish(target.body(), KEY, user=STRANGER)
    await target.assert_unmoved()


@asynccontextmanager
async def connected(broker: Broker, user: str) -> AsyncIterator[aio_pika.abc.AbstractChannel]:
    """Open a channel of a user."""
    connection = await aio_pika.connect(broker.amqp_url(user))
    async with connection:
        yield await connection.channel()


async def test_an_order_of_the_hub_that_somebody_replays_as_a_dead_letter_is_refused(
    target: Target,
) -> None:
    """A dead letter keeps the ``user_id`` of its first sender."""
    commands = command_exchange_name(target.hub.exchange)
    async with connected(target.hub.broker, STRANGER) as channel:
        trap = await channel.declare_queue(
            exclusive=True,
            arguments={
                "x-dead-letter-exchange": commands,
                "x-dead-letter-routing-key": KEY,
                "x-message-ttl": 0,
            },
        )
        await trap.bind(commands, command_key(SCOPE, "vm-1"))
        # An order of the hub to another agent is copied to this one.
        await target.hub.publish(target.body(), command_key(SCOPE, "vm-1"))
        await eventually(lambda: len(target.hub.reports) >= 1)
    await target.assert_unmoved()
