"""The connection of an agent: one, small, patient, and with no more rights than it needs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import aio_pika
import pytest

from relay.clock import SystemClock
from relay.errors import Deferred
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet import link as link_module
from relay.fleet.link import (
    FIRST_RECONNECT_SPREAD,
    MAX_RECONNECT_SPREAD,
    AgentLink,
    spread_reconnect_delay,
)
from relay.fleet.messages import Content, PulseRequest, StartOrder, VoteAnswer
from relay.fleet.routing import (
    agent_publish_exchange_name,
    command_exchange_name,
    command_key,
    report_queue_name,
    scope_key,
)
from relay.fleet.settings import AgentSettings
from tests.background_tasks import BackgroundTasks
from tests.builders import cloudevent
from tests.eventually import eventually
from tests.fleet.hub_side import (
    AGENT_USER,
    HUB,
    SCOPE,
    STRANGER,
    define_users,
    hub_side,
    make_order,
    unused_exchange,
)
from tests.rabbitmq import Broker

ORIGIN = Origin(SCOPE, "vm-0")
KEY = f"event.scheduled.freeze.{SCOPE}.vm-0"


@dataclass
class Handler:
    listens: int = 0
    orders: list[StartOrder] = field(default_factory=list)
    answers: list[VoteAnswer] = field(default_factory=list)
    pulse_requests: int = 0
    fails: bool = False

    def on_listening(self) -> None:
        self.listens += 1

    def take(self, content: Content) -> None:
        """Note it; fail at an order as a bug would."""
        match content:
            case StartOrder() if self.fails:
                raise RuntimeError("a bug")
            case StartOrder():
                self.orders.append(content)
            case VoteAnswer():
                self.answers.append(content)
            case _:
                self.pulse_requests += 1


@asynccontextmanager
async def linked(
    broker: Broker, exchange: str, *, user: str = AGENT_USER
) -> AsyncIterator[tuple[AgentLink, Handler]]:
    """Run a link that connects again at once."""
    settings = AgentSettings.model_validate(
        {"role": "agent", "url": broker.amqp_url(user), "exchange": exchange}
    )
    handler = Handler()
    link = AgentLink(settings, ORIGIN, SystemClock(), chance=lambda: 0.01)
    link.on_message, link.on_listening = handler.take, handler.on_listening
    async with BackgroundTasks(link.run()):
        yield link, handler


async def published(link: AgentLink, *, times: int = 1) -> None:
    for number in range(times):
        event = cloudevent(id=f"{number:032x}", source=f"imds://{SCOPE}", scope=SCOPE, relay="vm-0")

        async def is_published(event: CloudEvent = event) -> bool:
            try:
                await link.publish(event, KEY)
            except Deferred:
                return False
            return True

        await eventually(is_published)


async def failure_of(link: AgentLink, part: str) -> Deferred:
    """Publish until it fails with these words, and return the failure."""

    async def failure() -> Deferred | None:
        try:
            await link.publish(cloudevent(), KEY)
        except Deferred as error:
            return error if part in error.reason else None
        return None

    found = await eventually(failure)
    assert found is not None
    return found


async def connections(broker: Broker) -> list[str]:
    listed = await asyncio.to_thread(broker.ctl, "list_connections", "user")
    return listed.split()


async def test_an_agent_has_one_connection_and_one_queue(own_broker: Broker) -> None:
    async with hub_side(own_broker) as hub, linked(own_broker, hub.exchange) as (link, handler):
        await eventually(lambda: handler.listens == 1)
        await published(link, times=3)
        assert (await connections(own_broker)).count(AGENT_USER) == 1
        queues = await asyncio.to_thread(
            own_broker.ctl, "list_queues", "name", "exclusive", "arguments"
        )
        (own,) = [line for line in queues.splitlines() if line.startswith("amq.gen-")]
        assert "true" in own
        assert '"x-max-length",100' in own.replace(" ", "")
        assert '"x-message-ttl",30000' in own.replace(" ", "")


async def test_everything_of_the_hub_reaches_the_handler_and_a_bug_stops_nothing(
    own_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    async with hub_side(own_broker) as hub, linked(own_broker, hub.exchange) as (_, handler):
        await eventually(lambda: handler.listens == 1)
        handler.fails = True
        await hub.send(make_order("A", "r"))
        await hub.send(PulseRequest(event_ids=("A",)))
        await eventually(lambda: handler.pulse_requests == 1)
        assert "internal error" in caplog.text
        handler.fails = False
        order = make_order("A", "r", vm_id="vm", journalhead=f"1:{'0' * 64}")
        await hub.send(order)
        await hub.send(VoteAnswer(nonce="id", status=202, body={"a": 1}))
        misplaced = make_order("A", "r").to_event(HUB, datetime.now(UTC))
        await hub.publish(misplaced.body, scope_key(SCOPE))
        await hub.send(make_order("A", "r"), relay="vm-1")
        await hub.send(PulseRequest(event_ids=("A",)), scope="vmss-a-another")
        await hub.send(PulseRequest(event_ids=("A",)))
        await eventually(lambda: handler.pulse_requests == 2)
        assert handler.orders == [order]
        assert [answer.nonce for answer in handler.answers] == ["id"]


async def test_no_order_of_anybody_but_the_hub_reaches_the_handler(
    own_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """Not that of a user with every right, and no dead letter: it keeps the ``user_id`` it had."""
    async with (
        hub_side(own_broker) as hub,
        linked(own_broker, hub.exchange) as (_, handler),
        await aio_pika.connect(own_broker.amqp_url(STRANGER)) as connection,
        connection.channel() as channel,
    ):
        await eventually(lambda: handler.listens == 1)
        order = make_order("A", "r").to_event(HUB, datetime.now(UTC)).body
        ours, neighbors = command_key(SCOPE, "vm-0"), command_key(SCOPE, "vm-1")
        await hub.publish(order, ours, user=STRANGER)
        await eventually(lambda: "is not the hub's" in caplog.text)
        commands = command_exchange_name(hub.exchange)
        dead_letters = {"x-dead-letter-exchange": commands, "x-dead-letter-routing-key": ours}
        trap = await channel.declare_queue(
            exclusive=True, arguments={**dead_letters, "x-message-ttl": 0}
        )
        await trap.bind(commands, neighbors)
        await hub.publish(order, neighbors)  # the hub's own, to another agent
        await eventually(lambda: "dead letter" in caplog.text)
        await hub.send(PulseRequest(event_ids=("A",)))
        await eventually(lambda: handler.pulse_requests == 1)
        assert handler.orders == []


async def test_an_agent_waits_for_the_exchanges_and_says_so(
    own_broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub makes them. The agent has no right to."""
    caplog.set_level(logging.INFO, "relay.fleet")
    monkeypatch.setattr(link_module, "LISTEN_RETRY_DELAY", 0.1)
    exchange = unused_exchange()
    await asyncio.to_thread(own_broker.start)
    await asyncio.to_thread(define_users, own_broker, exchange, with_exchanges=False)
    async with linked(own_broker, exchange) as (link, handler):
        missing = await failure_of(link, "the hub makes it")
        assert agent_publish_exchange_name(exchange) in missing.reason
        await eventually(lambda: command_exchange_name(exchange) in caplog.text)
        queues = await asyncio.to_thread(own_broker.ctl, "list_queues", "name")
        assert sum(line.startswith("amq.gen-") for line in queues.splitlines()) == 1
        async with hub_side(own_broker, exchange) as hub:
            await eventually(lambda: handler.listens == 1)
            await published(link)
            await hub.send(PulseRequest(event_ids=("A",)))
            await eventually(lambda: handler.pulse_requests == 1)
            await eventually(lambda: len(hub.reports) == 1)
            assert (await connections(own_broker)).count(AGENT_USER) == 1


