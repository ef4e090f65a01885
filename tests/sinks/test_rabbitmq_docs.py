"""docs/rabbitmq.md and docs/consumers.md: their rights, programs and tables are right."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from pamqp.common import Arguments
from ruamel.yaml import YAML
from yarl import URL

from relay.amqp.connection import Connection
from relay.amqp.event_message import routing_key
from relay.amqp.topology import approvals_topology, declare_topology, events_topology
from relay.approvals.request import DecisionBody
from relay.config import Config
from relay.sinks.rabbitmq import Settings
from tests.builders import EVENT_ID, cloudevent
from tests.rabbitmq import Broker
from tests.sinks.rabbitmq_consumer import delivered, message_properties, sink

ROOT = Path(__file__).parents[2]
OPERATING, CONSUMING = (
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("rabbitmq.md", "consumers.md")
)
EXCHANGE = "azure.scheduledevents"


def blocks(page: str, language: str) -> list[str]:
    """A page's blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_the_sections_of_the_page_are_a_configuration() -> None:
    publishing, taking = (
        YAML(typ="safe", pure=True).load(block) for block in blocks(OPERATING, "yaml")
    )
    (section,) = publishing["sinks"]
    assert Settings.model_validate(section).exchange == EXCHANGE
    config = Config.model_validate(publishing | taking)
    assert config.approvals.amqp is not None
    assert [client.amqp_user for client in config.api.clients] == ["db-drain"]


def test_the_page_names_the_routing_keys_and_properties_that_are_sent() -> None:
    assert f"`{routing_key(cloudevent(eventtype='Reboot'))}`" in OPERATING
    assert f"`{routing_key(cloudevent('relay.sink-failing', subject='drain'))}`" in OPERATING
    message = message_properties(cloudevent())
    sent = {
        "type" if name == "message_type" else name
        for name, value in message
        if value and name not in {"headers", "delivery_mode"}
    }
    assert all(f"`{name}`" in OPERATING for name in sent)
    assert f"`{message.content_type}`" in OPERATING
    assert "ce-datacontenttype" in (message.headers or {})


def test_the_page_names_all_that_is_declared_with_its_arguments() -> None:
    for part in (*events_topology(EXCHANGE), *approvals_topology(EXCHANGE, "<scope>")):
        (line,) = (
            line
            for line in OPERATING.splitlines()
            if line.startswith(f"| {part.title.replace(' ', ' `', 1)}` |")
        )
        for name, value in part.arguments.items():
            assert name in line
            assert value is True or str(value) in line


def test_the_decision_of_the_page_is_one() -> None:
    (block,) = blocks(CONSUMING, "json")
    assert DecisionBody.model_validate(json.loads(block)).decision == "approve"


def test_the_rights_of_the_page_are_those_of_the_definitions() -> None:
    """With which the program of the examples is run, elsewhere."""
    _, drain = (rights(block) for block in blocks(CONSUMING, "sh"))
    shipped = json.loads((ROOT / "deploy/rabbitmq/definitions.json").read_text())
    (permission,) = (item for item in shipped["permissions"] if item["user"] == "drain")
    assert drain[1][1:] == [
        "drain",
        permission["configure"],
        permission["write"],
        permission["read"],
    ]
    (topic,) = (
        item
        for item in shipped["topic_permissions"]
        if item["user"] == "drain" and item["exchange"].endswith(".approvals")
    )
    assert drain[2][1:] == [
        "drain",
        topic["exchange"],
        topic["write"].replace("compose", "prod-vmss-a-1f0c33ab"),
        topic["read"],
    ]


async def test_the_rights_and_the_consumer_of_the_page_are_all_it_takes(own_broker: Broker) -> None:
    declaring, publishing, _, _ = (rights(block) for block in blocks(OPERATING, "sh"))
    consuming, _ = (rights(block) for block in blocks(CONSUMING, "sh"))
    url = f"amqp://{{}}:hunter2@127.0.0.1:{own_broker.port}/"
    for command in (*declaring, *consuming):
        await asyncio.to_thread(own_broker.ctl, *command)
    async with sink(url.format("imds-relay"), EXCHANGE) as maker:
        await delivered(maker, cloudevent("relay.ping"))
    for command in publishing:
        await asyncio.to_thread(own_broker.ctl, *command)
    async with (
        consumer(0, url.format("drainer")) as output,
        asyncio.timeout(60),
        sink(url.format("imds-relay"), EXCHANGE, declare="passive") as bus,
    ):
        assert await output.readline() == b"ready\n"
        for event in (
            cloudevent(),
            cloudevent(),
            cloudevent("relay.ping"),
            cloudevent("event.ended"),
        ):
            await delivered(bus, event)
        lines = [await output.readline() for _ in range(2)]
    names = ("event.scheduled", "event.ended")
    assert [line.decode().split() for line in lines] == [
        [f"io.imdsrelay.{name}.v1", EVENT_ID] for name in names
    ]


