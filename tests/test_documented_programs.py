"""Programs, calls and commands of the documentation that have no test beside their subject."""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import re
import shlex
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from jsonschema import Draft202012Validator

from relay.clock import SystemClock
from relay.config import load
from relay.events.build import CATALOG, cloudevent_schema
from relay.events.timestamps import format_rfc3339
from relay.simulator import Plan, load_packaged_playbooks
from tests.builders import cloudevent
from tests.chat.teams_server import running_workflow
from tests.cli.command import run_async, run_process
from tests.documented import ROOT, block, blocks
from tests.eventually import eventually
from tests.journey.relay_process import call_api, client
from tests.programs import output_of
from tests.relay_in_process import document_of, relay_in_process, simulated

EVENT = "C7061BAC-AFDC-4513-B24B-AA5F13A16123"
"""The event of the pages."""
UNIT = ROOT / "deploy/systemd/imds-relay.service"
DAY = timedelta(days=1)


def test_the_event_of_the_readme_is_one_and_the_call_below_it_is_about_it() -> None:
    text = block("README.md", "json", "What the relay sends")
    event = json.loads(text)
    (definition,) = (known for known in CATALOG if known.type == event["type"])
    shown = cloudevent_schema(definition)
    shown["required"] = [name for name in shown["required"] if name in event]  # it is shortened
    shown["properties"]["data"]["required"] = [*event["data"]]
    Draft202012Validator(shown).validate(event)
    call = block("README.md", "sh", "What you send back")
    assert f'"eventId": "{event["data"]["eventId"]}"' in call
    assert f'"revision": "{event["data"]["revision"]}"' in call


@pytest.mark.skipif(shutil.which("curl") is None, reason="a call is one of curl")
async def test_the_calls_of_the_pages_do_what_the_pages_say(tmp_path: Path) -> None:
    """One relay for the HTTP API, the call of the README, and the commands of the page on Teams."""
    voters = [
        client("alice", key="a-first-key-for-tests-only"),
        client("db-drain", key="a-second-key-for-tests-only"),
    ]
    quorum = {"votes": 2, "from": ["client:alice", "client:db-drain"]}
    api = {"listen": "127.0.0.1:0", "socket": str(tmp_path / "relay.sock"), "clients": voters}
    async with simulated("db-0") as azure, running_workflow() as workflow:
        ops = {"kind": "teams", "name": "ops-teams", "url": workflow.url, "allow_http": True}
        rules = [{"name": "databases", "approve": quorum}]
        sections = {"sinks": [ops], "approvals": {"rules": rules}, "api": api}
        document = document_of(tmp_path, azure, scope="prod", relay="db-0", **sections)
        file = tmp_path / "relay.yaml"
        file.write_bytes(orjson.dumps(document))  # JSON is YAML
        async with relay_in_process(azure, load(file, {}).config) as relay:
            url = relay.url
            azure.schedule(Plan(type="Reboot", id=EVENT, resources=("db-0",), notice=900.0))
            await eventually(lambda: bool(workflow.cards))
            shown = (await run_async("show", EVENT, "--json", "-c", str(file))).json
            await _send_documented_call(url, shown["revision"])
            here = block("README.md", "sh", "What you send back")
            here = here.replace("http://127.0.0.1:8080", url)
            here = re.sub(r'("revision": )"\w+"', rf'\1"{shown["revision"]}"', here)
            here = f"KEY={voters[0]['key']}\n{here}"
            said = await asyncio.to_thread(output_of, "bash", "-euc", here)
            assert json.loads(said)["state"] == "granted"
            await _make_documented_hold(url)
            await _run_documented_freeze(file)
            for line in block("docs/chat/teams.md", "sh").splitlines():
                _, *arguments = line.partition("#")[0].split()
                result = await run_async(*arguments, "-c", str(file))
                assert "ops-teams" in result.out
                assert result.code == 0
            await eventually(
                lambda: any(
                    "relay.ping" in text or "test message" in text for text in workflow.card_texts
                )
            )


async def _make_documented_hold(url: str) -> None:
    """Send the request of docs/api.md with times from now on."""
    tomorrow = datetime.now(UTC) + DAY
    times = {"starts": format_rfc3339(tomorrow), "ends": format_rfc3339(tomorrow + 3 * DAY)}
    shown = block("docs/api.md", "http", "Standing holds")
    status, request, answer = await _send_request_of_page(url, shown, **times)
    assert status == 201
    assert request.items() <= answer.items()


