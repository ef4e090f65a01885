"""``doctor``: what it sees of real services, and that it leaves all of them as they were."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import aio_pika
import orjson
import pytest
from aiohttp import web
from aiormq.exceptions import ChannelAccessRefused
from yarl import URL

from relay.api.doctor import diagnose
from relay.api.settings import ApiSettings
from relay.config.model import NO_RULE_FOR_USER_EVENTS
from relay.imds.diagnostics import NOT_POLLED
from relay.simulator import VM, Setup, Simulator
from relay.store import StoreSettings
from relay.store.diagnostics import diagnose as diagnose_store
from relay.store.file import SCHEMA_VERSION
from tests.api.entra import run_entra
from tests.certificates import LOOPBACK
from tests.cli import test_run
from tests.cli.command import run_async, run_process, serve_handler
from tests.cli.running_relay import running_relay
from tests.imds.scripted_server import Answer, run_server
from tests.journey.bus import SCOPE, Bus
from tests.journey.relay_process import SECRET, rabbitmq
from tests.rabbitmq import Broker
from tests.sinks.http_receiver import Received, good, listening
from tests.store.open_store import IDENTITY, file_names, open_file_in

INSTANCE = b'{"compute": {"vmId": "02aab8a4-74ef-476e-8182-f6d2ba4166a6", "name": "db-0"}}'


@pytest.fixture
async def azure() -> AsyncIterator[Simulator]:
    async with Simulator(Setup(vms=(VM("db-0"),))) as simulator:
        yield simulator


def configured(folder: Path, url: str, **sections: Any) -> Path:
    """A folder with a configuration for that metadata service, and a rule for what users start."""
    rule = {"name": "user", "match": {"event_source": ["User"]}, "approve": "automatic"}
    usual = {"source": {"url": url, "timeout": "2s"}, "approvals": {"rules": [rule]}}
    return test_run.configured(folder, url, **usual | sections)


async def examined(folder: Path, *more: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The exit code, and what was found by what it is about."""
    result = await run_async("doctor", "--config", str(folder / "relay.yaml"), "--json", *more)
    findings: dict[str, list[dict[str, Any]]] = {}
    for finding in result.json:
        findings.setdefault(finding["about"], []).append(finding)
    return result.code, findings


def states(findings: dict[str, list[dict[str, Any]]]) -> set[str]:
    return {finding["state"] for group in findings.values() for finding in group}


async def test_all_is_well_and_nothing_was_made(azure: Simulator, tmp_path: Path) -> None:
    code, findings = await examined(configured(tmp_path, azure.url))
    assert code == 0
    assert states(findings) <= {"ok", "warning"}  # a build machine may have its folders in memory
    about = {"configuration", "secrets", "listener", "clock", "names"}
    assert findings.keys() >= about | {"state folder", "disk space", "state file"}
    assert file_names(tmp_path) == ["relay.yaml"]


async def test_the_feature_is_not_switched_on_unasked(azure: Simulator, tmp_path: Path) -> None:
    """The first GET of the document switches the feature on for the VM.

    See docs/protocol.md#polling-delays-reboots-by-users.
    """
    folder = configured(tmp_path, azure.url)
    _, findings = await examined(folder)
    assert [finding["said"] for finding in findings["scheduled events"]] == [NOT_POLLED]
    assert not [call for call in azure.calls if call.path.endswith("scheduledevents")]
    _, findings = await examined(folder, "--poll")
    (finding,) = findings["scheduled events"]
    assert finding["said"] == "the document holds 0 events"
    assert len([call for call in azure.calls if call.path.endswith("scheduledevents")]) == 1


async def test_a_table_for_people_has_a_remedy_behind_what_is_wrong(tmp_path: Path) -> None:
    folder = configured(tmp_path, "http://127.0.0.1:1", approvals={})
    result = await run_async("doctor", "--config", str(folder / "relay.yaml"))
    assert result.code == 1
    lines = {line.split()[0] for line in result.out.splitlines() if line}
    assert {"ok", "warning", "failed"} <= lines
    assert NO_RULE_FOR_USER_EVENTS in result.out
    assert "Remedy: this must run on an Azure VM, and nothing may block the way there" in result.out


async def test_a_metadata_service_that_answers_an_error_has_its_own_remedy(tmp_path: Path) -> None:
    async with run_server(Answer(b"", status=500)) as server:
        code, findings = await examined(configured(tmp_path, server.url))
    (finding,) = findings[f"metadata service {server.url}"]
    assert (code, finding["state"], "500" in finding["said"]) == (1, "failed", True)
    assert finding["remedy"] == "the relay tries again; if it goes on, check source.url"


