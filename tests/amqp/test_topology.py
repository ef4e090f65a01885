"""Exchanges and queues: made as docs/rabbitmq.md says, checked, compared, or left alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aio_pika.abc import AbstractChannel
from aio_pika.exceptions import ChannelNotFoundEntity
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from relay.amqp.broker_url import Declare
from relay.amqp.connection import GuardedConnection
from relay.amqp.topology import (
    Exchange,
    Queue,
    approvals_queue,
    declare_topology,
    events_topology,
    log_suffix_for_unchecked_parts,
)
from relay.errors import Deferred
from tests.rabbitmq import Broker, Reachable

SCOPE = "prod-vmss-a-1f0c33ab"
QUORUM = {"x-queue-type": "quorum"}

DOCUMENTED: dict[str, tuple[str, Mapping[str, Any]]] = {
    "exchange {}": ("topic", {"alternate-exchange": "{}.unrouted"}),
    "exchange {}.unrouted": ("fanout", {}),
    "queue {}.unrouted": ("quorum", {"x-max-length": 10_000}),
    "exchange {}.approvals": ("topic", {}),
    f"queue {{}}.approvals.{SCOPE}": (
        "quorum",
        {
            "x-single-active-consumer": True,
            "x-dead-letter-exchange": "{}.dlx",
            "x-max-length": 1_000,
            "x-max-length-bytes": 8_388_608,
            "x-overflow": "reject-publish",
        },
    ),
    "exchange {}.dlx": ("topic", {}),
    "queue {}.dead": ("quorum", {"x-max-length": 10_000}),
}
"""Section 7, by name: the type and the arguments, `{}` being the exchange of the configuration."""


def parts_of(exchange: str) -> tuple[Exchange | Queue, ...]:
    """All that a relay makes in which both directions are on."""
    return (*events_topology(exchange), *approvals_queue(exchange, SCOPE).topology)


@asynccontextmanager
async def connected(broker: Reachable) -> AsyncIterator[GuardedConnection]:
    """A connection such as the relay's."""
    connection = GuardedConnection(URL(broker.amqp_url()), "test")
    await connection.connect()
    async with connection:
        yield connection


@pytest.fixture
async def broker_connection(broker: Reachable, exchange: str) -> AsyncIterator[GuardedConnection]:
    """A connection to the broker, on which nothing of the exchange's name is left behind."""
    async with connected(broker) as connection:
        yield connection
        async with connection.channel() as channel:
            await channel.queue_delete(f"{exchange}.approvals.{SCOPE}")


async def exists(connection: GuardedConnection, part: Exchange | Queue) -> bool:
    async with connection.channel() as channel:
        try:
            await part.declare(channel, passive=True)
        except ChannelNotFoundEntity:
            return False
        return True


def test_the_parts_are_those_of_the_documentation_with_these_arguments_and_no_others() -> None:
    parts = {
        part.title: (part.type if isinstance(part, Exchange) else "quorum", part.arguments)
        for part in parts_of("x")
    }
    assert parts == {
        title.format("x"): (
            kind,
            {
                name: value.format("x") if isinstance(value, str) else value
                for name, value in arguments.items()
            },
        )
        for title, (kind, arguments) in DOCUMENTED.items()
    }
    bound = {
        part.name: (part.source, *part.keys) for part in parts_of("x") if isinstance(part, Queue)
    }
    assert bound == {
        "x.unrouted": ("x.unrouted", ""),
        f"x.approvals.{SCOPE}": ("x.approvals", f"approve.{SCOPE}"),
        "x.dead": ("x.dlx", "#"),
    }


async def test_true_makes_all_of_them_and_finds_nothing_to_differ_the_next_time(
    broker_connection: GuardedConnection, exchange: str
) -> None:
    for _ in range(2):
        await declare_topology(broker_connection, parts_of(exchange), True)
    assert all([await exists(broker_connection, part) for part in parts_of(exchange)])


async def _other(channel: AbstractChannel, part: Exchange | Queue, argument: str) -> None:
    if isinstance(part, Exchange):
        kind = "direct" if argument == "type" else part.type
        arguments = {name: value for name, value in part.arguments.items() if name != argument}
        await channel.declare_exchange(
            part.name, kind, durable=argument != "durable", arguments=arguments
        )
        return
    arguments = {
        name: value for name, value in {**QUORUM, **part.arguments}.items() if name != argument
    }
    await channel.declare_queue(part.name, durable=True, arguments=arguments)


