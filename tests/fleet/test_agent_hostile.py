"""Orders of anybody but the hub: an agent obeys none of them, whatever way they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aio_pika
import orjson
import pytest

from relay.app import start_relay
from relay.clock import SystemClock
from relay.events.cloudevent import CloudEvent
from relay.fleet.agent import start_orders
from relay.fleet.messages import StartOrder
from relay.fleet.routing import command_key, hub_state_key
from relay.fleet.topology import command_exchange_name
from relay.simulator import VM, Plan, Setup, Simulator
from tests.eventually import eventually
from tests.fleet.hub_side import (
    AGENT_USER,
    HUB,
    HUB_USER,
    SCOPE,
    STRANGER,
    HubSide,
    agent_config,
    hub_side,
    make_order,
)
from tests.rabbitmq import Broker
from tests.raw_amqp import RefusedError

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


async def test_nobody_can_use_the_name_of_the_hub(target: Target) -> None:
    with pytest.raises(RefusedError, match="user_id"):
        await target.hub.publish(target.body(), KEY, user=STRANGER, user_id=HUB_USER)
    await target.hub.publish(target.body(), KEY, user=STRANGER, user_id=None)
    await target.assert_unmoved()


async def test_an_agent_cannot_order_another(target: Target) -> None:
    with pytest.raises(RefusedError, match="ACCESS_REFUSED"):
        await target.hub.publish(target.body(), KEY, user=AGENT_USER)
    await target.assert_unmoved()


@asynccontextmanager
async def connected(broker: Broker, user: str) -> AsyncIterator[aio_pika.abc.AbstractChannel]:
    """Open a channel of a user."""
    connection = await aio_pika.connect(broker.amqp_url(user))
    async with connection:
        yield await connection.channel()


async def queue_of_agent(broker: Broker) -> str:
    """Return the name of the agent's queue."""
    listed = await asyncio.to_thread(broker.ctl, "list_queues", "name")
    (name,) = [line for line in listed.splitlines() if line.startswith("amq.gen-")]
    return name


async def test_a_message_that_is_put_into_the_queue_of_an_agent_is_refused(
    target: Target,
) -> None:
    """The default exchange leads to every queue. Here even the hub's own user sends it."""
    queue = await queue_of_agent(target.hub.broker)
    for user in (HUB_USER, STRANGER, AGENT_USER):
        try:
            await target.hub.publish(target.body(), queue, user=user, exchange="")
        except RefusedError:
            assert user == AGENT_USER
    await target.assert_unmoved()


async def test_another_exchange_that_is_bound_to_the_queue_gives_no_orders(
    target: Target,
) -> None:
    """A queue is exclusive, so only its own connection can bind it. An exchange can be bound."""
    commands = command_exchange_name(target.hub.exchange)
    async with connected(target.hub.broker, STRANGER) as channel:
        detour = await channel.declare_exchange("detour", "topic", auto_delete=True)
        target_exchange = await channel.get_exchange(commands, ensure=False)
        await target_exchange.bind(detour, "#")
        await target.hub.publish(target.body(), KEY, user=HUB_USER, exchange="detour")
        await target_exchange.unbind(detour, "#")
    await target.assert_unmoved()


@pytest.mark.parametrize("header", ["CC", "BCC"])
async def test_a_message_of_the_hub_for_others_with_a_copy_for_this_agent_is_refused(
    target: Target, header: str
) -> None:
    await target.hub.publish(target.body(), command_key(SCOPE, "vm-1"), headers={header: [KEY]})
    await target.hub.publish(target.body(), hub_state_key(SCOPE))
    await target.assert_unmoved()


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


async def test_messages_of_the_hub_that_make_no_sense_change_nothing(target: Target) -> None:
    order = orjson.loads(target.body())
    wrong: list[Any] = [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"x" * 2_000_000,
        orjson.dumps({**order, "type": "io.imdsrelay.fleet.start-order.v2"}),
        orjson.dumps({**order, "data": {**order["data"], "grant": "1"}}),
        orjson.dumps({**order, "data": {**order["data"], "deadline": "soon"}}),
        orjson.dumps({**order, "data": {**order["data"], "deadline": "9999-12-31T23:59:59Z"}}),
        orjson.dumps({**order, "data": {**order["data"], "revision": ""}}),
        orjson.dumps({**order, "type": "io.imdsrelay.fleet.start-result.v1"}),
    ]
    for body in wrong:
        await target.hub.publish(body, KEY)
    await target.assert_unmoved()


async def test_a_deadline_that_is_minutes_away_is_refused(target: Target) -> None:
    order = replace(target.order(), deadline=datetime.now(UTC) + timedelta(minutes=10))
    await target.hub.send(order)
    await eventually(lambda: len(target.hub.results) == 1)
    assert target.hub.results[0].result == "stale"
    assert target.azure.start_requests == ()


async def test_the_rights_of_an_agent_let_it_hear_no_other_scope(target: Target) -> None:
    """Its queue can be bound to nothing but the keys of its trust domain."""
    commands = command_exchange_name(target.hub.exchange)
    for key in ("#", "to.#", "scope.vmss-b-1f0c33ab", "to.vmss-b-1f0c33ab.vm-0"):
        async with connected(target.hub.broker, AGENT_USER) as channel:
            queue = await channel.declare_queue(exclusive=True)
            with pytest.raises(aio_pika.exceptions.ChannelClosed, match="ACCESS_REFUSED"):
                await queue.bind(commands, key)
