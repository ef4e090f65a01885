"""What is shipped for a fleet works: configurations, the compose file and its broker."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from yarl import URL

from relay.config import Config, load
from relay.simulator import VM, Plan, Setup, Simulator
from relay.simulator.playbook import load_playbook
from tests.certificates import Authority
from tests.cli.command import run_process
from tests.eventually import eventually
from tests.journey.relay_process import client, inbox, relay, webhook
from tests.programs import command_of, running
from tests.rabbitmq import Broker
from tests.test_deploy import ROOT, node_with, read_yaml

FOLDER = ROOT / "deploy/compose/fleet"
AGENTS = ("agent-0", "agent-1", "agent-2")


# --- the examples in config/


@pytest.fixture
def example(tmp_path: Path) -> Any:
    """Return what loads an example, with secret files that exist."""
    certificate = Authority("hub").own

    def load_example(name: str, url: str) -> Config:
        text = (ROOT / f"config/{name}.yaml").read_text()
        (tmp_path / "broker-url").write_text(f"{url}\n")
        for file in ("tls.crt", "tls.key"):
            (tmp_path / file).write_bytes(certificate)
        (tmp_path / "relay.yaml").write_text(text.replace("/etc/imds-relay", str(tmp_path)))
        return load(tmp_path / "relay.yaml", {}).config

    return load_example


def test_the_examples_of_agent_and_hub_are_valid_and_belong_together(example: Any) -> None:
    agent = example("agent", "amqps://vmss-web:secret@broker.example.com/prod").fleet
    assert (agent.role, agent.url_user) == ("agent", "vmss-web")
    hub_config = example("hub", "amqps://imds-hub:secret@broker.example.com/prod")
    hub = hub_config.fleet
    assert (hub.role, hub.url_user) == ("hub", agent.hub_user)
    assert agent.exchange == hub.exchange
    assert "vmss-web" in {domain.user for domain in hub.domains}
    assert not hub_config.has_no_rule_for_user_events


# --- the compose file


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = read_yaml(ROOT / "deploy/compose/fleet.yml")["services"]
    return found


def configuration(name: str) -> Config:
    return load(FOLDER / f"{name}.yaml", {}).config


# --- the broker


def test_the_definitions_are_those_of_the_command_for_this_hub() -> None:
    """With the passwords that the URLs have."""
    committed = json.loads((FOLDER / "10-fleet.json").read_text())
    hashes = {user["name"]: user["password_hash"] for user in committed["users"]}
    for name in ("agent", "hub"):
        fleet = configuration(name).fleet
        assert fleet is not None
        url = fleet.broker_urls()[0]
        stored = base64.b64decode(hashes[url.user])
        digest = hashlib.sha256(stored[:4] + (url.password or "").encode()).digest()
        assert stored[4:] == digest
    options = [f"--password-hash={user}={text}" for user, text in hashes.items()]
    command = ("fleet", "definitions", "--json", "--config", str(FOLDER / "hub.yaml"), *options)
    result = run_process(*command)
    assert result.code == 0, result.err
    assert result.json == committed


@pytest.fixture(scope="module")
def compose_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """It imports a folder of definitions."""
    directory = tmp_path_factory.mktemp("fleet")
    definitions = directory / "definitions.d"
    definitions.mkdir()
    for file in FOLDER.glob("*.json"):
        (definitions / file.name).write_text(file.read_text())
    with node_with(directory, FOLDER / "rabbitmq.conf", definitions) as node:
        yield node


def on(node: Broker, url: URL) -> URL:
    """Return a URL of the compose file with the address of a node on this machine."""
    return url.with_host("127.0.0.1").with_port(node.port)


def url_of(name: str, services: dict[str, Any]) -> URL:
    """Return the URL with which a service of the compose file connects."""
    if name == "consumer":
        return URL(services[name]["environment"]["AMQP_URL"])
    fleet = configuration(name).fleet
    assert fleet is not None
    return fleet.broker_urls()[0]


# --- all of it


async def test_the_fleet_of_the_compose_file_tells_once_and_starts_by_one_agent(
    compose_node: Broker, services: dict[str, Any], tmp_path: Path
) -> None:
    """Agents, hub and consumer are as they are shipped, with addresses of this machine."""
    playbook = load_playbook(FOLDER / "playbook.yaml")
    async with AsyncExitStack() as stack:
        azure = await stack.enter_async_context(Simulator(playbook.azure))
        output = await stack.enter_async_context(
            running(
                *command_of("consumer.py", tmp_path),
                stops=True,
                AMQP_URL=str(on(compose_node, url_of("consumer", services))),
                QUEUE=services["consumer"]["environment"]["QUEUE"],
            )
        )
        assert await output.readline() == b"consuming example.events\n"
        hub = await stack.enter_async_context(
            relay(tmp_path / "hub", document("hub", compose_node))
        )
        await hub.start()
        for name, url in zip(AGENTS, azure.urls.values(), strict=True):
            shipped = document("agent", compose_node) | {"source": {"url": url}}
            agent = await stack.enter_async_context(relay(tmp_path / name, shipped))
            await agent.start()
        event = azure.schedule(Plan(type="Reboot", source="User", resources=("web_0",), lasts=None))
        async with asyncio.timeout(120):
            told = await lines_until(output, "event.started")
            azure.end(event)
            told += await lines_until(output, "event.ended")
        kinds = [line.split()[1] for line in told if event.event_id in line]
        changes = [kind for kind in kinds if kind.startswith("event.")]
        assert changes == ["event.scheduled", "event.started", "event.ended"]
        assert len(azure.start_requests) == 1


async def lines_until(output: asyncio.StreamReader, word: str) -> list[str]:
    """Read the output of a program up to the first line with a word."""
    lines = [(await output.readline()).decode()]
    while word not in lines[-1].split():
        lines.append((await output.readline()).decode())
    return lines


def document(name: str, node: Broker) -> dict[str, Any]:
    """Return a configuration of the compose file with addresses and folders of this machine."""
    text = (FOLDER / f"{name}.yaml").read_text()
    shipped: dict[str, Any] = YAML(typ="safe", pure=True).load(
        text.replace("@rabbitmq:5672/", f"@127.0.0.1:{node.port}/")
    )
    shipped["api"] = {"clients": shipped["api"].get("clients", [])}
    return shipped


# --- from plain relays to a fleet


async def test_a_vm_becomes_an_agent_and_each_is_told_once(
    compose_node: Broker, tmp_path: Path
) -> None:
    """The steps of docs/fleet.md: a hub with a paused sink, then an agent on the same store."""
    sinks = {"sinks": [{**webhook(""), "events": ["event.*"]}]}
    async with AsyncExitStack() as stack:
        azure = await stack.enter_async_context(Simulator(Setup(vms=(VM("web_0"),))))
        box = await stack.enter_async_context(inbox())
        sinks["sinks"][0]["url"] = box.url
        api = {"clients": [client()]}
        plain = {"scope": "web", "source": {"url": azure.url}, "api": api} | sinks
        vm = await stack.enter_async_context(relay(tmp_path / "vm", plain))
        await vm.start()
        before = azure.schedule(Plan(type="Reboot", resources=("web_0",), lasts=None))
        await eventually(lambda: box.types_of(before.event_id) == ["event.scheduled"])

        rule = {"name": "user", "match": {"event_source": ["User"]}, "approve": "automatic"}
        decides = {"api": api, "approvals": {"rules": [rule]}}
        shipped = document("hub", compose_node) | decides | sinks
        hub = await stack.enter_async_context(relay(tmp_path / "hub", shipped))
        await hub.start()
        assert (await hub.call("PUT", "/v1/approvals/mode", {"mode": "off"}))[0] == 200
        assert (await hub.call("POST", "/v1/sinks/drain/pause"))[0] == 200
        assert (await hub.call("POST", "/v1/sinks/drain/resume"))[0] == 200

        assert (await vm.call("PUT", "/v1/approvals/mode", {"mode": "off"}))[0] == 200
        assert await vm.stop() == 0
        while_away = azure.schedule(Plan(type="Freeze", resources=("web_0",), lasts=None))
        vm.document = document("agent", compose_node) | {"source": {"url": azure.url}}
        await vm.start()
        await eventually(lambda: box.types_of(while_away.event_id) == ["event.scheduled"])
        azure.cancel(before)
        await eventually(lambda: box.types_of(before.event_id)[-1] == "event.ended")
        assert box.types_of(before.event_id) == ["event.scheduled", "event.ended"]
        assert (await hub.call("PUT", "/v1/approvals/mode", {"mode": "on"}))[0] == 200
        event = azure.schedule(Plan(type="Reboot", source="User", resources=("web_0",), lasts=None))
        await azure.wait_until_approved(event, within=60)
