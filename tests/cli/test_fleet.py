"""``fleet``: the agents that a hub has heard of, and the definitions for its RabbitMQ."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from relay.fleet.hub.hub import UPKEEP_INTERVAL
from relay.fleet.hub.roster import FRESH_FOR
from relay.fleet.messages import Pulse
from relay.fleet.rabbitmq_definitions import hash_password
from relay.fleet.routing import AuthorizedSender
from tests.api.measured_relay import run_measured_relay
from tests.api.running_relay import RunningRelay, run_relay
from tests.cli.command import CommandResult, run_async, run_command

URL = "amqp://imds-hub:topsecret@127.0.0.1/prod"
HUB = f"""\
fleet:
  role: hub
  url: {URL}
  declare: passive
  domains:
    - {{user: vmss-a, scopes: ["vmss-a-*"]}}
    - {{user: single, scopes: [vm-1, "vm-?"], relays: [one, "two_*"]}}
"""
ALSO = f"""\
sinks:
  - {{kind: rabbitmq, name: bus, url: "{URL}", declare: passive}}
  - {{kind: rabbitmq, name: other, url: "amqp://other:x@127.0.0.1/prod", exchange: other}}
approvals: {{amqp: {{url: "{URL}", declare: passive}}}}
"""
GOOD_HASH = hash_password("x", b"salt")


@pytest.fixture
def hub_yaml(tmp_path: Path) -> Path:
    file = tmp_path / "hub.yaml"
    file.write_text(HUB)
    return file


def test_the_rights_are_the_least_that_hub_and_agents_need(hub_yaml: Path) -> None:
    answer = run_command("fleet", "definitions", "--json", "--config", str(hub_yaml)).json
    assert answer["vhosts"] == [{"name": "prod"}]
    assert answer["users"] == []
    rights = {
        entry["user"]: (entry["vhost"], entry["configure"], entry["write"], entry["read"])
        for entry in answer["permissions"]
    }
    agent = (
        "prod",
        r"^amq\.gen-.*$",
        r"^(azure\.scheduledevents\.fleet|amq\.gen-.*)$",
        r"^(azure\.scheduledevents\.commands|amq\.gen-.*)$",
    )
    assert rights == {
        "imds-hub": (
            "prod",
            r"^(azure\.scheduledevents\.fleet\.hub|azure\.scheduledevents\.fleet\.in)$",
            r"^azure\.scheduledevents\.commands$",
            r"^azure\.scheduledevents\.fleet\.in$",
        ),
        "vmss-a": agent,
        "single": agent,
    }
    topics = {
        (entry["user"], entry["exchange"].rpartition(".")[2]): (entry["write"], entry["read"])
        for entry in answer["topic_permissions"]
    }
    a, single = "vmss-a-[a-z0-9-]*", "(vm-1|vm-[a-z0-9-])"
    kinds = r"((event|relay)\.[a-z-]+\.[a-z0-9_-]+|vote|start|pulse)"
    scopes = "(vmss-a-[a-z0-9-]*|vm-1|vm-[a-z0-9-])"
    relays = "(one|two_[a-z0-9_-]*)"
    assert topics == {
        ("imds-hub", "commands"): (rf"^(to\.{scopes}\.[a-z0-9_-]+|scope\.{scopes})$", "^$"),
        ("vmss-a", "fleet"): (rf"^{kinds}\.{a}\.[a-z0-9_-]+$", "^$"),
        ("vmss-a", "commands"): ("^$", rf"^(to\.{a}\.[a-z0-9_-]+|scope\.{a})$"),
        ("single", "fleet"): (rf"^{kinds}\.{single}\.{relays}$", "^$"),
        ("single", "commands"): ("^$", rf"^(to\.{single}\.{relays}|scope\.{single})$"),
    }


def test_the_hubs_user_keeps_the_rights_for_its_sinks_and_approvals_there(hub_yaml: Path) -> None:
    hub_yaml.write_text(HUB + ALSO)
    answer = run_command("fleet", "definitions", "--json", "--config", str(hub_yaml)).json
    hub = answer["permissions"][0]
    assert (hub["configure"], hub["write"]) == (
        r"^(azure\.scheduledevents\.fleet\.hub|azure\.scheduledevents\.fleet\.in)$",
        r"^(azure\.scheduledevents\.commands|azure\.scheduledevents)$",
    )
    assert r"|azure\.scheduledevents\.approvals\.hub)$" in hub["read"]
    assert "other" not in str(answer)
    names = ("unrouted", "dead", "fleet.in", "approvals.hub")
    queues = [entry["name"] for entry in answer["queues"]]
    assert queues == [f"azure.scheduledevents.{name}" for name in names]


def test_a_hub_that_makes_its_queues_gets_the_rights_to_and_a_hint(hub_yaml: Path) -> None:
    hub_yaml.write_text(HUB.replace("declare: passive", "declare: true"))
    result = run_command("fleet", "definitions", "--json", "--config", str(hub_yaml))
    hub = result.json["permissions"][0]
    for right in ("configure", "write", "read"):
        for name in ("fleet", r"fleet\.in", "commands", "dlx", "dead"):
            assert rf"azure\.scheduledevents\.{name}|" in f"{hub[right][:-2]}|"
    assert "needs only declare: passive" in result.err


def test_domains_that_overlap_are_warned_of_by_both_commands(hub_yaml: Path) -> None:
    assert run_command("fleet", "definitions", "--config", str(hub_yaml)).err == ""
    hub_yaml.write_text(HUB.replace('[vm-1, "vm-?"], relays: [one, "two_*"]', '["vmss-a-2-*"]'))
    for command in (("fleet", "definitions"), ("check",)):
        result = run_command(*command, "--config", str(hub_yaml))
        assert result.code == 0
        assert "warning: fleet.domains: vmss-a and single can speak for the same" in result.err
        assert "the patterns vmss-a-* and vmss-a-2-* match" in result.err


def test_a_hash_is_that_of_rabbitmq() -> None:
    """Salt and SHA-256 of salt and password: https://www.rabbitmq.com/docs/passwords."""
    salt = bytes.fromhex("908DC60A")
    expected = salt + hashlib.sha256(salt + b"test12").digest()
    assert hash_password("test12", salt) == base64.b64encode(expected).decode()
    assert hash_password("test12", salt) == "kI3GCqW5JLMJa4iX1lo7X4D6XbYqlLgxIs30+P6tENUV2POR"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--password-hash", "vmss-a"), "--password-hash: expected USER and a value with ="),
        (("--password-hash", "vmss-a=topsecret"), "expected a hash that RabbitMQ made for vmss-a"),
        (("--password-file", "vmss-a=/absent"), "can be read, /absent: No such file"),
        (("--password-hash", f"x={hash_password('x', b'salt')}"), "users of this fleet, x is none"),
        (("--hub-user", "vmss-a"), "--hub-user: expected a user of no domain, got 'vmss-a'"),
        (
            (f"--password-hash=single={GOOD_HASH}", f"--password-hash=single={GOOD_HASH}"),
            "expected one password for single, got two",
        ),
        (("--config", "absent.yaml"), "absent.yaml: expected a file that can be read"),
    ],
)
def test_wrong_options_are_refused(hub_yaml: Path, options: tuple[str, ...], error: str) -> None:
    result = run_command("fleet", "definitions", "--config", str(hub_yaml), *options)
    assert (result.code, result.out) == (2, "")
    assert error in result.err
    assert "topsecret" not in result.err