async def _send_request_of_page(
    url: str, shown: str, **changed: str
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Send a request as a page shows it; return status, request and answer."""
    head, _, body = shown.partition("\n\n")
    line, *fields = head.splitlines()
    method, path, _ = line.split()
    headers = dict(field.split(": ", 1) for field in fields)
    headers["Authorization"] = "Bearer a-second-key-for-tests-only"
    request = json.loads(body)
    assert changed.keys() <= request.keys()
    request |= changed
    status, answer = await call_api(method, url + path, request, headers)
    return status, request, answer


async def _run_documented_freeze(file: Path) -> None:
    """Run the commands of docs/operations.md, the last one with the id that the first one made."""
    hold_id, said = "none", ""
    for line in block("docs/operations.md", "sh", "A change freeze").splitlines():
        _, *arguments = shlex.split(line.replace("0b1e6e4f", hold_id))
        result = await run_async(*arguments, "-c", str(file))
        assert result.code == 0, result.err
        said = result.out
        hold_id = re.findall(r"holds end (\w{8})", said)[0] if "add" in arguments else hold_id
    assert f"standing hold {hold_id} is ended" in said


async def _send_documented_call(url: str, revision: str) -> None:
    """Send the request of docs/api.md, and compare the answer with the one that is shown."""
    request = block("docs/api.md", "http", "Decide about an event")
    status, _, answer = await _send_request_of_page(url, request, revision=revision)
    assert status == 202
    shown = json.loads(block("docs/api.md", "json", "Decide about an event"))
    assert {name: answer[name] for name in shown if shown[name] != "…"} == {
        name: value for name, value in shown.items() if value != "…"
    }
    assert answer.keys() == shown.keys()


async def test_the_sink_of_the_page_delivers_a_line(tmp_path: Path) -> None:
    file = tmp_path / "syslog_of_the_page.py"
    file.write_text(block("docs/adding-a-sink.md", "python", "1. The module"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        module = importlib.import_module(file.stem)
    lines: list[bytes] = []

    async def collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(collect, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        settings = module.Settings(kind="syslog", name="log", host="127.0.0.1", port=port)
        event = cloudevent()
        async with module.connect(settings, SystemClock()) as sink:
            await sink.deliver(event)
        await eventually(lambda: lines == [event.body + b"\n"])


def test_the_chat_of_the_page_is_opened_like_the_one_that_tests_run() -> None:
    """Which tests/chat/test_installed_platform.py opens."""
    shown, *_ = ast.parse(block("docs/adding-a-sink.md", "python", "5. A chat")).body
    file = ROOT / "tests/chat/pinboard_platform.py"
    run = ast.parse(file.read_text()).body[-1]
    assert isinstance(run, ast.AsyncFunctionDef)
    assert ast.unparse(shown) == ast.unparse(run)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_private_authority_of_the_page_is_one_strict_clients_accept(tmp_path: Path) -> None:
    commands = block("docs/operations.md", "sh", "Private CAs")
    assert output_of("bash", "-euc", commands, cwd=tmp_path) == "drain.pem: OK\n"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_changes_of_the_unit_on_the_page_are_valid(tmp_path: Path) -> None:
    unit = tmp_path / "imds-relay.service"
    unit.write_text(
        re.sub(r"^(Exec\w+)=.*$", r"\1=/bin/true", UNIT.read_text(), flags=re.MULTILINE)
    )
    parts = tmp_path / "imds-relay.service.d"
    parts.mkdir()
    for number, text in enumerate(blocks("docs/operations.md", "ini")):
        (parts / f"{number}.conf").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in verified.stderr.splitlines() if "imds-relay" in line]
    assert said == []


async def test_the_simulation_of_the_page_prints_what_the_page_shows() -> None:
    """Faster than on the page, on another port, and with the times and the EventId of today."""
    shown = block("docs/simulator.md", "console").splitlines()
    first, second = (line.removeprefix("$ ").split()[1:] for line in shown if line[0] == "$")
    assert next(iter(load_packaged_playbooks())) in (await run_async(*first)).out
    command = [*second, "--once", "--port", "0"]
    command[command.index("60")] = "600"
    result = await asyncio.to_thread(run_process, *command)
    printed = [_without_times(line) for line in result.out.splitlines()]
    expected = [_without_times(line) for line in shown if line[0] != "$"]
    assert printed[: len(expected)] == expected


def _without_times(line: str) -> str:
    line = re.sub(r"(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d", "TIME", line)
    return re.sub(r":\d{4,5}$|[0-9A-F]{8}(-[0-9A-F]{4}){3}-[0-9A-F]{12}", "*", line)
