"""What is shipped beside the package does what it says: broker definitions, the compose file, the example consumer."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from aio_pika.exceptions import ProbableAuthenticationError
from aiormq.exceptions import ChannelAccessRefused
from ruamel.yaml import YAML
from yarl import URL

from relay.config import load
from tests.rabbitmq import Broker

ROOT = Path(__file__).parent.parent
DEFINITIONS = ROOT / "deploy/rabbitmq/definitions.json"
MAIN = "azure.scheduledevents"
EXAMPLE_QUEUE = "example.events"

Arguments = dict[str, Any]


def read_yaml(path: Path) -> Any:
    """Parse a YAML file as plain dicts and lists."""
    return YAML(typ="safe", pure=True).load(path.read_text())


@pytest.fixture(scope="module")
def defined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A node that has loaded the definitions at its first start, as that of the compose file does."""
    directory = tmp_path_factory.mktemp("defined")
    with Broker(directory) as node:
        with (directory / "rabbitmq.conf").open("a") as configuration:
            configuration.write(f"load_definitions = {DEFINITIONS}\n")
        node.start()
        yield node


@asynccontextmanager
async def channel_of(node: Broker, user: str) -> AsyncIterator[AbstractChannel]:
    """Open a channel as one of the defined users, with the password that the definitions give."""
    async with await aio_pika.connect(url_of(node, user)) as connection:
        yield await connection.channel()


def url_of(node: Broker, user: str) -> str:
    """Return the URL of a defined user at the node."""
    passwords = {entry["name"]: entry["password"] for entry in json.loads(DEFINITIONS.read_text())["users"]}
    return str(URL.build(scheme="amqp", user=user, password=passwords[user], host="127.0.0.1", port=node.port, path="/"))


async def test_the_definitions_make_what_the_contract_names(defined: Broker) -> None:
    """Declaring anything again with the arguments of the contract succeeds, which RabbitMQ allows only where they are equal."""
    exchanges: tuple[tuple[str, str, Arguments], ...] = (
        (MAIN, "topic", {"alternate-exchange": f"{MAIN}.unrouted"}),
        (f"{MAIN}.unrouted", "fanout", {}),
        (f"{MAIN}.approvals", "topic", {}),
        (f"{MAIN}.dlx", "topic", {}),
    )
    queues: tuple[tuple[str, Arguments], ...] = (
        (f"{MAIN}.unrouted", {"x-max-length": 10_000}),
        (f"{MAIN}.dead", {"x-max-length": 10_000}),
        (EXAMPLE_QUEUE, {}),
    )
    async with channel_of(defined, "admin") as channel:
        for name, kind, arguments in exchanges:
            await channel.declare_exchange(name, kind, durable=True, passive=True)
            await channel.declare_exchange(name, kind, durable=True, arguments=arguments)
        for name, arguments in queues:
            await channel.declare_queue(name, passive=True)
            await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum", **arguments})


async def test_messages_find_the_defined_queues(defined: Broker) -> None:
    """What is told reaches the consumer, what nobody binds the unrouted queue, what is dead the dead queue."""
    async with channel_of(defined, "admin") as channel:
        example = await channel.get_queue(EXAMPLE_QUEUE)
        for exchange, key, target in (
            (MAIN, "event.scheduled.reboot.compose", EXAMPLE_QUEUE),
            (f"{MAIN}.dlx", "any.key", f"{MAIN}.dead"),
            (MAIN, "event.scheduled.reboot.compose", f"{MAIN}.unrouted"),
        ):
            if target == f"{MAIN}.unrouted":
                await example.unbind(MAIN, "#")
            there = await channel.get_exchange(exchange, ensure=False)
            await there.publish(aio_pika.Message(target.encode()), key, timeout=10)
            message = await (await channel.get_queue(target)).get(timeout=10)
            assert message.body == target.encode()
            await message.ack()
        await example.bind(MAIN, "#")


async def test_the_relay_may_publish_and_look_and_nothing_else(defined: Broker) -> None:
    async with channel_of(defined, "relay") as channel:
        for exchange, kind in ((MAIN, "topic"), (f"{MAIN}.unrouted", "fanout")):
            await channel.declare_exchange(exchange, kind, passive=True)
        await channel.declare_queue(f"{MAIN}.unrouted", passive=True)
        there = await channel.get_exchange(MAIN, ensure=False)
        await there.publish(aio_pika.Message(b"told"), "event.scheduled.reboot.compose", timeout=10)
        with pytest.raises(ChannelAccessRefused):
            await channel.declare_exchange("another", "topic", durable=True)
    async with channel_of(defined, "relay") as channel:
        queue = await channel.declare_queue(EXAMPLE_QUEUE, passive=True)
        with pytest.raises(ChannelAccessRefused):
            await queue.get(timeout=10)
    async with channel_of(defined, "admin") as channel:
        await (await channel.get_queue(EXAMPLE_QUEUE)).purge()


async def test_guest_is_not_let_in(defined: Broker) -> None:
    with pytest.raises(ProbableAuthenticationError):
        await aio_pika.connect(defined.amqp_url("guest"), timeout=10)


async def test_the_consumer_may_read_its_queue_and_not_publish_events(defined: Broker) -> None:
    async with channel_of(defined, "example") as channel:
        there = await channel.get_exchange(MAIN, ensure=False)
        with pytest.raises(ChannelAccessRefused):
            await there.publish(aio_pika.Message(b"forged"), "event.scheduled.reboot.compose", timeout=10)


