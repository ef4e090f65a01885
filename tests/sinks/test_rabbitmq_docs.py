"""docs/rabbitmq.md and docs/consumers.md: their rights, programs and tables are right."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import aio_pika
import pytest
from aio_pika.abc import AbstractIncomingMessage
from aiormq.exceptions import ChannelAccessRefused
from ruamel.yaml import YAML
from yarl import URL

from docs import generate
from relay.amqp.connection import open_connection
from relay.amqp.publisher import routing_key
from relay.amqp.topology import approvals_queue, declare_topology, events_topology
from relay.approvals.request import DecisionBody
from relay.config import Config
from relay.sinks.rabbitmq import Settings
from tests.builders import cloudevent
from tests.documented import block, blocks
from tests.programs import running
from tests.rabbitmq import Broker
from tests.sinks.rabbitmq_consumer import delivered, message_properties, sink

ROOT = Path(__file__).parents[2]
OPERATING, CONSUMING = (
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("rabbitmq.md", "consumers.md")
)
EXCHANGE = "azure.scheduledevents"


VHOST = "prod"
"""The virtual host that the pages name."""
SCOPE = "prod-vmss-a-1f0c33ab"
"""The scope that the pages name."""
PASSWORDS = {f"{name}_PASSWORD": "hunter2" for name in ("RELAY", "DRAINER", "HISTORIAN", "DRAIN")}
USERS = ("imds-relay", "drainer", "historian", "drain", "imds-hub", "vmss-web")
DECLARING, PUBLISHING = blocks("docs/rabbitmq.md", "sh", "Rights")
BOTH_WAYS, TAKING = blocks("docs/rabbitmq.md", "sh", "Approvals in")
CONSUMER_RIGHTS, STREAM_RIGHTS, DRAIN_RIGHTS = blocks("docs/consumers.md", "sh", "Rights")
CONSUMER = (sys.executable, "-c", block("docs/consumers.md", "python", "A consumer"))
STREAM = (sys.executable, "-c", block("docs/consumers.md", "python", "Queue or stream"))


@pytest.fixture
def prod(own_broker: Broker) -> Broker:
    """A broker without the virtual host and the users of the pages."""
    own_broker.forget_virtual_host(VHOST, *USERS)
    return own_broker


def url_of(broker: Broker, user: str) -> str:
    """The URL of a user of the pages, in their virtual host."""
    return f"amqp://{user}:hunter2@127.0.0.1:{broker.port}/{VHOST}"


async def run_commands(broker: Broker, folder: Path, *commands: str) -> None:
    """Run commands of the pages as they are printed."""
    await asyncio.to_thread(broker.run_commands, "\n".join(commands), folder, **PASSWORDS)


def test_the_sections_of_the_page_are_a_configuration() -> None:
    publishing, taking = (
        YAML(typ="safe", pure=True).load(text) for text in blocks("docs/rabbitmq.md", "yaml")
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


def test_the_decision_of_the_page_is_one() -> None:
    text = block("docs/consumers.md", "json", "Approving")
    assert DecisionBody.model_validate(json.loads(text)).decision == "approve"


@pytest.mark.timeout(600)  # each of its 20 commands of RabbitMQ takes a second of CPU time
async def test_the_rights_and_programs_of_the_pages_suffice(prod: Broker, tmp_path: Path) -> None:
    """In a virtual host with a name, and with a sink that sends every type of event.

    The reader of the stream runs twice. The second run starts after all events, and reads the same.
    """
    await run_commands(prod, tmp_path, DECLARING)
    async with sink(url_of(prod, "imds-relay"), EXCHANGE) as maker:
        await delivered(maker, cloudevent("relay.ping"))
    await run_commands(prod, tmp_path, PUBLISHING, CONSUMER_RIGHTS, STREAM_RIGHTS)
    events = list(generate.examples())
    async with (
        running(*CONSUMER, AMQP_URL=url_of(prod, "drainer")) as output,
        running(*STREAM, AMQP_URL=url_of(prod, "historian")) as early,
        asyncio.timeout(60),
        sink(url_of(prod, "imds-relay"), EXCHANGE, declare="passive") as bus,
    ):
        assert await output.readline() == b"ready\n"
        assert await early.readline() == b"ready\n"
        for event in (*events, *events):
            await delivered(bus, event)
        changes = [event for event in events if routing_key(event).startswith("event.")]
        lines = [(await output.readline()).decode().split() for _ in changes]
        assert lines == [[event.type, event.subject] for event in changes]
        kept = [[str(offset), event.type] for offset, event in enumerate((*events, *events))]
        assert [(await early.readline()).decode().split() for _ in kept] == kept
        async with running(*STREAM, AMQP_URL=url_of(prod, "historian")) as late:
            assert await late.readline() == b"ready\n"
            assert [(await late.readline()).decode().split() for _ in kept] == kept
    await _take_the_decision_of_the_page(prod, tmp_path)


async def _take_the_decision_of_the_page(prod: Broker, folder: Path) -> None:
    """Declare both directions, consume approvals and send one, with the rights for that alone."""
    parts = (*events_topology(EXCHANGE), *approvals_queue(EXCHANGE, SCOPE).topology)
    await run_commands(prod, folder, BOTH_WAYS)
    async with open_connection(URL(url_of(prod, "imds-relay")), "test") as connection:
        await declare_topology(connection, parts, True)
        await run_commands(prod, folder, TAKING, DRAIN_RIGHTS)
        await declare_topology(connection, parts, "passive")
        async with connection.channel() as channel:
            taken: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
            name = f"{EXCHANGE}.approvals.{SCOPE}"
            await (await channel.get_queue(name, ensure=False)).consume(taken.put)
            client = await aio_pika.connect(url_of(prod, "drain"))
            async with client, asyncio.timeout(60):
                own = await client.channel()
                await own.declare_queue("drain", durable=True, arguments={"x-queue-type": "quorum"})
                exchange = await own.get_exchange(f"{EXCHANGE}.approvals", ensure=False)
                decision = block("docs/consumers.md", "json", "Approving").encode()
                message = aio_pika.Message(decision, message_id="drained", user_id="drain")
                await exchange.publish(message, f"approve.{SCOPE}", mandatory=True)
                assert (await taken.get()).body == decision
                with pytest.raises(ChannelAccessRefused):
                    await exchange.publish(message, "approve.other", mandatory=True)


async def test_the_limits_and_definitions_of_pages_are_taken(prod: Broker, tmp_path: Path) -> None:
    (tmp_path / "broker-url").write_text(url_of(prod, "imds-hub"))
    hub = block("docs/fleet.md", "yaml", "1. The hub's configuration")
    (tmp_path / "hub.yaml").write_text(hub.replace("/etc/imds-relay", str(tmp_path)))
    for name in ("hub-password", "web-password"):
        (tmp_path / name).write_text("hunter2")
    program = tmp_path / "imds-relay"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m relay "$@"\n')
    program.chmod(0o755)
    await run_commands(
        prod,
        tmp_path,
        DECLARING.splitlines()[0],  # makes the virtual host
        f'PATH="{tmp_path}:$PATH"; export PYTHONPATH="{ROOT}"',
        block("docs/fleet.md", "sh", "2. Users, exchanges and queues"),
        block("docs/rabbitmq.md", "sh", "Limits of a fleet"),
    )
    definitions = json.loads((tmp_path / "fleet.json").read_text())
    assert [user["name"] for user in definitions["users"]] == ["imds-hub", "vmss-web"]
    assert {item["vhost"] for item in definitions["permissions"]} == {VHOST}
    agent = await aio_pika.connect(url_of(prod, "vmss-web"))
    async with agent, asyncio.timeout(60):
        reports = await (await agent.channel()).get_exchange(f"{EXCHANGE}.fleet", ensure=False)
        report = aio_pika.Message(b"{}", user_id="vmss-web")
        await reports.publish(report, "pulse.vmss-web-1f0c33ab.vmss-web_0", mandatory=True)