_DIFFERENCES = [
    (title, argument)
    for title, (kind, arguments) in DOCUMENTED.items()
    for argument in (*arguments, *(("x-queue-type",) if kind == "quorum" else ("type", "durable")))
]


@pytest.mark.parametrize(
    ("title", "argument"),
    _DIFFERENCES,
    ids=[f"{title} {argument}" for title, argument in _DIFFERENCES],
)
async def test_a_part_that_differs_in_one_argument_is_named_with_it(
    broker_connection: GuardedConnection, exchange: str, title: str, argument: str
) -> None:
    """The error names the part, the argument and the remedy. The relay deletes nothing."""
    (part,) = (part for part in parts_of(exchange) if part.title == title.format(exchange))
    async with broker_connection.channel() as channel:
        await _other(channel, part, argument)
    with pytest.raises(
        Deferred, match=f"^{re.escape(part.title)} already exists with different arguments "
    ) as refused:
        await declare_topology(broker_connection, (part,), True)
    assert f"inequivalent arg '{argument}'" in refused.value.reason
    assert refused.value.reason.endswith(
        "delete it so that the relay makes it again, or set declare: passive to use it as it is"
    )
    assert refused.value.status == 406
    for declare in ("passive", False):
        await declare_topology(broker_connection, (part,), declare)


async def test_passive_names_each_that_is_missing_and_makes_it_not(
    broker_connection: GuardedConnection, exchange: str
) -> None:
    await declare_topology(broker_connection, parts_of(exchange), True)
    for part in parts_of(exchange):
        async with broker_connection.channel() as channel:
            if isinstance(part, Exchange):
                await channel.exchange_delete(part.name)
            else:
                await channel.queue_delete(part.name)
        with pytest.raises(
            Deferred, match=f"^the broker has no {re.escape(part.title)}: make what is missing"
        ) as caught:
            await declare_topology(broker_connection, parts_of(exchange), "passive")
        assert (caught.value.failure, caught.value.status) == ("slow", 404)
        assert not await exists(broker_connection, part)
        await declare_topology(broker_connection, parts_of(exchange), True)


@pytest.mark.parametrize("declare", ["passive", False])
async def test_what_is_not_to_be_made_is_not_made(
    broker_connection: GuardedConnection, exchange: str, declare: Declare
) -> None:
    """With nothing there, passive names all seven at once, and false asks nothing."""
    if declare == "passive":
        all_of_them = ", no ".join(part.title for part in parts_of(exchange))
        with pytest.raises(Deferred, match=f"^the broker has no {re.escape(all_of_them)}: "):
            await declare_topology(broker_connection, parts_of(exchange), declare)
    else:
        await declare_topology(broker_connection, parts_of(exchange), declare)
    assert not any([await exists(broker_connection, part) for part in parts_of(exchange)])


async def _refused(connection: GuardedConnection, part: Exchange | Queue) -> bool:
    """Whether the broker refuses a passive check, as RabbitMQ does from 4.2.6 on."""
    async with connection.channel() as channel:
        try:
            await part.declare(channel, passive=True)
        except ChannelAccessRefused:
            return True
        except ChannelNotFoundEntity:
            return False
        return False


async def test_what_the_user_may_not_look_at_is_unknown_and_not_missing(own_broker: Broker) -> None:
    """A refused check says nothing about its part. The other parts are checked as always."""
    await asyncio.to_thread(
        own_broker.add_user, "looker", "looker", configure="^$", write="^looked$", read="^$"
    )
    seen, *others = parts = (Exchange("looked", "topic"), *parts_of("hidden"))
    connection = GuardedConnection(URL(own_broker.amqp_url("looker")), "test")
    await connection.connect()
    async with connected(own_broker) as maker, connection:
        await declare_topology(maker, parts, True)
        refused = tuple([part for part in parts if await _refused(connection, part)])
        assert seen not in refused
        assert await declare_topology(connection, parts, "passive") == refused
        assert all(part.title in log_suffix_for_unchecked_parts(refused) for part in refused)
        assert log_suffix_for_unchecked_parts(()) == ""
        async with maker.channel() as channel:
            await channel.exchange_delete(seen.name)
        with pytest.raises(
            Deferred, match=r"^the broker has no exchange looked: make what is missing"
        ):
            await declare_topology(connection, parts, "passive")
        with pytest.raises(
            Deferred, match=r"^the broker refused to make exchange hidden\.unrouted "
        ):
            await declare_topology(connection, tuple(others), True)
