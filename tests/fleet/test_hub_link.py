"""The connection of the hub to a real RabbitMQ, with a handler of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from relay.clock import SystemClock
from relay.fleet.hub import link as link_module
from relay.fleet.hub.link import HubLink
from relay.fleet.routing import agent_publish_exchange_name
from tests.background_tasks import BackgroundTasks
from tests.eventually import eventually
from tests.fleet.hub_side import HUB, HUB_USER, SCOPE, define_users, hub_settings, unused_exchange
from tests.ports import reserve
from tests.rabbitmq import Broker
from tests.raw_amqp import RawChannel

UNUSABLE, BUG = b"unusable", b"bug"


class Handler:
    """Refuses what is unusable, fails at a bug, and takes everything else."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.begun = 0
        """Messages that it was handed."""
        self.may_take = asyncio.Event()
        self.may_take.set()

    async def take(self, messages: Sequence[DeliveredMessage]) -> set[int]:
        self.begun += len(messages)
        await self.may_take.wait()
        if any(message.body == BUG for message in messages):
            raise RuntimeError("a bug")
        self.taken += [message.body for message in messages if message.body != UNUSABLE]
        return {message.delivery_tag or 0 for message in messages if message.body == UNUSABLE}


def ignore(*_: object, **__: object) -> None:
    """Take any event of the relay."""


def link_to(url: str, exchange: str, handler: Handler, saved: Sequence[bool] = (True,)) -> HubLink:
    return HubLink(
        hub_settings(url, exchange),
        HUB,
        SystemClock(),
        ignore,
        handler.take,
        is_saved=lambda: saved[0],
        on_lost=lambda: None,
    )


@asynccontextmanager
async def connected(
    broker: Broker, exchange: str, handler: Handler, *, saved: Sequence[bool] = (True,)
) -> AsyncIterator[HubLink]:
    """Run a link until the end of the block, from when it is connected."""
    link = link_to(broker.amqp_url(HUB_USER), exchange, handler, saved)
    async with BackgroundTasks(link.run()):
        await link.wait_for_first_connection()
        yield link


@pytest.fixture
async def exchange(own_broker: Broker) -> str:
    exchange = unused_exchange()
    await asyncio.to_thread(own_broker.start)
    await asyncio.to_thread(define_users, own_broker, exchange)
    return exchange


async def publish(broker: Broker, exchange: str, *bodies: bytes) -> None:
    """Publish, and wait until the broker has each in the queue."""
    async with RawChannel(broker.amqp_url(HUB_USER)) as channel:
        for body in bodies:
            key, properties = f"vote.{SCOPE}.vm-0", Basic.Properties(message_id="m")
            to = agent_publish_exchange_name(exchange)
            assert await channel.publish_all(to, key, body, [properties]) == 0


async def test_a_message_that_meets_a_bug_loses_neither_the_others_nor_the_connection(
    own_broker: Broker, exchange: str
) -> None:
    async with connected(own_broker, exchange, Handler()):
        pass  # the queues are there
    await publish(own_broker, exchange, b"1", UNUSABLE, b"2", BUG, b"3", UNUSABLE)
    handler = Handler()
    async with connected(own_broker, exchange, handler) as link:
        await eventually(lambda: b"3" in handler.taken)
        await publish(own_broker, exchange, b"4")
        await eventually(lambda: b"4" in handler.taken)
        await eventually(link.has_read_all)
        assert link.failures == 0
    assert link.connected_since is None, "a grant would be claimed for an order that is not sent"
    assert handler.taken == [b"1", b"2", b"3", b"4"]
    handler = Handler()
    async with connected(own_broker, exchange, handler):
        await publish(own_broker, exchange, b"5")
        await eventually(lambda: handler.taken == [b"5"])  # all others were acknowledged


async def test_a_hub_has_not_read_all_while_messages_wait_in_the_broker(
    own_broker: Broker, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a backlog nothing is on the way from the broker, now and then."""
    monkeypatch.setattr(link_module, "PREFETCH", 1)
    handler, saved = Handler(), [False]
    async with connected(own_broker, exchange, handler, saved=saved) as link:
        assert await link.has_read_all()
        handler.may_take.clear()
        await publish(own_broker, exchange, b"1", b"2", b"3")
        await eventually(lambda: handler.begun == 1)
        assert not await link.has_read_all()
        handler.may_take.set()
        await eventually(lambda: handler.taken == [b"1"])
        assert not await link.has_read_all()
        saved[0] = True
        await link.acknowledge()
        await eventually(link.has_read_all)
        assert handler.taken == [b"1", b"2", b"3"]


async def test_a_hub_that_lost_its_channel_meanwhile_acknowledges_nothing_and_goes_on(
    own_broker: Broker, exchange: str
) -> None:
    """The broker closes the channel while the store is slow, as after its consumer_timeout."""
    handler, saved = Handler(), [False]
    async with connected(own_broker, exchange, handler, saved=saved) as link:
        await publish(own_broker, exchange, b"1")
        await eventually(lambda: handler.taken == [b"1"])
        handler.may_take.clear()
        await publish(own_broker, exchange, b"2")
        await eventually(lambda: handler.begun == 2)
        assert link._listening is not None  # noqa: SLF001  # what the broker would close
        await link._listening.close()  # noqa: SLF001
        saved[0] = True
        await link.acknowledge()
        assert not await link.has_read_all()
        handler.may_take.set()
        await eventually(link.has_read_all)
        assert handler.taken[:2] == [b"1", b"2"]


async def test_a_hub_counts_each_failed_connection_in_a_row() -> None:
    """As docs/metrics.md says; it was never connected."""
    link = link_to(f"amqp://hub:hub@127.0.0.1:{reserve(1)[0]}/", "nowhere", Handler())
    async with BackgroundTasks(link.run()):
        await eventually(lambda: link.failures >= 2)
