"""``doctor`` of an agent and of a hub, on a RabbitMQ with the generated definitions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import SecretStr

from relay.fleet.rabbitmq_definitions import fleet_definitions, hash_password
from relay.fleet.settings import HubSettings, TrustDomain
from relay.simulator import VM, Setup, Simulator
from tests.cli.command import run_async
from tests.rabbitmq import Broker

VHOST = "doctor"
DOMAINS = (TrustDomain(user="a", scopes=("scope-a*",)),)


@pytest.fixture
def node(own_broker: Broker) -> Iterator[Broker]:
    settings = HubSettings(
        role="hub", url=SecretStr("amqp://h@127.0.0.1/"), declare="passive", domains=DOMAINS
    )
    hashes = dict.fromkeys(("imds-hub", "a"), hash_password("p", b"salt"))
    own_broker.define(fleet_definitions(settings, "imds-hub", VHOST, hashes))
    yield own_broker
    own_broker.forget_virtual_host(VHOST, *hashes)


def url(node: Broker, user: str) -> str:
    return f"amqp://{user}:p@127.0.0.1:{node.port}/{VHOST}"


async def fleet_findings(folder: Path, **document: Any) -> tuple[int, list[tuple[str, str]]]:
    """The exit code, and the state and text of each finding about the fleet."""
    sections = {
        "store": {"path": str(folder / "relay.db")},
        "api": {"listen": "127.0.0.1:0"},
        **document,
    }
    (folder / "relay.yaml").write_bytes(orjson.dumps(sections))
    (folder / "relay.yaml").chmod(0o600)
    result = await run_async("doctor", "--config", str(folder / "relay.yaml"), "--json")
    found = [(one["state"], one["said"]) for one in result.json if one["about"] == "fleet"]
    assert "metadata service" not in result.out or document["fleet"]["role"] == "agent"
    return result.code, found


async def test_an_agent_may_report_and_hear_the_hub(node: Broker, tmp_path: Path) -> None:
    async with Simulator(Setup(vms=(VM("vm-0"),))) as azure:
        source, fleet = {"url": azure.url}, {"role": "agent", "url": url(node, "a")}
        code, found = await fleet_findings(tmp_path, scope="scope-a1", source=source, fleet=fleet)
    queues = await asyncio.to_thread(node.ctl, "list_queues", "-p", VHOST, "name", "messages")
    assert "azure.scheduledevents.fleet.in\t0" in queues  # nothing was sent
    texts = (
        f"connected to 127.0.0.1:{node.port}",
        "the user may publish to azure.scheduledevents.fleet with the key pulse.scope-a1.vm-0",
        "the user may hear the hub",
    )
    assert (code, found) == (0, [("ok", text) for text in texts])


async def test_an_agent_of_another_domain_may_do_neither(node: Broker, tmp_path: Path) -> None:
    source = {"url": "http://127.0.0.1:1", "timeout": "1s"}
    fleet = {"role": "agent", "url": url(node, "a")}
    code, found = await fleet_findings(
        tmp_path, scope="scope-b1", relay="vm-0", source=source, fleet=fleet
    )
    assert code == 1
    assert [state for state, _ in found] == ["ok", "failed", "failed"]
    assert "the user may not publish with the key pulse.scope-b1.vm-0" in found[1][1]
    assert "the user may not hear the hub" in found[2][1]


async def test_a_hub_may_order_and_consume_and_needs_no_azure(node: Broker, tmp_path: Path) -> None:
    domains = [{"user": "a", "scopes": ["scope-a*"]}]
    fleet = {"role": "hub", "url": url(node, "imds-hub"), "declare": "passive", "domains": domains}
    code, found = await fleet_findings(tmp_path, fleet=fleet)
    assert (code, {state for state, _ in found}) == (0, {"ok"})
    said = [text for _, text in found]
    assert "queue azure.scheduledevents.fleet.in is there" in said
    assert said[-1] == (
        "the user may publish to azure.scheduledevents.commands with the key scope.scope-ax"
    )
