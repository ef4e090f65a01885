"""Which connections stay open when too many are open: nobody is shut out, and clients stay."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest

from relay.api.connections import Connection, ServerLimits
from tests.api.running_relay import RunningRelay, make_event, run_relay
from tests.certificates import SERVER
from tests.eventually import eventually

LONG = 600.0
DEADLINE = 20.0
MAXIMUM = 24
CROWDED = ServerLimits(
    max_connections=MAXIMUM,
    max_local_connections=MAXIMUM,
    idle_timeout=LONG,
    body_timeout=LONG,
    handshake_timeout=LONG,
)


@dataclass(slots=True)
class RawConnection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, path: str, key: str = "", more: bytes = b"") -> None:
        credentials = f"Authorization: Bearer bearer-test-key-of-{key}\r\n" if key else ""
        head = f"GET {path} HTTP/1.1\r\nHost: relay\r\n{credentials}\r\n"
        self.writer.write(head.encode() + more)
        await self.writer.drain()

    async def read_status(self) -> int:
        """Read an answer, of a stream its head alone; return the status."""
        async with asyncio.timeout(DEADLINE):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", head)
            await self.reader.readexactly(int(length[1]) if length else 0)
        return int(head.split(b" ", 2)[1])

    async def call(self, path: str, key: str = "") -> int:
        await self.send(path, key)
        return await self.read_status()

    async def is_open(self) -> bool:
        try:
            return await self.call("/healthz") == 200
        except (OSError, asyncio.IncompleteReadError):
            return False

    async def wait_until_closed(self) -> None:
        async with asyncio.timeout(DEADLINE):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                return


@dataclass(slots=True)
class Crowd:
    """A relay with room for few connections, and those that were opened."""

    relay: RunningRelay
    stack: AsyncExitStack
    path: Path

    async def connect(self, *, local: bool = False) -> RawConnection:
        if local:
            reader, writer = await asyncio.open_unix_connection(str(self.path))
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.relay.server.port)
        self.stack.callback(writer.close)
        return RawConnection(reader, writer)

    async def connect_as(self, client: str) -> RawConnection:
        """Open a connection whose last call is a good one of this client."""
        connection = await self.connect()
        assert await connection.call("/v1/events", client) in (200, 403)
        return connection

    async def assert_open_to_newcomers(self) -> None:
        """Check that strangers and clients get answers on new connections."""
        for path, key, status in (("/healthz", "", 200), ("/v1/events", "bob", 200)):
            connection = await self.connect()
            assert await connection.call(path, key) == status
            connection.writer.close()


@asynccontextmanager
async def crowd(folder: Path, limits: ServerLimits = CROWDED) -> AsyncIterator[Crowd]:
    path = folder / "relay.sock"
    async with run_relay(folder, limits=limits, socket=path) as relay, AsyncExitStack() as stack:
        await relay.observe(make_event())
        yield Crowd(relay, stack, path)


@pytest.fixture
async def crowded(tmp_path: Path) -> AsyncIterator[Crowd]:
    async with crowd(tmp_path) as crowded:
        yield crowded


async def test_at_the_maximum_the_oldest_without_a_good_call_gives_way(crowded: Crowd) -> None:
    stream = await crowded.connect()
    await stream.send("/v1/stream", "alice")
    assert await stream.read_status() == 200
    oldest = await crowded.connect_as("reader")
    kept = [await crowded.connect_as("bob") for _ in range(MAXIMUM - 2)]
    newcomer = await crowded.connect()
    assert await newcomer.call("/v1/events", "bob") == 200
    await oldest.wait_until_closed()
    assert all([await connection.is_open() for connection in kept])
    await crowded.assert_open_to_newcomers()
    await crowded.relay.decide("hold")
    frame = b""
    while b"approval.recorded" not in frame:
        frame = await asyncio.wait_for(stream.reader.readline(), DEADLINE)


async def test_who_waits_for_a_page_gives_way_to_newcomers(tmp_path: Path) -> None:
    """Otherwise a few keys that may only read could keep all connections."""
    limits = replace(CROWDED, max_large_answers=1, send_timeout=LONG)
    async with crowd(tmp_path, limits) as crowded:
        state = crowded.relay.server.state
        async with state.large_answer("client:reader"):
            waiting = await crowded.connect()
            await waiting.send("/v1/events", "reader")
            kept = [await crowded.connect_as("bob") for _ in range(MAXIMUM - 1)]
            newcomer = await crowded.connect()
            assert await newcomer.call("/v1/events", "bob") == 200
            await waiting.wait_until_closed()
            assert all([await connection.is_open() for connection in kept])


async def test_one_key_leaves_streams_to_others(crowded: Crowd) -> None:

    async def open_stream(client: str) -> int:
        connection = await crowded.connect()
        await connection.send("/v1/stream", client)
        return await connection.read_status()

    assert [await open_stream("reader") for _ in range(9)] == [200] * 8 + [429]
    assert await open_stream("bob") == 200


@pytest.mark.parametrize("pipelined", [b"", b"GET /", b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: "])
async def test_endless_requests_give_way_to_newcomers(
    pipelined: bytes, crowded: Crowd, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(MAXIMUM * 2):
        connection = await crowded.connect()
        if number % 2:
            await connection.send("/healthz", more=pipelined)
        else:
            head = b"POST /v1/approvals HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
            connection.writer.write(head)
    await crowded.assert_open_to_newcomers()
    said = f"the maximum of {MAXIMUM} connections is open: each new one replaces the oldest"
    assert caplog.text.count(said) <= 2  # one in a minute
    assert said in caplog.text


async def test_handshakes_that_never_end_give_way_to_newcomers(tmp_path: Path) -> None:
    files = {"cert_file": SERVER, "key_file": SERVER}
    connector = aiohttp.TCPConnector(ssl=False, limit=1)
    async with (
        run_relay(tmp_path, limits=CROWDED, tls=files) as relay,
        aiohttp.ClientSession(connector=connector) as client,
        AsyncExitStack() as stack,
    ):
        url = f"https://127.0.0.1:{relay.server.port}/v1/events"
        headers = {"Authorization": "Bearer bearer-test-key-of-bob"}
        before = _open_files()
        async with client.get(url, headers=headers) as response:
            assert response.status == 200
        for number in range(MAXIMUM * 2):
            _, writer = await asyncio.open_connection("127.0.0.1", relay.server.port)
            stack.callback(writer.close)
            writer.write(b"\x16\x03\x01"[: number % 4])
        await eventually(lambda: _open_files() <= before + 3 * MAXIMUM + 2)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as newcomer,
            newcomer.get(url, headers=headers) as response,
        ):
            assert response.status == 200


async def test_a_user_on_all_local_connections_shuts_nobody_out(crowded: Crowd) -> None:
    for number in range(MAXIMUM * 2):
        connection = await crowded.connect(local=True)
        if number % 2:
            assert await connection.call("/v1/events") == 200
    newcomer = await crowded.connect(local=True)
    assert await newcomer.call("/v1/events") == 200


async def test_a_peer_that_never_reads_does_not_keep_its_closed_connection(tmp_path: Path) -> None:
    """The rest of its last response is small, so the relay does not have to wait to write it."""
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        limits = ServerLimits(idle_timeout=0.5, send_timeout=2.0)
        async with run_relay(tmp_path, limits=limits) as relay:
            files_before = _open_files()
            deaf.connect(("127.0.0.1", relay.server.port))
            responses = relay.server.state.responses_by_status

            async def ask() -> None:
                count = responses[200]
                deaf.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await eventually(lambda: responses[200] > count)
                await asyncio.sleep(0.01)

            await ask()
            (transport,) = (
                found.transport
                for found in gc.get_objects()
                if isinstance(found, Connection) and found.transport is not None
            )
            while not transport.get_write_buffer_size():
                await ask()
            assert transport.get_write_buffer_size() < 65536
            del transport
            await eventually(lambda: _open_files() == files_before, within=DEADLINE)


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
