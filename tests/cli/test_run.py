"""``run`` as a process: exit codes, signals, and messages if it cannot run."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from relay.simulator import VM, Setup, Simulator
from tests.cli.command import file_names, read_until, run_process, start_process


@pytest.fixture
async def azure() -> AsyncIterator[Simulator]:
    """A metadata service."""
    async with Simulator(Setup(vms=(VM("vm-0"),))) as simulator:
        yield simulator


def configured(folder: Path, url: str, **sections: Any) -> Path:
    """A folder with a configuration for that metadata service."""
    document = {
        "source": {"url": url},
        "store": {"path": str(folder / "relay.db")},
        "api": {"listen": "127.0.0.1:0"},
        **sections,
    }
    (folder / "relay.yaml").write_bytes(orjson.dumps(document))  # JSON is YAML
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


async def test_the_log_is_json_where_the_configuration_says_so(
    azure: Simulator, tmp_path: Path
) -> None:
    async with start_process(
        "run", cwd=configured(tmp_path, azure.url, telemetry={"log": "json"})
    ) as relay:
        log = await read_until(relay.stderr, " runs; ")
        relay.send_signal(signal.SIGTERM)
        _, err = await relay.communicate()
    for line in (log + err.decode()).splitlines():
        assert orjson.loads(line).keys() >= {"time", "level", "logger", "message"}


async def test_with_a_wrong_configuration_nothing_is_started(tmp_path: Path) -> None:
    result = await asyncio.to_thread(
        run_process, "run", cwd=configured(tmp_path, "http://127.0.0.1:1", telemetry={"log": "xml"})
    )
    assert (result.code, result.out) == (2, "")
    assert (
        result.err
        == "imds-relay: relay.yaml:1: telemetry.log: expected 'text' or 'json'; got 'xml'\n"
    )
    assert file_names(tmp_path) == ["relay.yaml"]


async def test_a_configuration_that_was_named_and_is_not_there_exits_with_2(tmp_path: Path) -> None:
    result = await asyncio.to_thread(run_process, "run", "--config", "absent.yaml", cwd=tmp_path)
    assert (result.code, result.err) == (
        2,
        "imds-relay: absent.yaml: expected a file that can be read: No such file or directory\n",
    )


async def test_a_second_relay_on_the_same_state_file_exits_with_1_and_a_remedy(
    azure: Simulator, tmp_path: Path
) -> None:
    folder = configured(tmp_path, azure.url)
    async with start_process("run", cwd=folder) as first:
        await read_until(first.stderr, " runs; ")
        second = await asyncio.to_thread(run_process, "run", cwd=folder)
        assert first.returncode is None
    assert second.code == 1
    assert second.err.splitlines()[-1] == (
        f"imds-relay: another relay holds {folder}/relay.db: stop it, or give this one a "
        f"store.path of its own"
    )


async def test_a_port_that_is_taken_exits_with_1_and_a_remedy(
    azure: Simulator, tmp_path: Path
) -> None:
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


async def test_a_state_file_that_cannot_be_made_exits_with_1(
    azure: Simulator, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    folder = configured(tmp_path, azure.url, store={"path": str(tmp_path / "file" / "relay.db")})
    result = await asyncio.to_thread(run_process, "run", cwd=folder)
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith(
        "imds-relay: store.path: expected a folder that can be written"
    )
