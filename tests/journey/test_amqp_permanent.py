"""Permanent refusals of the broker: a dead letter with a remedy, and no effect on others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aio_pika.abc import AbstractQueue
from yarl import URL

from relay.amqp.connection import GuardedConnection
from relay.app import start_relay
from relay.clock import SystemClock
from relay.config import Config
from relay.simulator import VM, Plan, Setup, Simulator
from tests.eventually import eventually
from tests.journey.bus import unused_exchange
from tests.journey.relay_process import KEY, client
from tests.rabbitmq import Broker

WRITER = "writer"
"""A user who may do what a test says."""


@dataclass(slots=True)
class Told:
    """A relay with two sinks on one broker, `bus` and `other`, and what its operator sees."""

    sim: Simulator
    session: aiohttp.ClientSession
    exchange: str

    async def happens(self, **plan: Any) -> str:
        """A started event has no notice left, so a slow failure becomes a dead letter at once."""
        return self.sim.schedule(
            Plan(resources=("vm-0",), started=True, lasts=None, **plan)
        ).event_id

    async def listed(self, what: str, event_id: str) -> list[dict[str, Any]]:
        """The deliveries, or dead letters, of the sink `bus` about an event."""
        async with self.session.get(f"/v1/{what}") as response:
            items = (await response.json())["items"]
        return [item for item in items if (item["sink"], item["eventId"]) == ("bus", event_id)]

    async def parked(self, event_id: str) -> dict[str, Any]:
        """Its dead letter, waited for."""
        items_found: list[dict[str, Any]] = []

        async def session() -> bool:
            items_found[:] = await self.listed("dead-letters", event_id)
            return bool(items_found)

        await eventually(session, every=0.05)
        return items_found[0]

    async def delivered(self, event_id: str) -> dict[str, Any]:
        """Its delivery, waited for."""
        items_found: list[dict[str, Any]] = []

        async def session() -> bool:
            items_found[:] = [
                item
                for item in await self.listed("deliveries", event_id)
                if item["state"] == "delivered"
            ]
            return bool(items_found)

        await eventually(session, every=0.05)
        return items_found[0]

    async def again(self, dead_letter: dict[str, Any]) -> None:
        """Send a dead letter once more."""
        async with self.session.post(f"/v1/dead-letters/{dead_letter['id']}/redeliver") as response:
            assert response.status == 202


@asynccontextmanager
async def telling(
    broker: Broker, directory: Path, user: str = "guest", **bus: Any
) -> AsyncIterator[Told]:
    """A relay, in this process; ``bus``: more of the section of that sink."""
    exchange = unused_exchange("permanent")
    async with Simulator(Setup(vms=(VM("vm-0"),))) as sim:
        shared = {"kind": "rabbitmq", "timeout": "5s"}
        document = {
            "scope": "journey",
            "source": {"url": sim.url, "interval": "500ms"},
            "store": {"path": str(directory / "relay.db")},
            "sinks": [
                {
                    **shared,
                    "name": "bus",
                    "url": broker.amqp_url(user),
                    "exchange": exchange,
                    **bus,
                },
                {
                    **shared,
                    "name": "other",
                    "url": broker.amqp_url(),
                    "exchange": f"{exchange}.other",
                },
            ],
            "api": {"listen": "127.0.0.1:0", "clients": [client()]},
        }
        async with start_relay(Config.model_validate(document), SystemClock()) as running:
            base, headers = (
                f"http://127.0.0.1:{running.api_port}",
                {"Authorization": f"Bearer {KEY}"},
            )
            async with aiohttp.ClientSession(base, headers=headers) as session:
                yield Told(sim, session, exchange)


@asynccontextmanager
async def queue_of(broker: Broker, exchange: str) -> AsyncIterator[AbstractQueue]:
    """A queue that gets all of an exchange, which is made: durable, topic, without any argument."""
    connection = GuardedConnection(URL(broker.amqp_url()), "test")
    await connection.connect()
    async with connection, connection.channel() as channel:
        await channel.declare_exchange(exchange, "topic", durable=True)
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(exchange, "#")
        yield queue


@pytest.mark.parametrize(
    ("rights", "status", "words"),
    [
        ({"write": "^$"}, 403, ("access to exchange '{}'", "grant the user write on the exchange")),
        ({"write": ".*"}, 404, ("NOT_FOUND - no exchange '{}'", "make it, or set declare: true")),
    ],
    ids=["no right", "no exchange"],
)
async def test_what_somebody_must_mend_is_a_dead_letter_that_says_so_and_goes_out_when_it_is_mended(
    own_broker: Broker, tmp_path: Path, rights: dict[str, str], status: int, words: tuple[str, str]
) -> None:
    await asyncio.to_thread(
        own_broker.add_user, WRITER, "hunter2", **{"configure": "^$", "read": "^$", **rights}
    )
    async with telling(own_broker, tmp_path, WRITER, declare=False) as relay:
        first, second = [await relay.happens() for _ in range(2)]
        dead_letters = [await relay.parked(event_id) for event_id in (first, second)]
        for dead_letter in dead_letters:
            assert dead_letter["lastStatus"] == status
            assert all(word.format(relay.exchange) in dead_letter["reason"] for word in words)
            assert "hunter2" not in dead_letter["reason"]
        await asyncio.to_thread(
            own_broker.set_permissions, WRITER, configure="^$", read="^$", write=".*"
        )
        async with queue_of(own_broker, relay.exchange) as queue:
            for dead_letter in dead_letters:
                await relay.again(dead_letter)
                await relay.delivered(dead_letter["eventId"])
            messages = [await queue.get(timeout=60, no_ack=True) for _ in dead_letters]
            assert [message.correlation_id for message in messages] == [first, second]


async def test_a_message_that_is_too_large_is_a_dead_letter_and_its_neighbours_arrive(
    own_broker: Broker, tmp_path: Path
) -> None:
    """The broker closes the channel for it, and whatever else is under way on it is sent again."""
    limit = (  # the first is for older versions of RabbitMQ, the second for newer ones
        "application:set_env(rabbit, max_message_size, {0}), "
        "persistent_term:put(max_message_size, {0})."
    )
    await asyncio.to_thread(own_broker.evaluate, limit.format(10_000))
    try:
        async with telling(own_broker, tmp_path) as relay:
            large, small = (
                await relay.happens(description="x" * 20_000),
                [await relay.happens() for _ in range(20)],
            )
            dead_letter = await relay.parked(large)
            assert dead_letter["lastStatus"] == 406
            assert (
                dead_letter["attempts"] <= 3
            )  # it may be sent again first, with the neighbours of another
            assert "the broker takes no message of this size" in dead_letter["reason"]
            for event_id in small:
                assert (await relay.delivered(event_id))["state"] == "delivered"
                assert not await relay.listed("dead-letters", event_id)
    finally:
        await asyncio.to_thread(own_broker.evaluate, limit.format(134_217_728))


async def test_what_no_queue_wants_is_delivered_with_the_brokers_number(
    own_broker: Broker, tmp_path: Path
) -> None:
    """An exchange that others made, without an alternate exchange.

    See docs/protocol.md#the-alternate-exchange.
    """
    async with (
        telling(own_broker, tmp_path, declare=False) as relay,
        queue_of(own_broker, relay.exchange) as queue,
    ):
        await queue.unbind(relay.exchange, "#")
        delivery = await relay.delivered(await relay.happens())
        assert (delivery["lastStatus"], delivery["attempts"]) == (312, 1)
        async with relay.session.get("/metrics") as response:
            assert (
                'imds_relay_sink_tries_total{kind="rabbitmq",outcome="delivered",'
                'sink="bus",status="312"} 1.0'
            ) in await response.text()
        await queue.bind(relay.exchange, "#")
        assert (await relay.delivered(await relay.happens()))["lastStatus"] is None