async def test_the_rights_of_the_page_are_enough_to_declare_both_directions_and_to_take_approvals(
    own_broker: Broker,
) -> None:
    declaring, _, both, taking = (rights(block) for block in blocks(OPERATING, "sh"))
    scope = "prod-vmss-a-1f0c33ab"
    parts = (*events_topology(EXCHANGE), *approvals_topology(EXCHANGE, scope))
    with contextlib.suppress(RuntimeError):  # there since another test
        await asyncio.to_thread(own_broker.ctl, *declaring[0])
    for command in both:
        await asyncio.to_thread(own_broker.ctl, *command)
    connection = Connection(URL(f"amqp://imds-relay:hunter2@127.0.0.1:{own_broker.port}/"), "test")
    await connection.connect()
    async with connection:
        await declare_topology(connection, parts, True)
        for command in taking:
            await asyncio.to_thread(own_broker.ctl, *command)
        await declare_topology(connection, parts, "passive")
        async with connection.channel() as channel:
            taken: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
            assert await (
                await channel.get_queue(f"{EXCHANGE}.approvals.{scope}", ensure=False)
            ).consume(taken.put)


async def test_a_stream_keeps_the_history_for_who_comes_late(own_broker: Broker) -> None:
    """The program runs twice. The second run starts after all events, and reads the same."""
    url = own_broker.amqp_url()
    names = ("event.scheduled", "event.updated", "event.ended")
    expected = [[str(offset), f"io.imdsrelay.{name}.v1"] for offset, name in enumerate(names)]
    async with sink(url, EXCHANGE) as bus, asyncio.timeout(60):
        await delivered(bus, cloudevent("relay.ping"))
        async with consumer(1, url) as early:
            assert await early.readline() == b"ready\n"
            for name in names:
                await delivered(bus, cloudevent(name))
            assert [(await early.readline()).decode().split() for _ in names] == expected
        async with consumer(1, url) as late:
            assert await late.readline() == b"ready\n"
            assert [(await late.readline()).decode().split() for _ in names] == expected


COUNTED = {
    "`reject(requeue=True)`": "reject",
    "the channel or connection closed": "close",
    "`nack(requeue=True)`": "nack",
}
"""What the page says of putting back, by the beginning of the row."""
LIMIT = 2


@pytest.mark.parametrize("row", COUNTED)
async def test_what_counts_towards_the_delivery_limit_is_what_the_page_says(
    own_broker: Broker, row: str
) -> None:
    """On the broker that is installed here."""
    major, minor = [
        int(number)
        for number in (await asyncio.to_thread(own_broker.ctl, "version")).split(".")[:2]
    ]
    (line,) = (line for line in CONSUMING.splitlines() if line.startswith(f"| {row}"))
    _, _, before, since, _ = (cell.strip() for cell in line.split("|"))
    says = since if (major, minor) >= (4, 3) else before
    delivered_so_often = await _deliveries(
        own_broker, f"limited.{COUNTED[row]}", COUNTED[row], most=2 * LIMIT + 2
    )
    assert says.startswith("counts") == (delivered_so_often == LIMIT + 1)
    assert says.startswith("**does not count**") == (delivered_so_often == 2 * LIMIT + 2)


async def _deliveries(broker: Broker, name: str, how: str, most: int) -> int:
    """How often one message is delivered until it is a dead letter; no more than so often."""
    connection = Connection(URL(broker.amqp_url()), "test")
    await connection.connect()
    async with connection:
        channel = await connection.channel()
        arguments: Arguments = {
            "x-queue-type": "quorum",
            "x-delivery-limit": LIMIT,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": f"{name}.dead",
        }
        await channel.declare_queue(f"{name}.dead", durable=True)
        await channel.declare_queue(name, durable=True, arguments=arguments)
        await channel.default_exchange.publish(aio_pika.Message(b""), name, timeout=60)
        for number in range(most):
            message = await _next_of(channel, name)
            if message is None:
                return number
            if how == "close":
                await channel.close()
                channel = await connection.channel()
            else:
                await (message.reject if how == "reject" else message.nack)(requeue=True)
    return most


async def _next_of(channel: AbstractChannel, name: str) -> AbstractIncomingMessage | None:
    """The message when it has come again; None when it is a dead letter."""
    queue, dead = (
        await channel.get_queue(name, ensure=False),
        await channel.get_queue(f"{name}.dead", ensure=False),
    )
    async with asyncio.timeout(60):
        while (message := await queue.get(fail=False)) is None:
            if await dead.get(fail=False, no_ack=True) is not None:
                return None
            await asyncio.sleep(0.02)
    return message


@asynccontextmanager
async def consumer(number: int, url: str) -> AsyncIterator[asyncio.StreamReader]:
    """A program of the page for consumers, and what it prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", blocks(CONSUMING, "python")[number]),
        env={**os.environ, "AMQP_URL": url},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        process.kill()
        await process.communicate()


def rights(block: str) -> list[list[str]]:
    """The arguments of each `rabbitmqctl` of a block, with passwords filled in."""
    commands = (
        shlex.split(re.sub(r"\$\w+_PASSWORD", "hunter2", line)) for line in block.splitlines()
    )
    return [arguments for program, *arguments in commands if program == "rabbitmqctl"]
