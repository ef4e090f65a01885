"""A real DHCP server on UDP that answers a DHCPDISCOVER as Azure's does: with option 245."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from ipaddress import IPv4Address

from typing_extensions import override

Packet = bytes
Answer = Callable[[Packet], list[Packet]]


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


class DhcpServer(asyncio.DatagramProtocol):
    def __init__(self, answer: Answer, client: tuple[str, int] | None) -> None:
        self.answer, self.client = answer, client
        self.requests: list[Packet] = []

    @override
    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self.transport = transport

    @override
    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.requests.append(data)
        for packet in self.answer(data):
            self.transport.sendto(packet, self.client or addr)


@contextlib.asynccontextmanager
async def run_dhcp_server(
    answer: Answer,
    *,
    address: tuple[str, int] = ("127.0.0.1", 0),
    client: tuple[str, int] | None = None,
) -> AsyncIterator[tuple[list[Packet], tuple[str, int]]]:
    """Run it, and yield the requests and its address. Answers go to ``client``, or the sender."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    bound.bind(address)
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: DhcpServer(answer, client), sock=bound
    )
    try:
        yield server.requests, bound.getsockname()
    finally:
        transport.close()
