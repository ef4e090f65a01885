"""``run`` as a process: exit codes, signals, and messages if it cannot run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from relay.simulator import VM, Plan, Setup, Simulator
from tests.cli.command import environment, read_until, run_process, run_program, start_process
from tests.eventually import eventually
from tests.store.open_store import file_names


@pytest.fixture
async def azure() -> AsyncIterator[Simulator]:
    async with Simulator(Setup(vms=(VM("vm-0"),))) as simulator:
        yield simulator


def configured(folder: Path, url: str, **sections: Any) -> Path:
    document = {
        "source": {"url": url},
        "store": {"path": str(folder / "relay.db")},
        "api": {"listen": "127.0.0.1:0"},
        **sections,
    }
    (folder / "relay.yaml").write_bytes(orjson.dumps(document))  # JSON is YAML
    (folder / "relay.yaml").chmod(0o600)
    return folder


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
async def test_a_signal_ends_it_with_0_within_ten_seconds(
    azure: Simulator, tmp_path: Path, stop: signal.Signals
) -> None:
    async with start_process("run", cwd=configured(tmp_path, azure.url)) as relay:
        log = await read_until(relay.stderr, " runs; ")
        began = time.monotonic()
        relay.send_signal(stop)
        out, err = await relay.communicate()
    assert (relay.returncode, out) == (0, b"")
    assert time.monotonic() - began < 10 + 15  # for a machine that stands still
    assert "Traceback" not in log + err.decode()
    assert "the configuration is relay.yaml" in log
    assert "no rule of approvals.rules can match event_source: [User]" in log


async def test_a_signal_ends_it_while_it_waits_for_the_metadata_service(tmp_path: Path) -> None:
    async with start_process("run", cwd=configured(tmp_path, "http://127.0.0.1:1")) as relay:
        await read_until(relay.stderr, "waiting for instance metadata")
        began = time.monotonic()
        relay.send_signal(signal.SIGTERM)
        _, err = await relay.communicate()
    assert relay.returncode == 0
    assert time.monotonic() - began < 10 + 15  # for a machine that stands still
    assert b"Traceback" not in err


async def test_with_a_wrong_configuration_nothing_is_started(tmp_path: Path) -> None:
    result = await asyncio.to_thread(
        run_process, "run", cwd=configured(tmp_path, "http://127.0.0.1:1", telemetry={"log": "xml"})
    )
    assert (result.code, result.out) == (2, "")
    problem = "telemetry.log: expected 'text' or 'json'; got 'xml'"
    assert result.err == f"imds-relay: relay.yaml:1: {problem}\n"
    assert file_names(tmp_path) == ["relay.yaml"]


async def test_a_second_relay_exits_with_1_and_a_remedy(azure: Simulator, tmp_path: Path) -> None:
    folder = configured(tmp_path, azure.url)
    async with start_process("run", cwd=folder) as first:
        await read_until(first.stderr, " runs; ")
        second = await asyncio.to_thread(run_process, "run", cwd=folder)
        assert first.returncode is None
    assert second.code == 1
    remedy = "stop it, or give this one a store.path of its own"
    last = second.err.splitlines()[-1]
    assert last == f"imds-relay: another relay holds {folder}/relay.db: {remedy}"


async def test_a_taken_port_exits_with_1_and_a_remedy(azure: Simulator, tmp_path: Path) -> None:
    """Not with 2: a service manager may try again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = await asyncio.to_thread(
            run_process, "run", cwd=configured(tmp_path, azure.url, api={"listen": address})
        )
    assert result.code == 1
    last = result.err.splitlines()[-1]
    assert last.startswith(f"imds-relay: api.listen: expected an address that is free, {address}: ")
    assert last.endswith("Another relay may be running here. If so, choose another address")


async def test_an_address_that_no_interface_has_exits_with_1_and_a_remedy(
    azure: Simulator, tmp_path: Path
) -> None:
    api = {"listen": "192.0.2.1:8080", "allow_http": True}
    folder = configured(tmp_path, azure.url, api=api)
    result = await asyncio.to_thread(run_process, "run", cwd=folder)
    assert result.code == 1
    assert result.err.splitlines()[-1] == (
        "imds-relay: api.listen: expected an address of this machine, no interface has that of "
        "192.0.2.1:8080. Choose another address, or make sure that the interface is up"
    )


# --- with telemetry.log: json every line is JSON, the last error included


def json_lines(text: str) -> list[dict[str, Any]]:
    """Return the log; every line must be an object."""
    lines = [orjson.loads(line) for line in text.splitlines()]
    for line in lines:
        assert line.keys() >= {"time", "level", "logger", "message"}
    return lines


