"""Where the local socket is with ``api.socket: auto``, and what a relay does without a place."""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import pytest

from relay.api import ApiSettings, local_socket
from relay.api.local_socket import (
    MAX_PATH_BYTES,
    STATE_FILE_HEADER,
    SocketPathAndMode,
    automatic_places,
    socket_paths_of_state_file,
    state_file_id,
)
from relay.api.server import Server
from relay.clock import SystemClock

NOWHERE = Path("/proc/self/relay.db")
"""A state file in a folder where nobody can make a file, not even root."""


@asynccontextmanager
async def listening(state_file: Path) -> AsyncIterator[Server]:
    settings = ApiSettings(listen="127.0.0.1:0")
    async with Server(settings, SystemClock(), state_file=state_file) as server:
        yield server


async def status_over(path: Path, **headers: str) -> int:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
        session.get("http://relay/healthz", headers=headers) as response,
    ):
        return response.status


def test_the_folder_of_the_service_comes_first_where_it_can_be_written(tmp_path: Path) -> None:
    state_file = tmp_path / "state" / "relay.db"
    service_socket = tmp_path / "relay.sock"
    places = automatic_places(state_file, {}, service_socket=service_socket)
    beside = SocketPathAndMode(tmp_path / "state" / "relay.sock", 0o600)
    assert places == [SocketPathAndMode(service_socket, 0o660), beside]
    absent = tmp_path / "absent" / "relay.sock"
    assert automatic_places(state_file, {}, service_socket=absent) == [beside]


def test_root_does_not_take_the_place_of_the_service_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    places = automatic_places(tmp_path / "relay.db", {}, service_socket=folder / "relay.sock")
    assert [place.path for place in places] == [tmp_path / "relay.sock"]


def test_a_path_that_is_too_long_gives_way_to_the_folder_of_the_user() -> None:
    state_file = Path("/tmp") / ("x" * MAX_PATH_BYTES) / "relay.db"  # noqa: S108  # it is not made
    environment = {"XDG_RUNTIME_DIR": "/run/user/1000"}
    (only,) = socket_paths_of_state_file(state_file, environment)
    assert only.parent == Path("/run/user/1000")
    assert socket_paths_of_state_file(state_file, {}) == []
    other = socket_paths_of_state_file(state_file.with_name("other.db"), environment)
    assert other != [only]


def test_two_state_files_in_one_folder_have_two_sockets(tmp_path: Path) -> None:
    assert socket_paths_of_state_file(tmp_path / "a.db", {}) == [tmp_path / "a.sock"]
    assert socket_paths_of_state_file(tmp_path / "b.db", {}) == [tmp_path / "b.sock"]


async def test_the_socket_beside_the_state_file_is_for_the_user_of_the_relay_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of a user may have many members, and who reaches the socket has every right."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    path = tmp_path / "new" / "relay.sock"
    async with listening(tmp_path / "new" / "relay.db") as server:
        assert server.address.endswith(f" and {path}")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert await status_over(path) == 200
    assert not path.exists()


async def test_a_second_relay_leaves_the_socket_of_the_first_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_file = tmp_path / "relay.db"
    with TemporaryDirectory() as runtime:  # its path is short
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        async with listening(state_file) as one:
            assert one.address.endswith(f" and {tmp_path}/relay.sock")
            async with listening(state_file) as two:
                assert f" and {runtime}/imds-relay-" in two.address
            assert await status_over(tmp_path / "relay.sock") == 200


async def test_without_a_place_for_the_socket_the_relay_runs_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with caplog.at_level(logging.WARNING):
        async with listening(NOWHERE) as server:
            assert " and " not in server.address
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{server.port}/healthz") as response,
            ):
                assert response.status == 200
    records = [record for record in caplog.records if record.name.startswith("relay.")]
    (warning,) = [record.getMessage() for record in records]
    assert "there is no local socket, so the command line needs --url and a key" in warning
    assert "Set api.socket to a path in a folder where this user may write, or to null" in warning


async def test_null_and_a_system_without_local_sockets_make_none_and_say_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    none = ApiSettings.model_validate({"listen": "127.0.0.1:0", "socket": None})
    async with Server(none, SystemClock(), state_file=tmp_path / "relay.db") as server:
        assert " and " not in server.address
    monkeypatch.delattr(socket, "AF_UNIX")
    assert not local_socket.supports_local_sockets()
    async with listening(tmp_path / "relay.db") as server:
        assert " and " not in server.address
    assert [*tmp_path.iterdir()] == []  # noqa: ASYNC240  # small
    assert not caplog.records


async def test_a_call_that_is_meant_for_another_relay_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    state_file = tmp_path / "relay.db"
    async with listening(state_file):
        for meant, status in ((state_file, 200), (tmp_path / "other.db", 421)):
            headers = {STATE_FILE_HEADER: state_file_id(meant)}
            assert await status_over(tmp_path / "relay.sock", **headers) == status