@pytest.mark.parametrize(
    ("offset", "state"),
    [(0, "ok"), (20, "warning"), (-20, "warning"), (400, "failed"), (-400, "failed")],
    ids=["right", "20 s ahead", "20 s behind", "400 s ahead", "400 s behind"],
)
async def test_the_clock_is_compared_with_azures(tmp_path: Path, offset: int, state: str) -> None:
    def answer(_: Received) -> Answer:
        date = datetime.now(UTC) + timedelta(seconds=offset)
        return Answer(INSTANCE, headers={"Date": format_datetime(date, usegmt=True)})

    async with run_server(answer) as server:
        code, findings = await examined(configured(tmp_path, server.url))
    assert [finding["state"] for finding in findings["clock"]] == [state]
    assert code == (1 if state == "failed" else 0)


async def test_a_relay_that_runs_is_asked_how_it_is_and_keeps_its_file(tmp_path: Path) -> None:
    async with running_relay(tmp_path) as relay:
        await relay.run("approvals", "off")
        code, findings = await examined(tmp_path)
        (tmp_path / "relay.sock").chmod(0o600)
    assert code == 0
    assert findings["relay"][0]["said"] == f"one runs at {tmp_path}/relay.sock, and is ready"
    assert findings["scheduled events"][0]["said"] == "the running relay reads them"
    assert findings["approvals"][0]["said"] == "an operator has set them to off"
    assert "listener" not in findings


async def test_an_address_that_another_program_has_failed(azure: Simulator, tmp_path: Path) -> None:
    async with listening(good) as other:
        code, findings = await examined(
            configured(tmp_path, azure.url, api={"listen": f"127.0.0.1:{other.port}"})
        )
    assert (code, findings["listener"][0]["state"]) == (1, "failed")
    assert "no relay of this configuration" in findings["listener"][0]["said"]


async def test_receivers_are_reached_and_get_nothing(azure: Simulator, tmp_path: Path) -> None:
    def sink(name: str, **more: Any) -> dict[str, Any]:
        return {"kind": "webhook", "name": name, "secrets": [SECRET], "allow_http": True, **more}

    async with listening(good) as plain, listening(good, tls=True) as tls, listening(good) as proxy:
        sinks = [
            sink("plain", url=plain.url),
            sink("tls", url=tls.url, tls={"ca_file": str(LOOPBACK)}),
            sink("stranger", url=tls.url),
            sink("closed", url="http://127.0.0.1:1/t0ken"),
            sink("metadata", url="https://metadata.google.internal.invalid/t0ken"),
            sink("behind", url="http://127.0.0.1:1/", proxy=f"http://127.0.0.1:{proxy.port}"),
        ]
        code, findings = await examined(configured(tmp_path, azure.url, sinks=sinks))
        assert [receiver.requests for receiver in (plain, tls, proxy)] == [[], [], []]
    assert code == 1
    names = ("plain", "tls", "stranger", "closed", "metadata")
    plain_one, tls_one, stranger, closed, metadata = (findings[f"sink {name}"][0] for name in names)
    assert (plain_one["state"], tls_one["state"]) == ("ok", "ok")
    assert {each["state"] for each in (stranger, closed, metadata)} == {"failed"}
    assert findings["sink behind, its proxy"][0]["state"] == "ok"
    assert "good until" in tls_one["said"]
    assert "trusts: self-signed certificate" in stranger["said"]
    assert stranger["remedy"].startswith("name the CA that signed it in tls.ca_file")
    assert "Connection refused" in closed["said"]
    assert "cannot be looked up" in metadata["said"]
    assert "t0ken" not in orjson.dumps(findings).decode()


async def test_a_broker_is_looked_at_and_left_as_it_was(
    azure: Simulator, tmp_path: Path, broker: Broker, exchange: str
) -> None:
    url = broker.amqp_url()
    folder = configured(tmp_path, azure.url, sinks=[rabbitmq(url, exchange)])
    code, findings = await examined(folder)
    assert (code, states({"bus": findings["sink bus"]})) == (0, {"ok"})
    said = "\n".join(finding["said"] for finding in findings["sink bus"])
    assert f"exchange {exchange} is not there yet" in said
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await channel.declare_exchange(exchange, "topic", durable=True)
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(exchange, "#")
        _, findings = await examined(folder)
        assert await queue.get(fail=False) is None
    said = "\n".join(["", *(finding["said"] for finding in findings["sink bus"])])
    assert f"\nthe user may publish to {exchange} with the key event." in said


LEAST = {"configure": "^$", "write": r"^azure\.scheduledevents$"}
"""The rights of docs/rabbitmq.md for `declare: passive`, without the right to take approvals."""
QUEUE = f"azure.scheduledevents.approvals.{SCOPE}"


