"""The shipped files work: broker definitions, compose file, unit file, example consumers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue
from aio_pika.exceptions import ChannelNotFoundEntity
from aiormq.exceptions import ChannelAccessRefused
from ruamel.yaml import YAML
from yarl import URL

from relay.amqp.connection import GuardedConnection
from relay.amqp.topology import approvals_queue, declare_topology, events_topology
from relay.app import start_relay
from relay.clock import SystemClock
from relay.config import Config
from relay.simulator import Plan
from tests.ports import reserve
from tests.programs import command_of, running
from tests.rabbitmq import Broker
from tests.relay_in_process import document_of, relay_in_process, simulated

ROOT = Path(__file__).parent.parent
DEFINITIONS = ROOT / "deploy/rabbitmq/definitions.json"
MAIN = "azure.scheduledevents"
EXAMPLE_QUEUE = "example.events"
VHOST, SCOPE = "scheduled-events", "compose"
APPROVALS = f"{MAIN}.approvals.{SCOPE}"

Arguments = dict[str, Any]


def read_yaml(path: Path) -> Any:
    """Parse a YAML file as plain dicts and lists."""
    return YAML(typ="safe", pure=True).load(path.read_text())


@contextlib.contextmanager
def node_with(directory: Path, shipped: Path, definitions: Path) -> Iterator[Broker]:
    """A node that loads definitions at its first start, as in the compose file."""
    with Broker(directory) as node:
        with (directory / "rabbitmq.conf").open("a") as configuration:
            place = f"/etc/rabbitmq/{definitions.name}"
            configuration.write(shipped.read_text().replace(place, str(definitions)))
        node.start()
        yield node


@pytest.fixture(scope="module")
def defined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    shipped = ROOT / "deploy/rabbitmq/rabbitmq.conf"
    with node_with(tmp_path_factory.mktemp("defined"), shipped, DEFINITIONS) as node:
        yield node


@asynccontextmanager
async def channel_of(node: Broker, user: str) -> AsyncIterator[AbstractChannel]:
    """Open a channel as one of the defined users, with the password that the definitions give."""
    async with await aio_pika.connect(url_of(node, user)) as connection:
        yield await connection.channel()


def url_of(node: Broker, user: str) -> str:
    """Return the URL of a defined user at the node."""
    return f"amqp://{user}:{passwords()[user]}@127.0.0.1:{node.port}/{VHOST}"


def passwords() -> dict[str, str]:
    users = json.loads(DEFINITIONS.read_text())["users"]
    return {user["name"]: user["password"] for user in users}


async def test_the_definitions_make_what_declare_true_makes(defined: Broker) -> None:
    """Nothing less, nothing more, nothing else, but for the queue of the example consumer."""
    await asyncio.to_thread(defined.ctl, "add_vhost", "made")
    await asyncio.to_thread(
        defined.ctl, "set_permissions", "--vhost", "made", "admin", ".*", ".*", ".*"
    )
    connection = GuardedConnection(URL(url_of(defined, "admin")).with_path("/made"), "test")
    await connection.connect()
    async with connection:
        topology = (*events_topology(MAIN), *approvals_queue(MAIN, SCOPE).topology)
        await declare_topology(connection, topology, declare=True)
    everything = json.loads(await asyncio.to_thread(defined.ctl, "export_definitions", "-"))
    found = {
        vhost: [_named(everything, kind, vhost) for kind in ("exchanges", "queues", "bindings")]
        for vhost in (VHOST, "made")
    }
    assert found["made"][0]
    assert found[VHOST] == found["made"]
    async with channel_of(
        defined, "admin"
    ) as channel:  # and a relay that declares finds nothing to differ
        for name in (f"{MAIN}.unrouted", f"{MAIN}.dead", APPROVALS, EXAMPLE_QUEUE):
            await channel.declare_queue(name, passive=True)


def _named(definitions: dict[str, Any], kind: str, vhost: str) -> list[dict[str, Any]]:
    """Return the entries of a virtual host without their owners, and without foreign queues."""
    mine = [
        {key: value for key, value in entry.items() if key != "vhost"}
        for entry in definitions[kind]
        if entry["vhost"] == vhost
    ]
    return sorted((each for each in mine if EXAMPLE_QUEUE not in json.dumps(each)), key=json.dumps)


async def test_only_who_may_send_for_this_scope_reaches_the_relays_queue(defined: Broker) -> None:
    """Topic permissions: drain may write approve.compose only, and nobody else may approve."""
    async with channel_of(defined, "drain") as channel:
        there = await channel.get_exchange(f"{MAIN}.approvals", ensure=False)
        await there.publish(
            aio_pika.Message(b"{}", user_id="drain"), f"approve.{SCOPE}", mandatory=True, timeout=60
        )
        with pytest.raises(ChannelAccessRefused, match=r"topic 'approve\.elsewhere'"):
            await there.publish(aio_pika.Message(b"{}"), "approve.elsewhere", timeout=60)
    for user, exchange, key in (
        ("drain", MAIN, "event.scheduled.reboot.compose"),
        ("example", f"{MAIN}.approvals", f"approve.{SCOPE}"),
        ("relay", f"{MAIN}.approvals", f"approve.{SCOPE}"),
        ("relay", MAIN, "event.scheduled.reboot.elsewhere"),
    ):
        async with channel_of(defined, user) as channel:
            there = await channel.get_exchange(exchange, ensure=False)
            with pytest.raises(ChannelAccessRefused):
                await there.publish(aio_pika.Message(b"forged"), key, timeout=60)
    async with channel_of(defined, "relay") as channel:
        taken: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        await (await channel.get_queue(APPROVALS, ensure=False)).consume(taken.put)
        async with asyncio.timeout(60):
            message = await taken.get()
        assert message.user_id == "drain"
        await message.reject(requeue=False)
    async with channel_of(defined, "admin") as channel:
        message = await _taken(await channel.get_queue(f"{MAIN}.dead"))
        assert message.body == b"{}"


async def _taken(queue: AbstractQueue) -> AbstractIncomingMessage:
    """Wait for the next message, and return it."""
    async with asyncio.timeout(60):
        while (message := await queue.get(fail=False, no_ack=True)) is None:  # noqa: ASYNC110  # a queue has no event
            await asyncio.sleep(0.02)
    return message


async def test_the_example_drains_and_approves_over_amqp(defined: Broker, tmp_path: Path) -> None:
    """The whole journey with the shipped files: definitions, configuration, program."""
    drained = tmp_path / "drained"
    program = running(
        *command_of("drain.py", tmp_path),
        stops=True,
        AMQP_URL=url_of(defined, "drain"),
        MACHINES="vm-*",
        DRAIN=f"sh -c 'echo $0 >>{drained}'",
    )
    document = read_yaml(ROOT / "deploy/compose/relay.yaml")
    document["sinks"][0]["url"] = document["approvals"]["amqp"]["url"] = url_of(defined, "relay")
    document["store"] = {"path": str(tmp_path / "relay.db")}
    document["api"]["listen"] = "127.0.0.1:0"
    async with simulated() as sim:
        document["source"]["url"] = sim.url
        async with program as output:
            assert await output.readline() == b"draining vm-* for drain\n"
            async with (
                asyncio.timeout(60),
                start_relay(Config.model_validate(document), SystemClock()),
            ):
                foreign = sim.schedule(Plan(type="Reboot", resources=("vm-0", "db-0"), lasts=None))
                event = sim.schedule(Plan(type="Reboot", resources=("vm-0",), lasts=None))
                await sim.wait_until_approved(event, within=60)
                told, answer = (
                    f"io.imdsrelay.{name}.v1 {event.event_id}"
                    for name in ("event.scheduled", "startrequest.accepted")
                )
                assert await output.readline() == f"drained and approved: {told}\n".encode()
                assert await output.readline() == f"answered: {answer}: done\n".encode()
                await _deleted_and_made_again(defined, "drain")
                another = sim.schedule(Plan(type="Reboot", resources=("vm-0",), lasts=None))
                await sim.wait_until_approved(another, within=60)
    assert drained.read_text() == "vm-0\nvm-0\n"
    assert not sim.event(foreign).approved


async def _deleted_and_made_again(node: Broker, queue: str) -> None:
    """The broker cancels the consumer of a deleted queue, and in RabbitMQ 4.3 a slow one."""
    async with channel_of(node, "admin") as channel:
        await channel.queue_delete(queue)
    async with asyncio.timeout(30):
        while True:
            async with channel_of(node, "admin") as channel:
                with contextlib.suppress(ChannelNotFoundEntity):
                    declared = await channel.declare_queue(queue, passive=True)
                    if declared.declaration_result.consumer_count:
                        return


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = read_yaml(ROOT / "docker-compose.yml")["services"]
    return found


def test_the_compose_file_uses_the_users_of_the_definitions(services: dict[str, Any]) -> None:
    """URLs and definitions agree on names, passwords and virtual host, and each comes as itself."""
    users = passwords()
    document = read_yaml(ROOT / "deploy/compose/relay.yaml")
    urls = {name: services[name]["environment"]["AMQP_URL"] for name in ("consumer", "drain")}
    urls |= {
        "relay": document["sinks"][0]["url"],
        "relay, approvals": document["approvals"]["amqp"]["url"],
    }
    for name, text in urls.items():
        url = URL(text)
        assert url.user == {"consumer": "example", "relay, approvals": "relay"}.get(name, name)
        assert (url.password, url.path) == (users[url.user], f"/{VHOST}")
    assert services["consumer"]["environment"]["QUEUE"] == EXAMPLE_QUEUE
    mounted = dict(volume.split(":")[:2][::-1] for volume in services["rabbitmq"]["volumes"])
    assert mounted["/etc/rabbitmq/conf.d/50-definitions.conf"] == "./deploy/rabbitmq/rabbitmq.conf"
    loaded = re.search(
        r"^load_definitions = (\S+)$",
        (ROOT / "deploy/rabbitmq/rabbitmq.conf").read_text(),
        re.MULTILINE,
    )
    assert loaded is not None
    assert mounted[loaded[1]] == f"./{DEFINITIONS.relative_to(ROOT)}"
    assert document["scope"] == SCOPE


@pytest.mark.parametrize("file", ["docker-compose.yml", "deploy/compose/fleet.yml"])
def test_our_image_has_no_rights_and_every_port_is_on_loopback(file: str) -> None:
    everybody = read_yaml(ROOT / file)["services"].values()
    ours = [service for service in everybody if "build" in service]
    assert len(ours) >= 4
    for service in ours:
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service.get("user", "10001:10001") == "10001:10001"
    ports = [port for service in everybody for port in service.get("ports", ())]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []
    image = (ROOT / "Dockerfile").read_text()
    assert "USER 10001:10001\n" in image
    assert "IMDS_RELAY_STORE__PATH=/var/lib/imds-relay/relay.db\n" in image


UNIT = ROOT / "deploy/systemd/imds-relay.service"


def test_the_unit_has_the_places_of_the_service_and_stops_before_what_the_relay_needs() -> None:
    """Systemd stops units in the reverse order of their start."""
    unit = re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE)
    assert {
        ("WorkingDirectory", "/var/lib/imds-relay"),
        ("StateDirectory", "imds-relay"),
        ("StateDirectoryMode", "0700"),
        ("RuntimeDirectory", "imds-relay"),
        ("RuntimeDirectoryMode", "0750"),
        ("UMask", "0077"),
        ("Type", "notify"),
        ("NotifyAccess", "main"),
        ("WatchdogSec", "2min"),
    } <= set(unit)
    needs = {"network.target", "network-online.target", "nss-lookup.target"}
    assert needs | {"rabbitmq-server.service"} <= {*dict(unit)["After"].split()}


async def test_the_relay_is_healthy_where_it_listens_and_not_elsewhere(
    services: dict[str, Any], tmp_path: Path
) -> None:
    (port,) = reserve(1)
    command = services["relay"]["healthcheck"]["test"][1]
    assert "8080" in command
    here = command.replace("8080", str(port))
    async with simulated() as sim:
        document = document_of(tmp_path, sim, api={"listen": f"127.0.0.1:{port}"})
        async with relay_in_process(sim, document):
            assert await _exit_code(here) == 0
        assert await _exit_code(here) != 0


async def _exit_code(command: str) -> int:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", command, env=environment, stderr=asyncio.subprocess.DEVNULL
    )
    return await process.wait()