async def test_a_report_that_no_queue_takes_is_not_delivered(own_broker: Broker) -> None:
    """Nobody would ever read it."""
    async with hub_side(own_broker) as hub, linked(own_broker, hub.exchange) as (link, _):
        await published(link)
        await hub.channel.queue_delete(report_queue_name(hub.exchange))
        failure = await failure_of(link, "no queue")
        assert failure.status == 312
        assert failure.failure == "transient"


async def test_a_refused_right_is_named(
    own_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    async with hub_side(own_broker) as hub:
        nothing = {"configure": "^$", "write": "^$", "read": "^$"}
        await asyncio.to_thread(own_broker.add_user, AGENT_USER, AGENT_USER, **nothing)
        async with linked(own_broker, hub.exchange) as (link, _):
            await failure_of(link, "write on the exchange")
            await eventually(lambda: "refused to make or bind the agent's queue" in caplog.text)


async def test_the_agent_comes_back_after_the_broker_does(own_broker: Broker) -> None:
    """Its queue is gone with the connection, and is made again."""
    async with hub_side(own_broker) as hub, linked(own_broker, hub.exchange) as (link, handler):
        await published(link)
        await eventually(lambda: handler.listens == 1)
        await asyncio.to_thread(own_broker.kill)
        await failure_of(link, "")
        await eventually(lambda: not link.is_connected)  # its other channel may end a turn later
    async with (
        linked(own_broker, hub.exchange) as (link, handler),
        hub_side(own_broker, hub.exchange) as hub,
    ):
        await eventually(lambda: handler.listens == 1)
        await asyncio.to_thread(own_broker.stop)
        await asyncio.to_thread(own_broker.start)
        await eventually(lambda: handler.listens == 2)
        await published(link)


async def test_a_deleted_queue_is_made_again(own_broker: Broker) -> None:
    """Only its own connection can delete an exclusive queue, as an operator's tool does."""
    async with hub_side(own_broker) as hub, linked(own_broker, hub.exchange) as (link, handler):
        await eventually(lambda: handler.listens == 1)
        listed = await asyncio.to_thread(own_broker.ctl, "list_queues", "name")
        (queue,) = [line for line in listed.splitlines() if line.startswith("amq.gen-")]
        assert link._listening is not None  # noqa: SLF001  # nothing else has the connection
        await link._listening.queue_delete(queue)  # noqa: SLF001  # the same
        await eventually(lambda: handler.listens == 2)
        await hub.send(PulseRequest(event_ids=("A",)))
        await eventually(lambda: handler.pulse_requests == 1)


def test_a_thousand_agents_come_back_over_ten_seconds_and_later_over_a_minute() -> None:
    chances = [number / 1000 for number in range(1000)]
    for failed_rounds, spread in ((1, 10.0), (2, 20.0), (3, 40.0), (4, 60.0), (100, 60.0)):
        delays = [spread_reconnect_delay(failed_rounds, chance) for chance in chances]
        assert min(delays) == 0
        assert spread * 0.99 < max(delays) < spread
        assert sum(delay < spread / 10 for delay in delays) == 100
    assert (FIRST_RECONNECT_SPREAD, MAX_RECONNECT_SPREAD) == (10.0, 60.0)
