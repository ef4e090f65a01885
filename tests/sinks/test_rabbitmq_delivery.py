"""Deliveries to a healthy RabbitMQ: what arrives, what is made, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from cloudevents.core.bindings import rabbitmq as oracle

from relay.amqp import publisher
from relay.amqp.connection import MAX_BODY_BYTES
from relay.errors import Deferred, Rejected
from relay.sinks.rabbitmq import sink as sink_module
from relay.sinks.rabbitmq.sink import RabbitMQ
from tests.builders import EVENT_ID, cloudevent
from tests.rabbitmq import Broker
from tests.sinks.rabbitmq_consumer import bound, channel, deferred, delivered, sink, take, waiting

KEY = "event.scheduled.freeze.prod-vmss-a-1f0c33ab"


@asynccontextmanager
async def sink_beside(
    broker: Broker, exchange: str, **fields: Any
) -> AsyncIterator[tuple[RabbitMQ, AbstractChannel]]:
    """A sink, and beside it a channel of somebody who looks after the broker."""
    url = broker.amqp_url()
    async with channel(url) as beside, sink(url, exchange, **fields) as bus:
        yield bus, beside


async def test_a_consumer_gets_the_very_bytes_and_tags(broker: Broker, exchange: str) -> None:
    """The CloudEvents SDK reads them, too."""
    event = cloudevent()
    async with sink_beside(broker, exchange) as (bus, broker_channel):
        await delivered(bus, cloudevent("relay.ping", subject="bus"))  # the exchange is there now
        queue = await bound(broker_channel, exchange)
        assert (await bus.deliver(event)).status is None
        message = await take(queue)
    assert message.body == event.body
    assert message.routing_key == KEY
    assert message.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
    assert message.content_type == "application/cloudevents+json; charset=utf-8"
    assert (message.message_id, message.correlation_id) == (event.id, EVENT_ID)
    assert message.type == event.type
    assert message.app_id == "imds-relay"
    assert message.timestamp is not None
    assert message.timestamp.isoformat() == "2022-04-11T22:11:58+00:00"
    assert message.headers == {f"ce-{name}": value for name, value in event.attributes.items()}
    assert message.reply_to is None
    headers = {name: str(value) for name, value in message.headers.items()}
    as_sdk = oracle.RabbitMQMessage(headers, message.content_type, message.body)
    read = oracle.from_rabbitmq_event(as_sdk)
    assert (read.get_id(), read.get_type(), read.get_subject()) == (event.id, event.type, EVENT_ID)
    assert read.get_data() == event.data
    known = {name for name, value in read.get_attributes().items() if value is not None}
    assert known == set(event.attributes)


# --- messages that no queue wants, or that one does not want


async def test_what_no_queue_wants_waits_as_unrouted(broker: Broker, exchange: str) -> None:
    event = cloudevent()
    async with sink_beside(broker, exchange) as (bus, broker_channel):
        receipt = await delivered(bus, event)
        assert receipt.status is None
        unrouted = await broker_channel.get_queue(f"{exchange}.unrouted")
        message = await take(unrouted)
        assert (message.body, message.routing_key) == (event.body, KEY)


async def test_without_an_unrouted_queue_it_is_returned_delivered_and_told_once_per_key(
    broker: Broker, exchange: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Others made the exchange without it (docs/protocol.md#the-alternate-exchange)."""
    async with sink_beside(broker, exchange, declare=False) as (bus, broker_channel):
        await broker_channel.declare_exchange(exchange, "topic", durable=True)
        first = await delivered(bus, cloudevent())
        second = await bus.deliver(cloudevent(data={"n": 2}))
        other = await bus.deliver(cloudevent(eventtype="Reboot"))
        # It comes back in several frames.
        large = await bus.deliver(cloudevent(data={"description": "x" * 2 * MAX_BODY_BYTES}))
    assert [receipt.status for receipt in (first, second, other, large)] == [312, 312, 312, 312]
    assert first.response == f"NO_ROUTE: no queue is bound for {KEY}"
    warned = [text for text in caplog.messages if "no queue is bound" in text]
    assert len(warned) == 2
    assert KEY in warned[0]
    assert "event.scheduled.reboot." in warned[1]


async def test_a_queue_that_is_full_and_rejects_defers(broker: Broker, exchange: str) -> None:
    """Only Basic.Ack is a confirm (docs/protocol.md#only-basicack-confirms)."""
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    async with sink_beside(broker, exchange) as (bus, broker_channel):
        await delivered(bus, cloudevent("relay.ping", subject="bus"))
        queue = await bound(broker_channel, exchange, arguments=full)
        await bus.deliver(cloudevent())
        late = cloudevent("event.updated")
        error = await deferred(bus, late)
        assert (error.failure, "nack" in error.reason) == ("transient", True)
        await queue.purge()
        assert (await bus.deliver(late)).status is None


# --- what must exist


async def test_false_touches_nothing(broker: Broker, exchange: str) -> None:
    """A missing exchange shows itself with the first event, and is not made."""
    async with sink_beside(broker, exchange, declare=False) as (bus, broker_channel):
        error = await deferred(bus, cloudevent(), f"no exchange '{exchange}'")
        assert (error.failure, error.status) == ("slow", 404)
        assert "set declare: true" in error.reason
        # With these arguments: nobody had made it.
        await broker_channel.declare_exchange(exchange, "topic", durable=True)
        queue = await bound(broker_channel, exchange)
        await delivered(bus, cloudevent())
        assert len(await waiting(queue)) == 1


