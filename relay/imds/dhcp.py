"""Asks DHCP for option 245: the address of the metadata service without a virtual network.

Source: the sample to which the events page links (docs/protocol.md#without-a-virtual-network).
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address
from pathlib import Path

from typing_extensions import override

BROADCAST = ("255.255.255.255", 67)
"""Where DHCP servers listen."""
CLIENT = ("0.0.0.0", 68)  # noqa: S104  # an answer to a broadcast comes to no address of its own
"""Where a DHCP client listens. Only root or CAP_NET_BIND_SERVICE may use this port."""
REPLY_TIMEOUT = 10.0
"""Seconds to wait for an answer, as in the sample."""
LEASE_FILES = (
    "/run/systemd/netif/leases/*",
    "/var/lib/dhcp/dhclient*.lease*",
    "/var/lib/dhclient/*.lease*",
    "/var/lib/dhcpcd/*.lease*",
)
"""Where DHCP clients of Linux keep what the server answered, as patterns."""
MAX_LEASE_BYTES = 1024 * 1024
"""This much of the end of a file of leases is read. dhclient appends each lease to its file."""

_OPTION = 245
_PADDING, _END = 0, 255
_DISCOVER, _REPLY = 1, 2
_COOKIE = bytes((99, 130, 83, 99))
_BROADCAST_FLAG = 0x80
_OPTIONS_AT = 240
"""Bytes before the options of a message (RFC 2131, section 2), the magic cookie included."""
_NETWORKD = re.compile(r"^OPTION_245=([0-9A-Fa-f]{8})\s*$", re.MULTILINE)
_DHCLIENT = re.compile(
    r'^\s*option\s+unknown-245\s+(?:"((?:[^"\\]|\\.)*)"|([0-9A-Fa-f]{1,2}(?::[0-9A-Fa-f]{1,2}){3}))\s*;',
    re.MULTILINE,
)


def make_discover(transaction: bytes, mac: bytes) -> bytes:
    """Return a DHCPDISCOVER for a network card. ``transaction`` has 4 bytes, ``mac`` has 6.

    It asks for an answer by broadcast: the DHCP client of the machine may use the same port, and
    what is sent to one address reaches one program only.
    """
    message = bytearray(_OPTIONS_AT)
    message[0:3] = (1, 1, 6)  # a request, over Ethernet, with a hardware address of 6 bytes
    message[4:8] = transaction
    message[10] = _BROADCAST_FLAG
    message[28:34] = mac
    message[236:240] = _COOKIE
    return bytes(message) + bytes((53, 1, _DISCOVER, _END))


def read_option_245_of_reply(packet: bytes, transaction: bytes, mac: bytes) -> IPv4Address | None:
    """Return the address in option 245 of an answer; None if the answer has none.

    Raises ValueError for what is no answer to this request.
    """
    if len(packet) < _OPTIONS_AT or packet[0] != _REPLY or packet[236:240] != _COOKIE:
        raise ValueError("expected an answer of a DHCP server")
    if packet[4:8] != transaction or packet[28:34] != mac:
        raise ValueError("expected the answer to this request, got that to another")
    for option, value in _options(packet[_OPTIONS_AT:]):
        if option == _OPTION and len(value) == 4:
            return IPv4Address(value)
    return None


def _options(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and value of each option that is whole."""
    at = 0
    while at < len(data) and data[at] != _END:
        if data[at] == _PADDING:
            at += 1
            continue
        value = data[at + 2 : at + 2 + data[at + 1]] if at + 1 < len(data) else b""
        if at + 1 >= len(data) or len(value) < data[at + 1]:
            return
        yield data[at], value
        at += 2 + len(value)


def parse_lease_file(text: str) -> IPv4Address | None:
    """Return the address in option 245 of the newest lease in a file; None without one.

    Reads the form of systemd-networkd (``OPTION_245=64416082``) and those of dhclient, which
    appends newer leases: ``option unknown-245 64:41:60:82;``, and ``"dA`c"`` if all four bytes are
    printable.
    """
    found = [bytes.fromhex(match[1]) for match in _NETWORKD.finditer(text)]
    for match in _DHCLIENT.finditer(text):
        if match[2] is not None:
            found.append(bytes(int(part, 16) for part in match[2].split(":")))
        else:
            found.append(re.sub(r"\\(.)", r"\1", match[1]).encode("ascii", "replace"))
    whole = [value for value in found if len(value) == 4]
    return IPv4Address(whole[-1]) if whole else None


def read_option_245_of_leases(patterns: Iterable[str] = LEASE_FILES) -> Iterator[IPv4Address]:
    """Yield the addresses in option 245 of the leases on this machine. Reads files."""
    for pattern in patterns:
        path = Path(pattern)
        try:
            files = sorted(path.parent.glob(path.name))
        except OSError:
            continue
        for file in files:
            try:
                with file.open("rb") as stream:
                    size = stream.seek(0, 2)
                    stream.seek(max(0, size - MAX_LEASE_BYTES))
                    text = stream.read(MAX_LEASE_BYTES).decode("ascii", "replace")
            except OSError:
                continue  # another user's, or gone
            if (address := parse_lease_file(text)) is not None:
                yield address


async def request_option_245_address_over_dhcp(
    mac: bytes,
    *,
    server: tuple[str, int] = BROADCAST,
    client: tuple[str, int] = CLIENT,
    seconds: float = REPLY_TIMEOUT,
) -> IPv4Address | None:
    """Ask for option 245 with one DHCPDISCOVER; return None if an answer has no such option.

    Raises TimeoutError if no server answers, and OSError if the port may not be used.
    """
    transaction = secrets.token_bytes(4)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[IPv4Address | None] = loop.create_future()
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(client)
        bound.settimeout(0)
        transport, _ = await loop.create_datagram_endpoint(
            lambda: _ReplyProtocol(answer, transaction, mac), sock=bound
        )
    except OSError:
        bound.close()
        raise
    try:
        transport.sendto(make_discover(transaction, mac), server)
        async with asyncio.timeout(seconds):
            return await answer
    finally:
        transport.close()


class _ReplyProtocol(asyncio.DatagramProtocol):
    """Takes the first answer to a request, and drops what is for others."""

    def __init__(
        self, answer: asyncio.Future[IPv4Address | None], transaction: bytes, mac: bytes
    ) -> None:
        self._answer = answer
        self._transaction = transaction
        self._mac = mac

    @override
    def datagram_received(self, data: bytes, addr: object) -> None:
        try:
            address = read_option_245_of_reply(data, self._transaction, self._mac)
        except ValueError:
            return
        if not self._answer.done():
            self._answer.set_result(address)

    @override
    def error_received(self, exc: Exception) -> None:
        if not self._answer.done():
            self._answer.set_exception(exc)


def find_mac(
    routes: Path = Path("/proc/net/route"), interfaces: Path = Path("/sys/class/net")
) -> bytes | None:
    """Return the hardware address of the network card with the default route.

    None if the machine has no such card, or is no Linux machine. Reads files.
    """
    try:
        rows = [line.split() for line in routes.read_text(encoding="ascii").splitlines()[1:]]
    except OSError:
        return None
    defaults = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == "00000000"]
    for _, name in sorted(defaults):
        try:
            text = (interfaces / name / "address").read_text(encoding="ascii").strip()
            mac = bytes.fromhex(text.replace(":", ""))
        except (OSError, ValueError):
            continue
        if len(mac) == 6 and any(mac):
            return mac
    return None
