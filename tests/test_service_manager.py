"""The service manager hears when the relay runs, that it is alive, and when it stops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from relay.process import report_to_service_manager
from relay.simulator import VM, Setup, Simulator
from tests.cli.command import read_until, start_process
from tests.cli.test_run import configured

LIFE = {"WATCHDOG_USEC": "20000"}
"""Asks for a sign of life every 5 ms."""


class Listener:
    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(address)

    async def receive(self) -> list[str]:
        """Wait for the next message, and return its lines."""
        async with asyncio.timeout(60):
            message = await asyncio.get_running_loop().sock_recv(self.socket, 4096)
        return message.decode().split("\n")

    async def receive_until(self, line: str) -> list[list[str]]:
        """Return every message up to the first that has this line."""
        messages = [await self.receive()]
        while line not in messages[-1]:
            messages.append(await self.receive())
        return messages

    def pending(self) -> list[str]:
        """Return the lines that have arrived and were not received yet."""
        lines: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                lines += self.socket.recv(4096).decode().split("\n")
        return lines


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Listener]:
    """Listens where NOTIFY_SOCKET of `reporting` points."""
    listener = Listener(str(tmp_path / "notify"))
    with listener.socket:
        yield listener


@asynccontextmanager
async def reporting(
    folder: Path, *, start_patience: float = 60, environment: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[asyncio.Event, asyncio.Event]]:
    """Report as a process with this environment does; yields the events `is_up` and `stop`."""
    is_up, stop = asyncio.Event(), asyncio.Event()
    variables = {"NOTIFY_SOCKET": str(folder / "notify"), **(environment or {})}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr("relay.process.START_PATIENCE", start_patience)
        async with report_to_service_manager(is_up, stop):
            yield is_up, stop


async def test_the_command_reports_its_start_its_life_its_reloads_and_its_stop(
    manager: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    async with (
        Simulator(Setup(vms=(VM("vm-0"),))) as azure,
        start_process("run", cwd=configured(tmp_path, azure.url)) as relay,
    ):
        await read_until(relay.stderr, " runs; ")
        *_, ready = await manager.receive_until("READY=1")
        assert ready == ["READY=1", "STATUS=Running"]
        for _ in range(3):
            await manager.receive_until("WATCHDOG=1")
        asked_at = time.monotonic_ns() // 1000
        relay.send_signal(signal.SIGHUP)
        *_, reloading = await manager.receive_until("RELOADING=1")
        assert reloading[2:] == ["STATUS=Reloading"]
        name, _, moment = reloading[1].partition("=")
        assert name == "MONOTONIC_USEC"
        assert asked_at <= int(moment) <= time.monotonic_ns() // 1000
        *_, ready = await manager.receive_until("READY=1")
        assert ready == ["READY=1", "STATUS=Running"]
        (tmp_path / "relay.yaml").write_text("scope: WRONG")
        relay.send_signal(signal.SIGHUP)
        await manager.receive_until("RELOADING=1")
        *_, ready = await manager.receive_until("READY=1")
        assert ready[1] == "STATUS=Running with an earlier configuration. The log says why."
        relay.send_signal(signal.SIGTERM)
        await manager.receive_until("STOPPING=1")
        _, err = await relay.communicate()
    assert relay.returncode == 0
    assert b"service manager" not in err


async def test_a_relay_that_waits_for_the_metadata_service_does_not_hold_up_the_boot(
    manager: Listener, tmp_path: Path
) -> None:
    async with reporting(tmp_path, start_patience=0.1) as (is_up, _):
        message = await manager.receive()
        assert message == ["READY=1", "STATUS=Starting. The log says what the relay waits for."]
        is_up.set()
        assert await manager.receive() == ["READY=1", "STATUS=Running"]


async def test_a_still_event_loop_sends_no_sign_of_life(manager: Listener, tmp_path: Path) -> None:
    mine = {"WATCHDOG_PID": str(os.getpid())}
    async with reporting(tmp_path, environment=LIFE | mine):
        assert await manager.receive() == ["WATCHDOG=1"]  # nothing is ready before it is
        manager.pending()
        time.sleep(0.2)  # noqa: ASYNC251  # it is the loop that must stand still
        assert manager.pending() == []
        assert await manager.receive() == ["WATCHDOG=1"]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "-1"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid() + 1)},
    ],
)
async def test_without_a_watchdog_for_this_process_there_is_no_sign_of_life(
    environment: dict[str, str], manager: Listener, tmp_path: Path
) -> None:
    async with reporting(tmp_path, environment=environment) as (is_up, stop):
        is_up.set()
        stop.set()
        messages = await manager.receive_until("STOPPING=1")
        assert ["WATCHDOG=1"] not in [*messages, manager.pending()]


@pytest.mark.parametrize("name", ["notify", "vsock:2:1234", "relative/path"])
async def test_a_socket_that_cannot_be_reached_is_named_in_the_log_and_changes_nothing(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = str(tmp_path / name) if name == "notify" else name
    async with reporting(tmp_path, environment=LIFE | {"NOTIFY_SOCKET": address}) as (is_up, _):
        is_up.set()
        async with asyncio.timeout(60):
            while not caplog.records:  # noqa: ASYNC110  # a log has no event
                await asyncio.sleep(0.02)
    assert "service manager cannot be told" in caplog.text