@pytest.mark.parametrize("read", [True, False], ids=["may read", "may not read"])
async def test_the_documented_rights_are_enough_for_a_broker_that_lets_nobody_look_without_a_right(
    azure: Simulator, tmp_path: Path, own_broker: Broker, read: bool
) -> None:
    """Since RabbitMQ 4.2.6 a user without a right sees nothing: doctor reports it as unknown.

    It is a warning only if the relay needs the right.
    """
    own_broker.add_user("least", "least", **LEAST, read=f"^{re.escape(QUEUE)}$" if read else "^$")
    await Bus(own_broker, "azure.scheduledevents").make()
    refuses = not read and await _is_refused(own_broker.amqp_url("least"))
    amqp = {"url": own_broker.amqp_url("least"), "declare": "passive"}
    sections = {"sinks": [{"kind": "rabbitmq", "name": "bus", **amqp}], "approvals": {"amqp": amqp}}
    _, findings = await examined(configured(tmp_path, azure.url, scope=SCOPE, **sections))
    found = findings["sink bus"] + findings["approvals.amqp"]
    lines = {finding["said"]: finding["state"] for finding in found}
    key = f"event.scheduled.none.{SCOPE}"
    assert lines[f"the user may publish to azure.scheduledevents with the key {key}"] == "ok"
    assert all(
        " is there" in each or "the user may publish" in each or each.startswith("connected")
        for each in lines
    )
    place = f"queue '{QUEUE}' in vhost '/'"
    refusal = f"ACCESS_REFUSED - configure access to {place} refused for user 'least'"
    unknown = f"queue {QUEUE} is there is unknown: the user has no right to look ({refusal})"
    others = [message for message, state in lines.items() if state != "ok"]
    assert others == ([f"whether {unknown}"] if refuses else [])


async def _is_refused(url: str) -> bool:
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        try:
            await channel.declare_queue(QUEUE, passive=True)
        except ChannelAccessRefused:
            return True
        return False


async def test_a_broker_whose_user_may_not_publish_or_that_is_gone_failed(
    azure: Simulator, tmp_path: Path, own_broker: Broker, exchange: str
) -> None:
    own_broker.add_user("reader", "secret-of-reader", write="^$")
    async with await aio_pika.connect(own_broker.amqp_url()) as connection:
        await (await connection.channel()).declare_exchange(exchange, "topic", durable=True)
    url = own_broker.amqp_url().replace("guest:guest", "reader:secret-of-reader")
    sinks = [rabbitmq(url, exchange) | {"declare": "passive"}]
    code, findings = await examined(configured(tmp_path, azure.url, sinks=sinks))
    messages = [finding["said"] for finding in findings["sink bus"] if finding["state"] == "failed"]
    assert code == 1
    assert any("may not publish" in message for message in messages)
    assert any(f"the broker has no exchange {exchange}.unrouted" in message for message in messages)
    assert "secret-of-reader" not in orjson.dumps(findings).decode()
    sinks[0]["url"] = url.replace("secret-of-reader", "wrong")
    _, findings = await examined(configured(tmp_path, azure.url, sinks=sinks))
    (finding,) = findings["sink bus"]
    assert "the broker refused user, password or certificate (" in finding["said"]
    assert finding["said"].endswith(")")
    assert finding["remedy"] == "correct the url"


def test_what_a_library_says_about_a_broker_that_is_gone_is_not_shown(tmp_path: Path) -> None:
    url = "amqp://guest:guest@127.0.0.1:1/"
    sinks = [{"kind": "rabbitmq", "name": "bus", "url": url}]
    configured(tmp_path, "http://127.0.0.1:1", sinks=sinks)
    result = run_process("doctor", "--json", cwd=tmp_path)
    (finding,) = (each for each in result.json if each["about"] == "sink bus")
    assert finding["said"] == "no connection to 127.0.0.1:1: Connection refused"
    assert finding["remedy"].startswith("correct the url, or check that the broker runs")
    assert result.err == ""


async def test_a_secret_that_everybody_can_read_is_a_warning_and_one_that_they_can_write_failed(
    azure: Simulator, tmp_path: Path
) -> None:
    secrets = tmp_path / "secrets"
    secrets.write_text(SECRET)
    client = {"name": "drain", "secrets_file": str(secrets), "key": "k" * 40}
    api = {"listen": "127.0.0.1:0", "clients": [client]}
    folder = configured(tmp_path, azure.url, api=api)
    for rights, expected in ((0o600, "ok"), (0o644, "warning"), (0o666, "failed")):
        secrets.chmod(rights)
        _, findings = await examined(folder)
        assert [finding["state"] for finding in findings["secrets"]] == [expected]
    secrets.chmod(0o600)
    (folder / "relay.yaml").chmod(0o644)
    _, findings = await examined(folder)
    assert [finding["state"] for finding in findings["secrets"]] == ["warning"]
    said = findings["secrets"][0]["said"]
    assert "the configuration, which holds the secret api.clients.0.key itself" in said


