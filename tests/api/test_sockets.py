"""Where the API listens: TCP, TLS, and the local socket with its users."""

from __future__ import annotations

import asyncio
import getpass
import os
import shutil
import socket
import ssl
import stat
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from relay.api.connections import ServerLimits
from relay.api.server import Server
from relay.api.settings import ApiSettings, automatic_socket
from relay.clock import SystemClock
from relay.errors import ConfigError
from tests.api.running_relay import make_event, over_socket, run_relay
from tests.certificates import AUTHORITY, CLIENT, IMPOSTOR, RENEWED, SERVER


@asynccontextmanager
async def _listening(
    limits: ServerLimits | None = None, *, state_file: Path | None = None, **settings: object
) -> AsyncIterator[Server]:
    api = ApiSettings.model_validate({"listen": "127.0.0.1:0", **settings})
    async with Server(api, SystemClock(), limits, state_file=state_file) as server:
        yield server


# --- the local socket


async def test_a_user_of_the_local_socket_may_do_all_under_their_own_name(tmp_path: Path) -> None:
    """Without rate limits. A callback must be signed there too."""
    user = f"local:{getpass.getuser()}"
    rule = {"name": "person", "approve": {"votes": 1, "from": [user]}}
    async with (
        run_relay(tmp_path, socket=tmp_path / "relay.sock", approvals={"rules": [rule]}) as relay,
        over_socket(tmp_path / "relay.sock") as local,
    ):
        await relay.observe(make_event())
        relay.clock.freeze_monotonic()
        decision = relay.decision_body()
        for method, path, body, status in (
            ("POST", "/v1/callbacks/drain", decision, 401),
            ("POST", "/v1/approvals", decision, 202),
            ("GET", "/metrics", None, 200),
            ("POST", "/v1/sinks/box/ping", None, 202),
            ("PUT", "/v1/approvals/mode", {"mode": "off"}, 200),
            *[("GET", "/v1/events", None, 200)] * 150,
        ):
            answer = await relay.call(method, path, body, by=None, session=local)
            assert answer.status == status, path
        (recorded,) = await relay.recorded_events("approval.recorded")
        assert (recorded["data"]["principal"], recorded["data"]["channel"]) == (user, "local")


async def test_the_local_socket_is_for_user_and_group_and_goes_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "relay.sock"
    before = os.umask(0)
    try:
        async with _listening(socket=path) as server:
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            assert server.address == f"http://127.0.0.1:{server.port} and {path}"
    finally:
        os.umask(before)
    assert not path.exists()


async def test_the_automatic_socket_is_beside_the_state_file_for_its_user(tmp_path: Path) -> None:
    """A group of a user may have many members, and who reaches the socket has every right."""
    path = tmp_path / "new" / "relay.sock"
    async with _listening(state_file=tmp_path / "new" / "relay.db") as server:
        assert server.address == f"http://127.0.0.1:{server.port} and {path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with over_socket(path) as session, session.get("http://relay/healthz") as response:
            assert response.status == 200
    assert not path.exists()


def test_each_state_file_has_a_socket_of_its_own_under_all_its_names(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "a.db")
    sockets = [automatic_socket(tmp_path / name).name for name in ("a.db", "b.db", "a.sqlite")]
    assert sockets == ["a.sock", "b.sock", "a.sqlite.sock"]
    assert automatic_socket(tmp_path / "link.db") == tmp_path / "a.sock"


@pytest.mark.parametrize(
    ("state_file", "reason"),
    [
        # Nobody can make a file in this folder, not even root.
        ("/proc/relay.db", "a path where a socket can be made, /proc/relay.sock"),
        (f"/proc/{'x' * 107}/relay.db", "a path of at most 107 bytes, the limit for a socket"),
    ],
)
async def test_without_a_place_for_the_automatic_socket_the_relay_runs_and_says_what_to_do(
    state_file: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with _listening(state_file=Path(state_file)) as server:
        assert server.address == f"http://127.0.0.1:{server.port}"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "there is no local socket, so the command line needs --url and a key" in warning
    assert reason in warning
    assert "Set api.socket to a path in a folder where this user may write, or to null" in warning


async def test_null_and_a_system_without_local_sockets_make_none_and_say_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with _listening(state_file=tmp_path / "relay.db", socket=None) as server:
        assert " and " not in server.address
    monkeypatch.delattr(socket, "AF_UNIX")
    async with _listening(state_file=tmp_path / "relay.db") as server:
        assert " and " not in server.address
    assert [*tmp_path.iterdir()] == []  # noqa: ASYNC240  # small
    assert not caplog.records


async def test_a_stale_socket_is_replaced_and_that_of_the_next_relay_stays(tmp_path: Path) -> None:
    path = tmp_path / "relay.sock"
    with socket.socket(socket.AF_UNIX) as left, socket.socket(socket.AF_UNIX) as other:
        left.bind(str(path))
        async with _listening(socket=path):
            async with over_socket(path) as session:
                assert (await session.get("http://relay/healthz")).status == 200
            path.unlink()
            other.bind(str(path))
        assert path.exists()


async def test_a_socket_with_a_listener_is_left_alone(tmp_path: Path) -> None:
    """One of the configuration is an error then; an automatic one is left out."""
    path = tmp_path / "relay.sock"
    async with _listening(socket=path):
        with pytest.raises(ConfigError, match=r"api\.socket: another relay listens on"):
            async with _listening(socket=path):
                pass
        async with _listening(state_file=tmp_path / "relay.db") as second:
            assert " and " not in second.address
        async with over_socket(path) as session:
            assert (await session.get("http://relay/healthz")).status == 200


@pytest.mark.parametrize("obstacle", ["file", "folder", "no folder", "link"])
async def test_a_path_that_cannot_be_a_socket_is_an_error(tmp_path: Path, obstacle: str) -> None:
    path = tmp_path / "relay.sock"
    match obstacle:
        case "file":
            path.write_text("precious")
        case "folder":
            path.mkdir()
        case "no folder":
            path = tmp_path / "missing" / "relay.sock"
        case _:
            (tmp_path / "precious").write_text("precious")
            path.symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match=r"api\.socket: expected"):
        async with _listening(socket=path):
            pass
    if obstacle == "file":
        assert path.read_text() == "precious"