async def test_the_environment_decides_about_the_form_of_errors_too(tmp_path: Path) -> None:
    (tmp_path / "relay.yaml").write_text("store: 7\ntelemetry: {log: text}\n")
    form = {"IMDS_RELAY_TELEMETRY__LOG": "json"}
    result = await asyncio.to_thread(run_process, "run", cwd=tmp_path, **form)
    (line,) = json_lines(result.err)
    assert line["message"].startswith("relay.yaml:1: store: expected")
    named = ("run", "--config", "absent.yaml")
    absent = await asyncio.to_thread(run_process, *named, cwd=tmp_path, **form)
    (line,) = json_lines(absent.err)
    assert line["message"].startswith("absent.yaml: expected a file that can be read")


_WITH_MISTAKES = """
import asyncio, sys, threading, warnings
from relay import app
from relay.cli import main

class Hostile:
    def __del__(self):
        raise ValueError("ignored\\nhere")

async def run(loaded, *_, **__):
    config = loaded.config
    Hostile()
    warnings.warn("old\\nthing")
    threading.Thread(target=lambda: 1 / 0).start()
    forgotten = asyncio.get_running_loop().create_future()
    forgotten.set_exception(OSError("forgotten"))
    del forgotten
    asyncio.get_running_loop().call_exception_handler({"message": "of asyncio"})
    async with asyncio.TaskGroup() as group:
        for text in ("first", f"second of {config.sinks[0].secrets[0].get_secret_value()}"):
            group.create_task(fail(text))

async def fail(text):
    raise RuntimeError(f"{text}\\nfailure")

app.run = run
main()
"""


@pytest.mark.parametrize("form", ["json", "text"])
async def test_all_that_python_says_has_the_form_of_the_log(tmp_path: Path, form: str) -> None:
    """The relay of this process has bugs of many kinds."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    sink = {"kind": "webhook", "name": "drain", "url": "https://x.example", "secrets": [secret]}
    folder = configured(tmp_path, "http://127.0.0.1:1", telemetry={"log": form}, sinks=[sink])
    (tmp_path / "mistakes.py").write_text(_WITH_MISTAKES)
    command = (sys.executable, "-W", "always", "mistakes.py", "run")
    result = await asyncio.to_thread(run_program, *command, cwd=folder)
    assert (result.code, result.out) == (1, "")
    assert secret not in result.err
    said = (
        "ignored",
        "old",
        "ZeroDivisionError",
        "forgotten",
        "of asyncio",
        "first",
        "second of …",
    )
    if form == "json":
        lines = json_lines(result.err)
        texts = [line["message"] + line.get("traceback", "") for line in lines]
        assert lines[-1]["message"].startswith("this is a bug in imds-relay, please report it")
    else:
        # A record begins with its time, and what continues it with a space.
        *texts, last = result.err.splitlines()
        assert all(text.startswith(("20", "    ")) for text in texts)
        assert last.startswith("imds-relay: this is a bug in imds-relay, please report it")
    for text in said:
        assert any(text in line for line in texts), text


async def test_the_level_decides_which_lines_there_are(azure: Simulator, tmp_path: Path) -> None:
    folder = configured(tmp_path, azure.url, telemetry={"level": "warning"})
    azure.schedule(Plan())
    async with start_process("run", cwd=folder) as relay:
        quiet = await read_until(relay.stderr, "no rule of approvals.rules")
        await eventually(lambda: bool(azure.calls))
        relay.send_signal(signal.SIGTERM)
        _, err = await relay.communicate()
    assert " info " not in quiet + err.decode()
    async with start_process(
        "run", cwd=folder, more={"IMDS_RELAY_TELEMETRY__LEVEL": "debug"}
    ) as relay:
        log = await read_until(relay.stderr, " runs; ")
        (url,) = re.findall(r"listens on (http://\S+)", log)
        async with aiohttp.ClientSession() as session, session.get(f"{url}/healthz"):
            await read_until(relay.stderr, " debug ")


async def test_a_stalled_reader_of_the_log_stops_no_relay(azure: Simulator, tmp_path: Path) -> None:
    """Nobody reads standard error, and its pipe is full."""
    source = {"url": azure.url, "interval": "500ms"}
    folder = configured(tmp_path, azure.url, telemetry={"level": "debug"}, source=source)
    reader, writer = os.pipe()
    with open(writer, "wb", buffering=0) as end:  # noqa: ASYNC230, PTH123  # a descriptor
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "relay", "run", cwd=folder, env=environment(), stderr=end
        )
    try:
        await eventually(lambda: len(azure.calls) > 3)  # it polls
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10 + 15):
            assert await process.wait() == 0
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
