"""A real DHCP server on UDP that answers a DHCPDISCOVER as Azure's does: with option 245."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Address

from typing_extensions import override

Packet = bytes
Answer = Callable[[Packet], list[Packet]]


def options_of(packet: Packet) -> dict[int, bytes]:
    """Return the options of a message, read by other code than that under test."""
    found, rest = {}, packet[240:]
    while rest and rest[0] != 255:
        found[rest[0]] = rest[2 : 2 + rest[1]]
        rest = rest[2 + rest[1] :]
    return found


def offer(request: Packet, *options: tuple[int, bytes]) -> Packet:
    """Return a DHCPOFFER for a request, with these options in addition."""
    head = bytearray(request[:240])
    head[0] = 2
    head[16:20] = IPv4Address("10.9.8.4").packed
    encoded = b"".join(bytes((number, len(value))) + value for number, value in options)
    return bytes(head) + bytes((53, 1, 2)) + encoded + b"\xff"


def offer_endpoint(address: str) -> Answer:
    """Return what answers each request with option 245, between other options and padding."""
    packed = IPv4Address(address).packed
    return lambda request: [
        offer(request, (3, b"\x0a\x09\x08\x01"), (245, packed), (12, b"vm"))[:-1] + b"\x00\x00\xff"
    ]


@dataclass
class DhcpServer(asyncio.DatagramProtocol):
    """The server. ``answer`` returns the packets that follow a request."""

    answer: Answer
    client: tuple[str, int] | None = None
    """Where answers go; None: to the sender."""
    requests: list[Packet] = field(default_factory=list)
    transport: asyncio.DatagramTransport | None = None

    @override
    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.requests.append(data)
        assert self.transport is not None
        for packet in self.answer(data):
            self.transport.sendto(packet, self.client or addr)


@contextlib.asynccontextmanager
async def run_dhcp_server(
    answer: Answer,
    *,
    address: tuple[str, int] = ("127.0.0.1", 0),
    client: tuple[str, int] | None = None,
) -> AsyncIterator[tuple[DhcpServer, tuple[str, int]]]:
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    bound.bind(address)
    bound.settimeout(0)
    server = DhcpServer(answer, client)
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: server, sock=bound
    )
    server.transport = transport
    try:
        yield server, bound.getsockname()
    finally:
        transport.close()
