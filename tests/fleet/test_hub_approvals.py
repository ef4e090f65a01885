"""The consumer of a hub takes the approvals of every scope, each under the key that was checked."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

import aio_pika
import pytest
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from relay.amqp.approval_consumer import ApprovalConsumer
from relay.amqp.approval_message import ApprovalMessage
from relay.amqp.connection import Connection
from relay.amqp.fair_queue import Submission
from relay.amqp.topology import declare_topology
from relay.clock import SystemClock
from relay.fleet.topology import hub_approvals_topology
from tests.background_tasks import BackgroundTasks
from tests.rabbitmq import Broker

WITHIN = 30.0


@dataclass(slots=True)
class RecordingHandler:
    """Takes every message, and notes its scope."""

    scopes: list[str | None] = field(default_factory=list)

    async def blocking_reason(self) -> str | None:
        """Return that messages can be decided."""
        return None

    def read(self, message: ApprovalMessage) -> Submission:
        """Return a vote that is decided at once."""

        async def decide() -> bool:
            self.scopes.append(message.scope)
            return True

        return Submission(user=message.user, decision="approve", event_id="e", decide=decide)


async def test_a_hub_takes_the_approvals_of_all_scopes_from_one_queue(own_broker: Broker) -> None:
    """On RabbitMQ 3.10 a CC header passes. The scope stays that of the key that was checked."""
    exchange = f"relay.test.{secrets.token_hex(6)}"
    connection = Connection(URL(own_broker.amqp_url()), "test")
    await connection.connect()
    async with connection:
        await declare_topology(connection, hub_approvals_topology(exchange), True)
    own_broker.add_user("drain", "p", configure="^$", read="^$")
    own_broker.define(
        {
            "topic_permissions": [
                {
                    "user": "drain",
                    "vhost": "/",
                    "exchange": f"{exchange}.approvals",
                    "write": "^approve\\.vmss-a$",
                    "read": "^$",
                }
            ]
        }
    )
    await publish(own_broker, exchange, "approve.vmss-a")
    with pytest.raises(ChannelAccessRefused):
        await publish(own_broker, exchange, "approve.vmss-b")
    passed = True
    try:
        await publish(own_broker, exchange, "approve.vmss-a", CC=["approve.vmss-b"])
    except ChannelAccessRefused:
        passed = False
    await publish(own_broker, exchange, "approve.vmss-c", user="guest")
    handler = RecordingHandler()
    consumer = ApprovalConsumer(
        urls=lambda: [URL(own_broker.amqp_url())],
        declare=True,
        exchange=exchange,
        scope=None,
        relay="hub",
        handler=handler,
        on_unusable=lambda *_: None,
        clock=SystemClock(),
    )
    async with BackgroundTasks(consumer.run()), asyncio.timeout(WITHIN):
        while len(handler.scopes) < 2 + passed:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.02)
    assert sorted(handler.scopes, key=str) == ["vmss-a"] * (1 + passed) + ["vmss-c"]


async def publish(
    node: Broker, exchange: str, key: str, *, user: str = "drain", **headers: Any
) -> None:
    """Publish an approval, and return when the broker has confirmed it."""
    async with await aio_pika.connect(node.amqp_url(user)) as connection:
        channel = await connection.channel(on_return_raises=True)
        approvals = await channel.get_exchange(f"{exchange}.approvals", ensure=False)
        message = aio_pika.Message(
            b"{}", message_id=secrets.token_hex(4), user_id=user, headers=headers
        )
        await approvals.publish(message, key, timeout=WITHIN)