async def test_a_configuration_that_everybody_can_write_failed_though_it_holds_no_secret(
    azure: Simulator, tmp_path: Path
) -> None:
    file = configured(tmp_path, azure.url) / "relay.yaml"
    file.chmod(0o646)
    code, findings = await examined(tmp_path)
    assert (code, findings["configuration"][1]["state"]) == (1, "failed")
    expected = f"everybody on this machine can write {file}, and so control the relay"
    assert findings["configuration"][1]["said"] == expected
    assert findings["configuration"][1]["remedy"] == f"chmod o-w {file}"


OTHER = "UPDATE meta SET value = 'another' WHERE key = "
NEWER = SCHEMA_VERSION + 1


@pytest.mark.parametrize(
    ("change", "state", "said"),
    [
        (f"PRAGMA user_version = {NEWER}", "failed", f"{NEWER}, this relay knows {SCHEMA_VERSION}"),
        (f"{OTHER} 'vm_id'", "warning", "belongs to another VM"),
        (f"{OTHER} 'scope'", "warning", "belongs to another scope (another)"),
        ("DROP TABLE meta", "failed", "no such table"),
    ],
    ids=["newer version", "other VM", "other scope", "no table"],
)
def test_a_state_file_that_would_not_be_used_is_told_and_left_alone(
    tmp_path: Path, change: str, state: str, said: str
) -> None:
    path = tmp_path / "relay.db"
    with open_file_in(path) as file:
        file.connection.execute(change)
    before = path.read_bytes()
    settings = StoreSettings(path=path)
    findings = diagnose_store(settings, scope=IDENTITY.scope, vm_id=IDENTITY.vm_id)
    (finding,) = (each for each in findings if each.about == "state file")
    assert (finding.state, said in finding.said) == (state, True)
    assert path.read_bytes() == before
    assert not [name for name in file_names(tmp_path) if "set-aside" in name]


# --- the API

PEM = str(LOOPBACK)


@pytest.mark.parametrize(
    ("api", "about", "state", "said"),
    [
        ({"tls": {"cert_file": PEM, "key_file": PEM}}, "certificate", "ok", "its key can be used"),
        (
            {"tls": {"cert_file": "/nowhere/a.pem", "key_file": PEM}},
            "certificate",
            "failed",
            "api.tls: expected a certificate in PEM in /nowhere/a.pem",
        ),
        (
            {"listen": "192.0.2.1:8080"},
            "listener",
            "failed",
            "expected an address of this machine, no interface has that of 192.0.2.1:8080",
        ),
    ],
    ids=["certificate", "no certificate", "not our address"],
)
async def test_the_api_is_examined(api: dict[str, Any], about: str, state: str, said: str) -> None:
    section = {"listen": "127.0.0.1:0", "allow_http": True, **api}
    findings, is_running = await diagnose(ApiSettings.model_validate(section), Path("relay.db"))
    assert not is_running
    (finding,) = (each for each in findings if each.about == about)
    assert (finding.state, said in finding.line) == (state, True)


async def test_a_relay_that_is_not_ready_says_why() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"status": 503, "detail": "no answer from Azure"}, status=503)

    async with serve_handler(answer) as url:
        settings = ApiSettings.model_validate({"listen": URL(url).authority, "socket": None})
        findings, is_running = await diagnose(settings, Path("relay.db"))
    assert is_running
    assert (findings[0].about, findings[0].state) == ("relay", "failed")
    assert "is not ready: no answer from Azure" in findings[0].line


# --- signing in


@pytest.mark.parametrize(
    ("is_there", "state", "said"),
    [
        (True, "ok", "https://relay.example.com/sign-in/callback, which must be registered"),
        (False, "failed", "correct api.oidc.issuer"),
    ],
)
async def test_doctor_prints_the_redirect_uri_if_the_issuer_has_endpoints(
    is_there: bool, state: str, said: str
) -> None:
    async with run_entra() as entra:
        if not is_there:
            entra.answers["discovery"] = web.Response(status=404)
        section = {"listen": "127.0.0.1:0", "public_url": "https://relay.example.com/"}
        settings = ApiSettings.model_validate({**section, "oidc": entra.section()})
        findings, _ = await diagnose(settings, Path("relay.db"))
    (finding,) = (each for each in findings if each.about == "sign-in")
    assert (finding.state, said in finding.line) == (state, True)
