"""A program for a network namespace whose loopback has the addresses that no sink may reach.

A plain client reaches a listener on each of them. Then the guarded session tries to reach them in
every way. `test_webhook_egress` runs the program, which fails if an assertion does.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import tempfile
from pathlib import Path

from yarl import URL

from relay.errors import Deferred
from relay.net.http import Request, open_session, post
from tests.builders import cloudevent
from tests.sinks.webhook_sink import sink

PORT = 8080
ADDRESSES = (
    *("169.254.169.254", "168.63.129.16", "fd00:ec2::254", "64:ff9b::a9fe:a9fe"),
    *("64:ff9b:1::a9fe:a9fe", "2002:a9fe:a9fe::1", "2001:0:a9fe:a9fe::1", "2a01:db8::a9fe:a9fe"),
    *("2001:db8::5efe:a9fe:a9fe", "fe80::1"),
)
REACHED = (*ADDRESSES[:-1], "fe80::1%lo", "::ffff:169.254.169.254", "127.0.0.1")
HOSTS = """
127.0.0.1 localhost
169.254.169.254 metadata.test both.test three.test
168.63.129.16 host.test three.test
127.0.0.1 both.test
fd00:ec2::254 six.test three.test
::ffff:169.254.169.254 mapped.test
fe80::1 local.test
2002:a9fe:a9fe::1 tunnel.test
2a01:db8::a9fe:a9fe translated.test
"""
LITERALS = """
169.254.169.254 168.63.129.16 2852039166 0xa9fea9fe 0xA9.0xFE.0xA9.0xFE 0251.0376.0251.0376
169.254.43518 169.16689662 169.254.169.254.
[fd00:ec2::254] [fe80::1] [fe80::1%25lo] [fe80::1%lo] [64:ff9b::169.254.169.254]
[64:ff9b:1::169.254.169.254] [2002:a9fe:a9fe::1] [2001:0:a9fe:a9fe::1] [2a01:db8::a9fe:a9fe]
[2001:db8::5efe:169.254.169.254]
[::ffff:169.254.169.254] [::ffff:a9fe:a9fe] [0:0:0:0:0:ffff:a83f:8110]
"""
NAMES = """
metadata.test host.test six.test mapped.test local.test three.test tunnel.test
translated.test
"""


def prepare() -> None:
    """Give loopback the addresses, and names to them."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for address in ADDRESSES:
        options = ["nodad"] if ":" in address else []
        subprocess.run(["ip", "address", "add", address, "dev", "lo", *options], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".hosts", delete=False) as hosts:
        hosts.write(HOSTS)
    subprocess.run(["mount", "--bind", hosts.name, "/etc/hosts"], check=True)
    Path(hosts.name).unlink()


def opened() -> int:
    """How many TCP connections were started in this namespace, counted before the first packet."""
    lines = Path("/proc/self/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(dict(zip(names, values, strict=True))["ActiveOpens"])


async def connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A plain connection. The route of a new IPv6 address exists a moment after the address."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await asyncio.open_connection(address, PORT)
            except OSError:
                await asyncio.sleep(0.02)


async def tried(host: str) -> str:
    """What came of a guarded POST straight to that host."""
    async with open_session() as session:
        try:
            request = Request(url=URL(f"http://{host}:{PORT}/"), headers={}, body=b"")
            return str((await post(session, request, seconds=30)).status)
        except Deferred as deferred:
            return deferred.failure


async def delivered(name: str, proxy: str | None = None) -> str:
    """What came of the whole sink with a name in its URL."""
    async with sink(url=f"http://{name}:{PORT}/", proxy=proxy) as webhook:
        try:
            return str((await webhook.deliver(cloudevent())).status)
        except Deferred as deferred:
            return deferred.failure


async def main() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, ["0.0.0.0", "::"], PORT):
        for address in REACHED:
            reader, writer = await connected(address)
            writer.write(b"x")
            assert await reader.read(), address
            writer.close()
            await writer.wait_closed()
        for name in NAMES.split():
            assert socket.getaddrinfo(name, PORT), name
        before = opened()
        for host in LITERALS.split():
            assert await tried(host) in ("slow", "transient"), host
        for name in NAMES.split():
            assert await delivered(name) == "slow", name
        through = await delivered("drain.test", f"http://metadata.test:{PORT}")
        assert through in ("slow", "transient")
        assert opened() == before
        allowed = [await tried("127.0.0.1"), await tried("[::1]"), await delivered("both.test")]
        assert allowed == ["204"] * 3
        assert opened() == before + 3


if __name__ == "__main__":
    prepare()
    asyncio.run(main())