# --- agents


async def agents(relay: RunningRelay, *arguments: str) -> CommandResult:
    url, key = f"http://127.0.0.1:{relay.server.port}", "bearer-test-key-of-reader"
    return await run_async("fleet", "agents", *arguments, "--url", url, "--key", key)


async def test_the_agents_are_shown_and_scopes_of_which_nobody_is_heard(tmp_path: Path) -> None:
    async with run_measured_relay(tmp_path) as measured:
        relay, roster = measured.running, measured.hub.roster
        assert (await agents(relay)).out == "no agent has been heard of\n"
        roster.note_listening(relay.clock.now())
        pulse = Pulse(version="1.2", zone="2", names=(), live=(), poll_age=0.4, clock_offset=-1.5)
        for scope in ("vmss-a-1", "vmss-a-2"):
            sender = AuthorizedSender(scope, "vm-0", "vmss-a")
            roster.note_message(sender, "VM_0", relay.clock.now(), pulse)
        shown = (await agents(relay)).out
        row = r"vmss-a-1 +VM_0 +fresh +.* +1\.2 +2 +-1\.5 s +0 s before\n"
        assert re.search(row, shown)
        assert shown.endswith("2 agents in 2 scopes\n")
        assert "vmss-a-2" not in (await agents(relay, "--scope", "vmss-a-1")).out

        for _ in range(int(FRESH_FOR.total_seconds() / UPKEEP_INTERVAL) + 1):
            relay.clock.offset += UPKEEP_INTERVAL
            roster.note_listening(relay.clock.now())
        told = "no agent of scope vmss-a-2 is heard of: none of its events starts or ends\n"
        assert told in (await agents(relay)).out
        assert (await agents(relay, "--json")).json["silentScopes"] == ["vmss-a-1", "vmss-a-2"]


async def test_a_relay_that_is_no_hub_has_no_agents(tmp_path: Path) -> None:
    async with run_relay(tmp_path) as relay:
        result = await agents(relay)
    assert (result.code, "this relay is no hub: it has no agents" in result.err) == (1, True)
