"""Exchanges and queues: made as docs/rabbitmq.md says, checked, compared, or left alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aio_pika.abc import AbstractChannel
from aio_pika.exceptions import ChannelNotFoundEntity
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from relay.amqp.broker_url import Declare
from relay.amqp.connection import GuardedConnection, open_connection
from relay.amqp.topology import Exchange, Queue, approvals_queue, declare_topology, events_topology
from relay.errors import Deferred
from relay.fleet.routing import (
    AGENT_QUEUE_ARGUMENTS,
    command_key,
    fleet_topology,
    hub_approvals_queue,
    scope_key,
)
from tests.documented import ROOT
from tests.rabbitmq import Broker

SCOPE = "prod-vmss-a-1f0c33ab"
QUORUM = {"x-queue-type": "quorum"}

MAIN = "azure.scheduledevents"
PAGE = (ROOT / "docs" / "rabbitmq.md").read_text(encoding="utf-8")
ARGUMENT = re.compile(r"`(x-[a-z-]+|alternate-exchange)(?:: (\S+))?`(?: (\d+))?")


def parts_of(exchange: str) -> tuple[Exchange | Queue, ...]:
    """All that a relay makes in which both directions are on."""
    return (*events_topology(exchange), *approvals_queue(exchange, SCOPE).topology)


@pytest.fixture
async def broker_connection(broker: Broker, exchange: str) -> AsyncIterator[GuardedConnection]:
    """A connection to the broker, on which nothing of the exchange's name is left behind."""
    async with open_connection(URL(broker.amqp_url()), "test") as connection:
        yield connection
        async with connection.channel() as channel:
            await channel.queue_delete(f"{exchange}.approvals.{SCOPE}")


async def found(connection: GuardedConnection, part: Exchange | Queue) -> str:
    """What the broker says to a passive check. RabbitMQ refuses it from 4.2.6 on."""
    async with connection.channel() as channel:
        try:
            await part.declare(channel, passive=True)
        except ChannelNotFoundEntity:
            return "missing"
        except ChannelAccessRefused:
            return "refused"
        return "there"


# --- docs/rabbitmq.md


def line_of(title: str) -> str:
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {title}"))
    return line


def arguments_in(line: str) -> dict[str, Any]:
    """Return what a line of the page says: a word, a number or, of what needs no value, True."""
    found = ARGUMENT.findall(line)
    return {name: int(number) if number else word or True for name, word, number in found}


@pytest.mark.parametrize(
    "part",
    [
        *events_topology(MAIN),
        *approvals_queue(MAIN, "<scope>").topology,
        *fleet_topology(MAIN),
        *hub_approvals_queue(MAIN).topology,
    ],
    ids=lambda part: part.title,
)
def test_a_part_has_the_arguments_of_the_page_and_no_others(part: Exchange | Queue) -> None:
    line = line_of(f"{part.title.replace(' ', ' `', 1)}`")
    if isinstance(part, Queue):
        assert all(f"`{key}`" in line for key in part.keys if key)
    if "as the [approvals queue](#approvals-in) of a scope" in line:
        line = line_of(f"queue `{MAIN}.approvals.<scope>`")
    assert ("quorum" if isinstance(part, Queue) else part.type) in line
    assert arguments_in(line) == part.arguments


def test_a_queue_of_an_agent_has_the_arguments_and_bindings_of_the_page() -> None:
    line = line_of("one queue for each agent")
    assert arguments_in(line) == AGENT_QUEUE_ARGUMENTS
    for key in (command_key("<scope>", "<relay>"), scope_key("<scope>")):
        assert f"`{key}`" in line


@pytest.mark.parametrize("topology", [approvals_queue(MAIN, SCOPE).topology, fleet_topology(MAIN)])
def test_the_place_for_dead_letters_comes_first(topology: tuple[Exchange | Queue, ...]) -> None:
    assert [part.name for part in topology][:2] == [f"{MAIN}.dlx", f"{MAIN}.dead"]


# --- what declare does


async def test_true_makes_all_of_them_and_finds_nothing_to_differ_the_next_time(
    broker_connection: GuardedConnection, exchange: str
) -> None:
    for _ in range(2):
        await declare_topology(broker_connection, parts_of(exchange), True)
    assert {await found(broker_connection, part) for part in parts_of(exchange)} == {"there"}


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
    (part.title, argument)
    for part in parts_of("{}")
    for argument in (
        *part.arguments,
        *(("x-queue-type",) if isinstance(part, Queue) else ("type", "durable")),
    )
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
        assert (caught.value.failure, caught.value.status) == ("transient", 404)
        assert await found(broker_connection, part) == "missing"
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
    assert {await found(broker_connection, part) for part in parts_of(exchange)} == {"missing"}


async def test_what_the_user_may_not_look_at_is_unknown_and_not_missing(own_broker: Broker) -> None:
    """A refused check says nothing about its part. The other parts are checked as always."""
    await asyncio.to_thread(
        own_broker.add_user, "looker", "looker", configure="^$", write="^looked$", read="^$"
    )
    seen, *others = parts = (Exchange("looked", "topic"), *parts_of("hidden"))
    async with (
        open_connection(URL(own_broker.amqp_url()), "test") as maker,
        open_connection(URL(own_broker.amqp_url("looker")), "test") as connection,
    ):
        await declare_topology(maker, parts, True)
        refused = [part.title for part in parts if await found(connection, part) == "refused"]
        assert seen.title not in refused
        note = await declare_topology(connection, parts, "passive")
        assert note.rpartition(": ")[2] == ", ".join(refused)
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
