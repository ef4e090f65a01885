"""A real DHCP server on UDP that answers a DHCPDISCOVER as Azure's does: with option 245."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from ipaddress import IPv4Address

from tests.background_tasks import BackgroundTasks

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


@contextlib.asynccontextmanager
async def run_dhcp_server(
    answer: Answer,
    *,
    address: tuple[str, int] = ("127.0.0.1", 0),
    client: tuple[str, int] | None = None,
) -> AsyncIterator[tuple[list[Packet], tuple[str, int]]]:
    """Run it, and yield the requests and its address. Answers go to ``client``, or the sender."""
    loop, requests = asyncio.get_running_loop(), list[Packet]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.setblocking(False)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        bound.bind(address)

        async def serve() -> None:
            while True:
                request, sender = await loop.sock_recvfrom(bound, 65536)
                requests.append(request)
                for packet in answer(request):
                    await loop.sock_sendto(bound, packet, client or sender)

        async with BackgroundTasks(serve()):
            yield requests, bound.getsockname()