def event(number: int, change: str = "event.scheduled", **data: object) -> dict[str, object]:
    """Make a structured CloudEvent as it lies on the queue."""
    return {
        "specversion": "1.0",
        "id": f"{number:032x}",
        "source": "imds://compose",
        "type": f"io.imdsrelay.{change}.v1",
        "subject": "C7061BAC",
        "time": "2026-04-11T22:11:58Z",
        "data": {"eventType": "Reboot", "resources": ["vm-0", "vm-1"], "eventSource": "Platform", **data},
    }


async def test_the_example_consumer_prints_each_event_once(defined: Broker) -> None:
    """Repeats are dropped, what cannot be read is left out, and SIGTERM ends it in order."""
    environment = {**os.environ, "AMQP_URL": url_of(defined, "example")}
    consumer = await asyncio.create_subprocess_exec(
        sys.executable, ROOT / "examples/consumer.py", env=environment, stdout=asyncio.subprocess.PIPE
    )
    output = consumer.stdout
    assert output is not None
    try:
        async with asyncio.timeout(20), channel_of(defined, "relay") as channel:
            assert await output.readline() == f"consuming {EXAMPLE_QUEUE}\n".encode()
            there = await channel.get_exchange(MAIN, ensure=False)
            ended = json.dumps(event(2, "event.ended", outcome="completed")).encode()
            scheduled = json.dumps(event(1, notBefore="2026-04-11T22:26:58Z")).encode()
            for body in (scheduled, b"not JSON", b"[1]", b"{}", scheduled, ended):
                await there.publish(aio_pika.Message(body), "event.scheduled.reboot.compose", timeout=10)
            assert (await output.readline()).decode() == (
                "2026-04-11T22:11:58Z event.scheduled Reboot of vm-0, vm-1 started by Platform not before 2026-04-11T22:26:58Z [C7061BAC]\n"
            )
            assert (await output.readline()).decode() == (
                "2026-04-11T22:11:58Z event.ended Reboot of vm-0, vm-1 started by Platform outcome: completed [C7061BAC]\n"
            )
            consumer.send_signal(signal.SIGTERM)
            assert await consumer.wait() == 0
    finally:
        if consumer.returncode is None:
            consumer.kill()
            await consumer.wait()


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services of the compose file."""
    found: dict[str, Any] = read_yaml(ROOT / "docker-compose.yml")["services"]
    return found


@pytest.mark.parametrize("name", ["simulator", "relay", "consumer"])
def test_what_runs_our_image_has_no_rights_and_a_root_that_cannot_be_written(services: dict[str, Any], name: str) -> None:
    service = services[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service.get("user", "10001:10001") == "10001:10001"
    assert "USER 10001:10001\n" in (ROOT / "Dockerfile").read_text()


def test_every_mounted_file_exists_and_every_port_is_on_loopback(services: dict[str, Any]) -> None:
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (ROOT / source).exists()
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")


def test_the_compose_file_uses_the_users_of_the_definitions(services: dict[str, Any]) -> None:
    """URL and definitions agree on name and password, and the relay and the consumer each come as themselves."""
    users = {user["name"]: user["password"] for user in json.loads(DEFINITIONS.read_text())["users"]}
    relay = URL(read_yaml(ROOT / "deploy/compose/relay.yaml")["sinks"][0]["url"])
    consumer = URL(services["consumer"]["environment"]["AMQP_URL"])
    assert (relay.user, relay.password) == ("relay", users["relay"])
    assert (consumer.user, consumer.password) == ("example", users["example"])
    assert services["consumer"]["environment"]["QUEUE"] == EXAMPLE_QUEUE


async def test_the_simulator_of_the_compose_file_starts_with_the_command_given(services: dict[str, Any]) -> None:
    command = [*services["simulator"]["command"], "--port", "0"]
    simulator = await asyncio.create_subprocess_exec(sys.executable, "-m", "relay", *command, stdout=asyncio.subprocess.PIPE)
    assert simulator.stdout is not None
    try:
        async with asyncio.timeout(20):
            assert b"finds its IMDS at http://0.0.0.0:" in await simulator.stdout.readline()
            simulator.send_signal(signal.SIGTERM)
            await simulator.wait()
    finally:
        if simulator.returncode is None:
            simulator.kill()
            await simulator.wait()


def test_the_relay_of_the_compose_file_has_a_configuration_that_holds() -> None:
    config = load(ROOT / "deploy/compose/relay.yaml", {"IMDS_RELAY_STORE__PATH": "/var/lib/imds-relay/relay.db"}).config
    assert str(config.store.path) == "/var/lib/imds-relay/relay.db"
    assert not config.user_events_wait


def test_image_and_unit_keep_the_store_where_the_contract_says() -> None:
    unit = (ROOT / "deploy/systemd/imds-relay.service").read_text()
    assert "\nEnvironment=IMDS_RELAY_STORE__PATH=/var/lib/imds-relay/relay.db\n" in unit
    assert "\nEnvironment=IMDS_RELAY_API__SOCKET=/run/imds-relay/relay.sock\n" in unit
    image = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^\s+IMDS_RELAY_STORE__PATH=/var/lib/imds-relay/relay\.db$", image, re.MULTILINE)
