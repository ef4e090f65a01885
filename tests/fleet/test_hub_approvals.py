"""Approvals over a real RabbitMQ at a hub: one queue for all scopes, named by the routing key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relay.app import RunningRelay, start_relay
from relay.clock import SystemClock
from relay.config import Config
from relay.events.build import Origin
from relay.events.model import ScheduledEvent
from relay.ingest import EventSighting, Recorder
from tests.api.running_relay import make_event
from tests.eventually import eventually
from tests.journey.bus import Bus, define_users, unused_exchange
from tests.journey.relay_process import client
from tests.rabbitmq import Broker
from tests.raw_amqp import RefusedError

A, B = "vmss-a-1f0c33ab", "vmss-b-9d2e77c0"
RULE = {"name": "one", "approve": {"votes": 2, "from": ["client:drain", "client:holder"]}}

pytestmark = pytest.mark.asyncio(loop_scope="module")


class HubOnBus:
    """A hub, and the view of a service on the broker."""

    def __init__(self, running: RunningRelay, bus: Bus) -> None:
        self.running, self.bus = running, bus
        self._count = 0

    async def schedule(self, *scopes: str) -> tuple[ScheduledEvent, dict[str, Any]]:
        """Record an event of these scopes; return it, and a decision about it."""
        self._count += 1
        event = make_event(event_id=f"E-{self._count}")
        store, now = self.running.relay.store, SystemClock().now()
        news = [EventSighting(scope, now, event, 1) for scope in scopes]
        recorder = Recorder(Origin("hub", "hub-1"), None, None)
        await store.transact(lambda tx: recorder.record_observations(tx, news, now))
        return event, {
            "eventId": event.event_id,
            "decision": "approve",
            "revision": event.revision,
        }

    async def outcome(self, message_id: str) -> tuple[str, str, str | None]:
        """Return what became of a message: the answer's name, its scope and the refusal."""
        answers: list[dict[str, Any]] = []

        def is_answered() -> bool:
            answers[:] = [
                event for event in self.bus.events if event.get("causationid") == message_id
            ]
            return bool(answers)

        await eventually(is_answered)
        (answer,) = answers
        return answer["type"].split(".", 2)[2], answer["scope"], answer["data"].get("refusal")

    async def votes(self, event: ScheduledEvent) -> dict[str, int]:
        """Return how many votes the event has in each scope."""

        def count(tx: Any) -> dict[str, int]:
            engine = self.running.relay.gate.engine
            found = tx.occurrences.find_occurrences_by_reference(event.event_id)
            return {
                occurrence.scope: engine.status(tx, occurrence, SystemClock().now()).vote_count
                for occurrence in found
            }

        return await self.running.relay.store.read(count)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub(_node: Broker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HubOnBus]:
    """One hub and broker for all tests of this module, which use different events and ids."""
    _node.heal()
    define_users(_node)
    bus = Bus(_node, unused_exchange("hub"))
    async with AsyncExitStack() as stack:
        config = hub_config(bus, tmp_path_factory.mktemp("hub"))
        running = await stack.enter_async_context(start_relay(config, SystemClock()))
        await eventually(lambda: has_consumer(bus), every=0.05)
        await bus.listen(stack)
        yield HubOnBus(running, bus)


def hub_config(bus: Bus, folder: Path) -> Config:
    """A hub that takes approvals from RabbitMQ and sends the answers there."""
    url = bus.broker.amqp_url()
    return Config.model_validate(
        {
            "relay": "hub-1",
            "fleet": {
                "role": "hub",
                "url": url,
                "exchange": bus.exchange,
                "domains": [{"user": "vmss", "scopes": ["vmss-*"]}],
            },
            "store": {"path": str(folder / "hub.db")},
            "sinks": [{"kind": "rabbitmq", "name": "bus", "url": url, "exchange": bus.exchange}],
            "approvals": {"amqp": {"url": url}, "rules": [RULE]},
            "api": {
                "listen": "127.0.0.1:0",
                "clients": [
                    client("drain", amqp_user="drain"),
                    client("holder", key="a-fourth-key-for-tests-only", amqp_user="holder"),
                ],
            },
        }
    )


async def has_consumer(bus: Bus) -> bool:
    """Whether somebody takes messages from the queue of all scopes."""
    rows = await asyncio.to_thread(bus.broker.ctl, "list_queues", "name", "consumers")
    return f"{bus.exchange}.approvals.hub\t1" in rows


async def test_a_right_to_one_scope_gives_no_way_to_another(hub: HubOnBus) -> None:
    """The broker refuses the key, but some versions accept it in a CC header. The hub never."""
    event, decision = await hub.schedule(A, B)
    node, approvals = hub.bus.broker, hub.bus.approvals_exchange
    pattern = f"^approve\\.{A}$"
    await asyncio.to_thread(node.ctl, "set_topic_permissions", "drain", approvals, pattern, "^$")
    try:
        with pytest.raises(RefusedError, match="access to topic"):
            await hub.bus.send(decision, "by key", key=f"approve.{B}")
        try:
            await hub.bus.send(
                decision, "by CC", key=f"approve.{A}", headers={"CC": [f"approve.{B}"]}
            )
        except RefusedError:  # from RabbitMQ 4.1
            await hub.bus.send(decision, "by CC", key=f"approve.{A}")
    finally:
        await asyncio.to_thread(node.ctl, "clear_topic_permissions", "drain", approvals)
    assert await hub.outcome("by CC") == ("approval.recorded.v1", A, None)
    assert await hub.votes(event) == {A: 1, B: 0}