# --- TCP


async def test_a_failed_start_leaves_nothing_open(tmp_path: Path) -> None:
    async with _listening() as taken:
        port = taken.port
    (tmp_path / "relay.sock").write_text("in the way")
    with pytest.raises(ConfigError):
        async with _listening(listen=f"127.0.0.1:{port}", socket=tmp_path / "relay.sock"):
            pass
    async with _listening(listen=f"127.0.0.1:{port}") as server:
        assert server.port == port


async def test_the_server_listens_on_all_addresses_of_a_name() -> None:
    async with _listening(listen="localhost:0") as server:
        results = await asyncio.get_running_loop().getaddrinfo(
            "localhost", server.port, type=socket.SOCK_STREAM
        )
        for *_, address in results:
            _, writer = await asyncio.open_connection(*address[:2])
            writer.close()
            await writer.wait_closed()


# --- TLS


def _client(certificate: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=AUTHORITY)
    if certificate is not None:
        context.load_cert_chain(certificate)
    return context


async def _status(server: Server, context: ssl.SSLContext) -> int:
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
        session.get(f"https://127.0.0.1:{server.port}/healthz") as response,
    ):
        return response.status


async def test_the_server_speaks_tls_and_no_old_one() -> None:
    old = _client()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    async with _listening(tls={"cert_file": SERVER, "key_file": SERVER}) as server:
        assert server.address == f"https://127.0.0.1:{server.port}"
        assert await _status(server, _client()) == 200
        with pytest.raises(aiohttp.ClientConnectorError):
            await _status(server, old)


async def test_callers_need_a_certificate_of_the_configured_ca() -> None:
    tls = {"cert_file": SERVER, "key_file": SERVER, "client_ca_file": AUTHORITY}
    async with _listening(tls=tls) as server:
        assert await _status(server, _client(CLIENT)) == 200
        for wrong in (None, IMPOSTOR):
            with pytest.raises(aiohttp.ClientError):
                await _status(server, _client(wrong))


async def test_a_renewed_certificate_is_used_at_once_and_a_broken_one_not(tmp_path: Path) -> None:
    certificate = tmp_path / "server.pem"
    shutil.copy(SERVER, certificate)
    async with _listening(tls={"cert_file": certificate, "key_file": certificate}) as server:
        first = await asyncio.to_thread(_serial, server.port)
        shutil.copy(RENEWED, certificate)
        second = await asyncio.to_thread(_serial, server.port)
        certificate.write_text("half of a")
        assert await asyncio.to_thread(_serial, server.port) == second != first
        certificate.unlink()
        assert await asyncio.to_thread(_serial, server.port) == second


def _serial(port: int) -> str:
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        _client().wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        certificate = secure.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


@pytest.mark.parametrize("part", ["cert_file", "key_file", "client_ca_file"])
@pytest.mark.parametrize("content", [None, b"no PEM"])
async def test_unusable_certificates_are_a_configuration_error(
    tmp_path: Path, part: str, content: bytes | None
) -> None:
    files = {"cert_file": SERVER, "key_file": SERVER, "client_ca_file": AUTHORITY}
    files[part] = tmp_path / "wrong.pem"
    if content is not None:
        files[part].write_bytes(content)
    with pytest.raises(ConfigError, match=rf"api\.tls.*: expected .*{files[part]}"):
        async with _listening(tls=files):
            pass


async def test_a_connection_without_tls_is_closed_soon(caplog: pytest.LogCaptureFixture) -> None:
    limits = ServerLimits(handshake_timeout=0.5)
    async with _listening(limits, tls={"cert_file": SERVER, "key_file": SERVER}) as server:
        for rubbish in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x00", b"", b"\xff" * 5000):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(rubbish)
            if not rubbish:
                writer.close()
            async with asyncio.timeout(60):
                await reader.read()
            writer.close()
        assert await _status(server, _client()) == 200
    assert "Traceback" not in caplog.text
