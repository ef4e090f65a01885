"""On a real RabbitMQ with the generated definitions each user can do its work, and nothing else.

What the broker lets pass is refused on arrival: RabbitMQ 3.10 checks no topic permission for the CC
header (4.0.5 does), and no version checks what a queue dead-letters.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractQueue
from aio_pika.exceptions import ChannelPreconditionFailed
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import ChannelAccessRefused, ChannelLockedResource
from pydantic import SecretStr
from yarl import URL

from relay.amqp.broker_url import Declare
from relay.amqp.connection import open_connection
from relay.amqp.topology import declare_topology, events_topology
from relay.events.build import Origin
from relay.fleet.messages import PulseRequest, VoteAnswer, read_message
from relay.fleet.rabbitmq_definitions import (
    fleet_definitions,
    hash_password,
    use_for_approvals,
    use_for_sink,
)
from relay.fleet.routing import (
    AGENT_QUEUE_ARGUMENTS,
    AuthorizedSender,
    agent_binding_keys,
    agent_key,
    agent_publish_exchange_name,
    command_exchange_name,
    command_key,
    fleet_topology,
    hub_approvals_queue,
    hub_lock_queue_name,
    report_key,
    report_queue_name,
    scope_key,
    verify_command_from_hub,
    verify_message_from_agent,
)
from relay.fleet.settings import HubSettings, TrustDomain
from tests.builders import cloudevent
from tests.eventually import eventually
from tests.rabbitmq import Broker

VHOST, MAIN, HUB_USER = "fleet", "azure.scheduledevents", "imds-hub"
FLEET, COMMANDS = agent_publish_exchange_name(MAIN), command_exchange_name(MAIN)
REPORTS, LOCK = report_queue_name(MAIN), hub_lock_queue_name(MAIN)
APPROVALS, DEAD = f"{MAIN}.approvals.hub", f"{MAIN}.dead"
A = Origin("vmss-a-1f0c33ab", "VMSS-A_0")
B = Origin("vmss-b-77aa0011", "VMSS-B_0")
SINGLE = Origin("single-1", "one")
SINGLE_NEIGHBOR = Origin("single-1", "two")
DOMAINS = (
    TrustDomain(user="vmss-a", scopes=("vmss-a-*",)),
    TrustDomain(user="vmss-b", scopes=("vmss-b-*",)),
    TrustDomain(user="single", scopes=("single-1",), relays=("one",)),
)
USERS = {"vmss-a": A, "vmss-b": B, "single": SINGLE}
PASSWORD = "p"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
WITHIN = 30.0
"""Seconds for what the broker does in milliseconds."""
TOPOLOGY = (*events_topology(MAIN), *fleet_topology(MAIN), *hub_approvals_queue(MAIN).topology)

Attempt = Callable[[AbstractChannel], Awaitable[object]]


def define(node: Broker, declare: Declare) -> None:
    """Give the node the definitions for a hub that may declare, or not."""
    settings = HubSettings(
        role="hub",
        url=SecretStr(f"amqp://{HUB_USER}@127.0.0.1/{VHOST}"),
        declare=declare,
        domains=DOMAINS,
    )
    others = [use_for_sink(MAIN, declare), use_for_approvals(MAIN, declare)]
    hashes = dict.fromkeys((HUB_USER, *USERS), hash_password(PASSWORD, b"salt"))
    node.define(fleet_definitions(settings, HUB_USER, VHOST, hashes, others))


@pytest.fixture
def node(own_broker: Broker) -> Iterator[Broker]:
    """A node with the definitions of the fleet, and with empty queues."""
    define(own_broker, "passive")
    yield own_broker
    if not all(is_empty(own_broker, queue) for queue in (REPORTS, DEAD)):
        own_broker.evaluate(f'rabbit_vhost:delete(<<"{VHOST}">>, <<"test">>).')


@asynccontextmanager
async def channel_of(node: Broker, user: str) -> AsyncIterator[AbstractChannel]:
    async with await aio_pika.connect(url_of(node, user)) as connection:
        yield await connection.channel(on_return_raises=True)


def url_of(node: Broker, user: str) -> URL:
    return URL(f"amqp://{user}:{PASSWORD}@127.0.0.1:{node.port}/{VHOST}")


async def publish(
    channel: AbstractChannel, exchange: str, key: str, *, user: str, body: bytes = b"{}"
) -> None:
    there = await channel.get_exchange(exchange, ensure=False)
    message = aio_pika.Message(body, user_id=user, message_id="m")
    await there.publish(message, key, mandatory=True, timeout=WITHIN)


async def next_messages(channel: AbstractChannel, queue: str, count: int) -> list[DeliveredMessage]:
    raw = await channel.get_underlay_channel()
    arrivals: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
    await raw.basic_consume(queue, arrivals.put)
    async with asyncio.timeout(WITHIN):
        messages = [await arrivals.get() for _ in range(count)]
    for message in messages:
        await raw.basic_ack(message.delivery_tag or 0, wait=True)
    return messages


def is_empty(node: Broker, queue: str) -> bool:
    """Whether a queue holds no message. A publish that was refused is over when this is asked."""
    return length_of(node, queue) == 0


# --- what is needed


@pytest.mark.parametrize("user", USERS)
async def test_an_agent_publishes_everything_that_it_has_to(node: Broker, user: str) -> None:
    origin = USERS[user]
    keys = [
        *report_keys(origin),
        report_key(cloudevent("event.ended", eventtype=None), origin),
        report_key(cloudevent("relay.sink-failing", subject="hub"), origin),
    ]
    async with channel_of(node, user) as channel:
        for key in keys:
            await publish(channel, FLEET, key, user=user)
    async with channel_of(node, HUB_USER) as hub:
        arrivals = await next_messages(hub, REPORTS, len(keys))
    for key, message in zip(keys, arrivals, strict=True):
        assert message.routing_key == key
        _, sender = verify_message_from_agent(message, FLEET, DOMAINS)
        assert sender == AuthorizedSender(origin.scope, origin.relay.lower(), user)


async def agent_queue(channel: AbstractChannel, *keys: str, **more: Any) -> AbstractQueue:
    arguments = {**AGENT_QUEUE_ARGUMENTS, **more}
    queue = await channel.declare_queue(exclusive=True, arguments=arguments)
    for key in keys:
        await queue.bind(COMMANDS, key)
    return queue


@pytest.mark.parametrize("user", USERS)
async def test_an_agent_gets_what_is_sent_to_it_and_to_its_scope(node: Broker, user: str) -> None:
    origin = USERS[user]
    keys = agent_binding_keys(origin)
    async with channel_of(node, user) as agent, channel_of(node, HUB_USER) as hub:
        queue = await agent_queue(agent, *keys)
        assert queue.name.startswith("amq.gen-")
        messages = (VoteAnswer(nonce="n", status=202, body={}), PulseRequest(event_ids=("E",)))
        for key, content in zip(keys, messages, strict=True):
            body = content.to_event(Origin("hub", "h"), NOW).body
            await publish(hub, COMMANDS, key, user=HUB_USER, body=body)
        arrivals = await next_messages(agent, queue.name, len(keys))
        for key, content, message in zip(keys, messages, arrivals, strict=True):
            assert verify_command_from_hub(message, COMMANDS, keys, HUB_USER) == key
            assert read_message(message.body).content == content


async def test_the_hub_finds_all_that_it_may_look_at_and_nothing_missing(node: Broker) -> None:
    async with open_connection(url_of(node, HUB_USER), "test") as connection:
        await declare_topology(connection, TOPOLOGY, "passive")


async def test_the_definitions_make_what_a_hub_makes_that_declares_itself(node: Broker) -> None:
    define(node, True)
    async with open_connection(url_of(node, HUB_USER), "test") as connection:
        assert await declare_topology(connection, TOPOLOGY, True) == ""  # nothing differs
        async with connection.channel() as channel:
            for part in reversed(TOPOLOGY):
                if hasattr(part, "keys"):
                    await channel.queue_delete(part.name)
                else:
                    await channel.exchange_delete(part.name)
        assert await declare_topology(connection, TOPOLOGY, True) == ""  # all is made


async def test_the_hub_asks_what_waits_and_consumes_and_dead_letters(node: Broker) -> None:
    async with channel_of(node, "vmss-a") as agent:
        await publish(agent, FLEET, agent_key("vote", A), user="vmss-a")
    async with channel_of(node, HUB_USER) as hub:
        arrivals: asyncio.Queue[Any] = asyncio.Queue()
        await hub.declare_queue(LOCK, exclusive=True)
        waiting = await hub.declare_queue(REPORTS, passive=True)
        assert waiting.declaration_result.message_count == 1
        for name in (APPROVALS, REPORTS):
            await (await hub.get_queue(name, ensure=False)).consume(arrivals.put)
        async with asyncio.timeout(WITHIN):
            message = await arrivals.get()
        await message.reject(requeue=False)
    await until(node, DEAD, 1)


async def test_a_pulse_that_nobody_reads_expires_and_is_no_dead_letter(node: Broker) -> None:
    """A hub that is away for a day would find millions of them in place of what matters."""
    async with channel_of(node, "vmss-a") as agent:
        fleet = await agent.get_exchange(FLEET, ensure=False)
        for key in (agent_key("pulse", A), agent_key("vote", A)):
            message = aio_pika.Message(b"{}", user_id="vmss-a", expiration=0.001)
            await fleet.publish(message, key, timeout=WITHIN)
    await until(node, DEAD, 1)
    assert is_empty(node, REPORTS)
    async with channel_of(node, "vmss-a") as agent:
        await publish(agent, FLEET, agent_key("pulse", A), user="vmss-a")
    assert length_of(node, REPORTS) == 1


async def until(node: Broker, queue: str, length: int) -> None:
    await eventually(
        lambda: asyncio.to_thread(length_of, node, queue), lambda found: found == length, every=0.1
    )


def length_of(node: Broker, queue: str) -> int:
    """The messages in a queue that wait for a consumer."""
    name = f'rabbit_misc:r(<<"{VHOST}">>, queue, <<"{queue}">>)'
    result = node.evaluate(
        f"{{ok, Q}} = rabbit_amqqueue:lookup({name}), "
        "element(2, rabbit_amqqueue:stat(Q))."  # asks the queue, whose metrics are seconds old
    )
    return int(result)


# --- what the broker refuses


def report_keys(origin: Origin) -> list[str]:
    return [
        report_key(cloudevent("event.scheduled", eventtype="Reboot"), origin),
        report_key(cloudevent("relay.source-lost", subject=None), origin),
        agent_key("pulse", origin),
        agent_key("vote", origin),
        agent_key("start", origin),
    ]


OTHERS = [("vmss-a", B), ("vmss-b", A), ("vmss-a", SINGLE), ("single", SINGLE_NEIGHBOR)]
PUBLISHED = [
    # No agent reports for a relay of another domain.
    *((user, FLEET, key) for user, origin in OTHERS for key in report_keys(origin)),
    # It publishes with no other key.
    *(
        ("vmss-a", FLEET, key)
        for key in (
            *("", "#", "vote.#", "vote.*.*", f"approve.{A.scope}", f"to.{A.scope}.a"),
            *(f"vote.{A.scope}.a.b", f"vote.{A.scope}", f"vote.x.{A.scope}.a"),
            *(f"event.scheduled.{A.scope}.a", f"event.x.y.{B.scope}.{A.scope}.a"),
            *(f"start.accepted.{A.scope}.a", f"scope.{A.scope}"),
        )
    ),
    # It gives no order and tells no state, approves nothing, and reaches no queue directly.
    ("vmss-a", COMMANDS, command_key(A.scope, "vmss-a_0")),
    ("vmss-a", COMMANDS, scope_key(A.scope)),
    ("vmss-a", COMMANDS, command_key(B.scope, "vmss-b_0")),
    ("vmss-a", f"{MAIN}.approvals", f"approve.{A.scope}"),
    ("vmss-a", MAIN, f"event.scheduled.reboot.{A.scope}"),
    ("vmss-a", f"{MAIN}.dlx", "x"),
    ("vmss-a", "", REPORTS),
    ("vmss-a", "", APPROVALS),
    ("vmss-a", "amq.topic", "x"),
    ("vmss-a", "amq.fanout", "x"),
    # The hub's user sends only commands, and only to its domains.
    (HUB_USER, FLEET, agent_key("vote", A)),
    (HUB_USER, f"{MAIN}.approvals", f"approve.{A.scope}"),
    (HUB_USER, f"{MAIN}.dlx", "x"),
    (HUB_USER, "", REPORTS),
    (HUB_USER, COMMANDS, command_key("other", "a")),
    (HUB_USER, COMMANDS, f"{command_key(A.scope, 'a')}.b"),
    (HUB_USER, COMMANDS, agent_key("vote", A)),
]
"""User, exchange and key of messages that are refused."""
BOUND = [
    # Nobody binds the commands to another.
    *(
        ("vmss-a", COMMANDS, key)
        for key in (
            *(command_key(B.scope, "vmss-b_0"), scope_key(B.scope)),
            *("#", "*.*", "*.*.*", "to.#", "to.*.*", "scope.*", "scope.#"),
            *(f"to.{A.scope}.*", f"to.{A.scope}.#", f"*.{A.scope}", f"#.{A.scope}"),
        )
    ),
    ("single", COMMANDS, command_key(SINGLE.scope, "two")),
    ("single", COMMANDS, f"to.{SINGLE.scope}.*"),
    # An agent listens at no other exchange.
    *(
        ("vmss-a", exchange, key)
        for exchange in (FLEET, MAIN, f"{MAIN}.approvals", f"{MAIN}.dlx", "amq.topic")
        for key in ("#", agent_key("vote", A))
    ),
]
"""User, exchange and key of bindings of its own queue that are refused."""


def publishing(user: str, exchange: str, key: str) -> Attempt:
    return lambda channel: publish(channel, exchange, key, user=user)


def binding(exchange: str, key: str) -> Attempt:
    async def bind(channel: AbstractChannel) -> None:
        await (await agent_queue(channel)).bind(exchange, key)

    return bind


def on_queue(name: str) -> dict[str, Attempt]:
    """What an agent could try with a queue of the hub: read it, empty it, lead it elsewhere."""

    def raw(act: Callable[[Any], Awaitable[object]]) -> Attempt:
        async def attempt(channel: AbstractChannel) -> None:
            await act(await channel.get_underlay_channel())

        return attempt

    return {
        "consume": raw(lambda it: it.basic_consume(name, ignore)),
        "get": raw(lambda it: it.basic_get(name)),
        "purge": raw(lambda it: it.queue_purge(name)),
        "delete": raw(lambda it: it.queue_delete(name)),
        "bind to the commands": raw(lambda it: it.queue_bind(name, COMMANDS, "x")),
        "bind to the fleet": raw(lambda it: it.queue_bind(name, FLEET, "#")),
        "unbind": raw(lambda it: it.queue_unbind(name, FLEET, "vote.#")),
        "declare": lambda channel: channel.declare_queue(name, durable=True),
    }


def declaring(name: str, exclusive: bool) -> Attempt:
    return lambda channel: channel.declare_queue(name, exclusive=exclusive, durable=not exclusive)


def refused_attempts() -> Iterator[tuple[str, str, Attempt]]:
    for user, exchange, key in PUBLISHED:
        yield user, f"publish to {exchange!r} with {key!r}", publishing(user, exchange, key)
    for user, exchange, key in BOUND:
        yield user, f"bind to {exchange!r} with {key!r}", binding(exchange, key)
    for user in ("vmss-a", "single"):
        for name in (REPORTS, APPROVALS, DEAD, f"{MAIN}.unrouted"):
            for action, attempt in on_queue(name).items():
                yield user, f"{action}: {name}", attempt
    for action, attempt in attempts_of_an_agent():
        yield "vmss-a", action, attempt


def attempts_of_an_agent() -> Iterator[tuple[str, Attempt]]:
    for name in (FLEET, COMMANDS, MAIN, f"{MAIN}.approvals", "mine", "amq.gen-x"):
        yield f"make exchange {name}", on_exchange(name)["make"]
    for name in (FLEET, COMMANDS, MAIN, f"{MAIN}.approvals"):
        yield f"remove exchange {name}", on_exchange(name)["remove"]
    for name in ("", COMMANDS, MAIN, f"{MAIN}.approvals"):
        yield f"dead-letter to {name!r}", on_exchange(name)["dead-letter"]
    for name in ("mine", LOCK, f"{MAIN}.fleet.in2", "amq.gen-mine", "amq.gen-", "amq.x"):
        for exclusive in (True, False):
            yield f"choose {name}, exclusive={exclusive}", declaring(name, exclusive)
    for key in ("#", "*.*", agent_key("vote", A), agent_binding_keys(B)[0]):
        yield f"lead {key} to the fleet", partial(bind_fleet_exchange, key)


def on_exchange(name: str) -> dict[str, Attempt]:
    return {
        "make": lambda channel: channel.declare_exchange(name, "topic"),
        "remove": lambda channel: channel.exchange_delete(name),
        "dead-letter": lambda channel: agent_queue(channel, **{"x-dead-letter-exchange": name}),
    }


async def ignore(_: object) -> None:
    """Take a message and do nothing."""


@pytest.mark.parametrize("user", [*USERS, HUB_USER])
async def test_what_a_user_does_not_need_is_refused(node: Broker, user: str) -> None:
    unrefused = []
    async with await aio_pika.connect(url_of(node, user)) as connection:
        for by, action, attempt in refused_attempts():
            if by != user:
                continue
            channel = await connection.channel(on_return_raises=True)
            try:
                async with asyncio.timeout(WITHIN):
                    await attempt(channel)
            except ChannelAccessRefused:
                continue  # the broker has closed the channel
            except Exception as error:  # noqa: BLE001  # whatever it is, it is no refusal
                unrefused.append(f"{action}: {error!r}")
            else:
                unrefused.append(action)
    assert unrefused == []
    assert all(is_empty(node, queue) for queue in (REPORTS, APPROVALS, DEAD))


@pytest.mark.parametrize(
    ("user", "claimed"),
    [("vmss-a", HUB_USER), ("vmss-a", "vmss-b"), (HUB_USER, "vmss-a"), ("vmss-a", "guest")],
)
async def test_nobody_claims_to_be_another_user(node: Broker, user: str, claimed: str) -> None:
    orders, reports = (COMMANDS, scope_key(A.scope)), (FLEET, agent_key("vote", A))
    exchange, key = orders if user == HUB_USER else reports
    async with channel_of(node, user) as channel:
        with pytest.raises(ChannelPreconditionFailed, match="user_id"):
            await publish(channel, exchange, key, user=claimed)
    assert is_empty(node, REPORTS)


async def test_an_agent_cannot_read_the_queue_of_another_whose_name_it_knows(node: Broker) -> None:
    async with channel_of(node, "vmss-b") as victim:
        queue = await agent_queue(victim, *agent_binding_keys(B))

        async def consume(channel: AbstractChannel) -> None:
            await (await channel.get_queue(queue.name, ensure=False)).consume(ignore)

        async def unbind(channel: AbstractChannel) -> None:
            there = await channel.get_queue(queue.name, ensure=False)
            await there.unbind(COMMANDS, agent_binding_keys(B)[0])

        for attempt in (consume, unbind):
            async with channel_of(node, "vmss-a") as channel:
                with pytest.raises((ChannelLockedResource, ChannelAccessRefused)):
                    await attempt(channel)


# --- what the broker lets pass


async def test_commands_that_an_agent_leads_to_the_exchange_reach_no_queue(node: Broker) -> None:
    """It may write the exchange and read the commands of its scope, so it may bind the two."""
    async with channel_of(node, "vmss-a") as agent, channel_of(node, HUB_USER) as hub:
        for key in agent_binding_keys(A):
            await bind_fleet_exchange(key, agent)
        for key in agent_binding_keys(A):
            with pytest.raises(aio_pika.exceptions.PublishError):
                await publish(hub, COMMANDS, key, user=HUB_USER)


async def bind_fleet_exchange(key: str, channel: AbstractChannel) -> None:
    await (await channel.get_exchange(FLEET, ensure=False)).bind(COMMANDS, key)