async def test_an_exchange_that_is_deleted_under_way_is_made_again(
    broker: Broker, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first delivery loses its channel. The next waits for a new channel and exchange."""
    monkeypatch.setattr(publisher, "CONNECTION_WAIT", 10.0)
    async with sink_beside(broker, exchange) as (bus, broker_channel):
        await delivered(bus, cloudevent())
        await broker_channel.exchange_delete(exchange)
        error = await deferred(bus, cloudevent("event.updated"))
        assert (error.failure, "NOT_FOUND" in error.reason) == ("transient", True)
        assert (await bus.deliver(cloudevent("event.updated"))).status is None


# --- rights, on a broker of our own


async def least(own_broker: Broker, *, write: str) -> str:
    """The URL of a user who may write what is said, and nothing else."""
    rights = {"configure": "^$", "write": write, "read": "^$"}
    await asyncio.to_thread(own_broker.add_user, "least", "hunter2", **rights)
    return own_broker.amqp_url("least")


async def test_a_user_who_may_not_declare_is_told_what_to_grant(own_broker: Broker) -> None:
    url = await least(own_broker, write="^refused$")
    async with sink(url, "refused") as bus:
        error = await deferred(bus, cloudevent(), "access to exchange 'refused.unrouted'")
    assert (error.failure, error.status) == ("transient", 403)
    assert "grant the user configure, read and write" in error.reason
    assert "hunter2" not in error.reason


async def test_who_may_not_write_is_told_so_and_can_be_given_the_right(own_broker: Broker) -> None:
    async with sink(own_broker.amqp_url(), "unwritable") as maker:
        await delivered(maker, cloudevent("relay.ping"))
    url = await least(own_broker, write="^$")
    async with sink(url, "unwritable", declare="passive") as bus:
        error = await deferred(bus, cloudevent(), "access to exchange 'unwritable'")
        assert (error.failure, error.status) == ("slow", 403)
        assert "grant the user write" in error.reason
        await least(own_broker, write="^unwritable$")
        await delivered(bus, cloudevent())


async def test_a_topic_that_is_refused_holds_up_its_own_messages_alone(own_broker: Broker) -> None:
    """The broker closes the channel for all. The others are retried, this one is slow."""
    async with sink(own_broker.amqp_url(), "topics") as maker:
        await delivered(maker, cloudevent("relay.ping"))
    url = await least(own_broker, write="^topics$")
    permit = ("set_topic_permissions", "least", "topics")
    await asyncio.to_thread(own_broker.ctl, *permit, "^event\\.scheduled\\.freeze\\.", "^$")
    foreign, own = cloudevent(eventtype="Reboot"), [cloudevent(data={"n": n}) for n in range(20)]
    async with sink(url, "topics", declare="passive") as bus:
        await delivered(bus, own[0])
        outcomes = await asyncio.gather(
            bus.deliver(foreign), *map(bus.deliver, own), return_exceptions=True
        )
        refused = outcomes[0]
        assert isinstance(refused, Deferred)
        assert (refused.failure, refused.status) == ("slow", 403)
        topic = "event.scheduled.reboot.prod-vmss-a-1f0c33ab"
        assert f"access to topic '{topic}' in exchange 'topics'" in refused.reason
        assert "grant the user write on the exchange, and on the topic" in refused.reason
        others = {getattr(outcome, "failure", None) for outcome in outcomes[1:]}
        assert others <= {"transient", None}
        for event in own:
            await delivered(bus, event)
        await asyncio.to_thread(own_broker.ctl, *permit, ".*", "^$")
        await delivered(bus, foreign)


async def test_the_neighbours_of_a_bad_message_are_only_tried_again(own_broker: Broker) -> None:
    """Only what is permanent for this message is Rejected, and recovery is quick."""
    bad = cloudevent(data={"description": "x" * 5000})
    good = [cloudevent(data={"n": n}) for n in range(20)]
    limit = (  # the first is for older versions of RabbitMQ, the second for newer ones
        "application:set_env(rabbit, max_message_size, {0}), "
        "persistent_term:put(max_message_size, {0})."
    )
    await asyncio.to_thread(own_broker.evaluate, limit.format(2000))
    try:
        async with sink(own_broker.amqp_url(), "sizes") as bus:
            await delivered(bus, cloudevent("relay.ping"))
            outcomes = await asyncio.gather(
                bus.deliver(bad), *map(bus.deliver, good), return_exceptions=True
            )
            assert isinstance(outcomes[0], Rejected)
            assert "larger than configured max size 2000" in outcomes[0].reason
            others = {getattr(outcome, "failure", outcome) for outcome in outcomes[1:]}
            assert others == {"transient"}
            for event in good:
                await delivered(bus, event)
    finally:
        await asyncio.to_thread(own_broker.evaluate, limit.format(134_217_728))


async def test_the_keys_that_no_queue_is_bound_for_are_not_all_remembered(
    broker: Broker, exchange: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub has keys of many scopes."""
    monkeypatch.setattr(sink_module, "MAX_UNROUTED_KEYS", 2)
    async with sink_beside(broker, exchange, declare=False) as (bus, broker_channel):
        await broker_channel.declare_exchange(exchange, "topic", durable=True)
        for number in (1, 2, 3, 3, 1):
            await delivered(bus, cloudevent(eventtype=f"Kind{number}"))
    assert len([text for text in caplog.messages if "no queue is bound" in text]) == 4
