"""Loops that send the same events to the same receivers, without storage, order or retries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from datetime import datetime

import aio_pika

from bench.receivers import EXCHANGE
from relay.amqp.event_message import routing_key
from relay.events.cloudevent import CONTENT_TYPE, CloudEvent
from relay.net.http import open_session
from relay.signature import sign
from relay.sinks.rabbitmq import RabbitMQ
from relay.sinks.webhook import Webhook
from tests.journey.relay_process import SECRET

TIMEOUT = 15.0
"""The relay's own client has a timeout too, and it costs time."""


async def post_all(url: str, events: Sequence[CloudEvent], endpoints: int) -> None:
    """POST every signed event to each endpoint, with as many open requests as the relay has."""
    async with asyncio.TaskGroup() as group:
        for _ in range(endpoints):
            group.create_task(_post_to_one(url, iter(events)))


async def _post_to_one(url: str, events: Iterator[CloudEvent]) -> None:
    async with open_session() as session:

        async def client() -> None:
            for event in events:
                now = int(time.time())
                headers = {
                    "Content-Type": CONTENT_TYPE,
                    "webhook-id": event.id,
                    "webhook-timestamp": str(now),
                    "webhook-signature": sign([SECRET], event.id, now, event.body),
                }
                async with (
                    asyncio.timeout(TIMEOUT),
                    session.post(url, data=event.body, headers=headers) as response,
                ):
                    await response.read()

        async with asyncio.TaskGroup() as group:
            for _ in range(Webhook.concurrency):
                group.create_task(client())


async def publish_all(amqp_url: str, events: Sequence[CloudEvent]) -> None:
    """Publish every event with confirmation, with as many open publishes as the relay has."""
    connection = await aio_pika.connect(amqp_url)
    async with connection, connection.channel(on_return_raises=True) as channel:
        exchange = await channel.get_exchange(EXCHANGE, ensure=False)
        remaining = iter(events)

        async def publisher() -> None:
            for event in remaining:
                await exchange.publish(_message(event), routing_key(event), mandatory=True)

        async with asyncio.TaskGroup() as group:
            for _ in range(RabbitMQ.concurrency):
                group.create_task(publisher())


def _message(event: CloudEvent) -> aio_pika.Message:
    return aio_pika.Message(
        event.body,
        content_type=CONTENT_TYPE,
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        message_id=event.id,
        correlation_id=event.attributes["correlationid"],
        type=event.type,
        app_id="imds-relay",
        timestamp=datetime.fromisoformat(event.attributes["time"]),
        headers={f"ce-{name}": value for name, value in event.attributes.items()},
    )
