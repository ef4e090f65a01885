"""Says where the metadata service may be, for ``source.url: discover``.

Without a virtual network, option 245 of DHCP names its address. Sources: the events page and the
sample to which it links (docs/protocol.md#without-a-virtual-network).
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, ip_network
from pathlib import Path

from relay.clock import Clock

VIRTUAL_NETWORK = IPv4Address("169.254.169.254")
"""The address in a virtual network."""
WIRE_SERVER = IPv4Address("168.63.129.16")
"""The address of Azure's host, the same in all regions."""
PORTS = (80, 8080)
"""The sample in Python calls port 80, the sample in C# port 8080."""
ALLOWED = (
    *map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")),
    ip_network("100.64.0.0/10"),  # shared (RFC 6598): what Azure uses without a virtual network
    ip_network("169.254.0.0/16"),  # link local
    ip_network("168.63.129.16/32"),
)
"""Networks in which the service may be. No public host is in them."""
DHCP_INTERVAL = 30.0
"""Seconds between two requests to DHCP. The sample waits 10, 30 and 60 seconds."""
REPLY_TIMEOUT = 10.0
"""Seconds to wait for an answer, as in the sample."""
BROADCAST = ("255.255.255.255", 67)
"""Where DHCP servers listen."""
CLIENT = ("0.0.0.0", 68)  # noqa: S104  # an answer to a broadcast comes to no address of its own
"""Where a DHCP client listens. Only root or CAP_NET_BIND_SERVICE may use this port."""
LEASE_FILES = (
    "/run/systemd/netif/leases/*",
    "/var/lib/dhcp/dhclient*.lease*",
    "/var/lib/dhclient/*.lease*",
    "/var/lib/dhcpcd/*.lease*",
)
"""Where DHCP clients of Linux keep what the server answered, as patterns."""
MAX_LEASE_BYTES = 1024 * 1024
"""This much of the end of a file of leases is read. dhclient appends each lease to its file."""

_OPTION, _PADDING, _END = 245, 0, 255
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


@dataclass(frozen=True, slots=True)
class Candidate:
    address: IPv4Address
    port: int
    reason: str

    @property
    def base_url(self) -> str:
        return f"http://{self.address}" + (f":{self.port}" if self.port != 80 else "")


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


def read_reply(packet: bytes, transaction: bytes, mac: bytes) -> IPv4Address | None:
    """Return the address in option 245 of an answer; None if the answer has none.

    Raises ValueError for what is no answer to this request.
    """
    if len(packet) < _OPTIONS_AT or packet[0] != _REPLY or packet[236:240] != _COOKIE:
        raise ValueError("expected an answer of a DHCP server")
    if packet[4:8] != transaction or packet[28:34] != mac:
        raise ValueError("expected the answer to this request, got that to another")
    at = _OPTIONS_AT
    while at + 1 < len(packet) and packet[at] != _END:
        if packet[at] == _PADDING:
            at += 1
            continue
        value = packet[at + 2 : at + 2 + packet[at + 1]]
        if packet[at] == _OPTION and packet[at + 1] == len(value) == 4:
            return IPv4Address(value)
        at += 2 + packet[at + 1]
    return None


def read_lease(text: str) -> IPv4Address | None:
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


def read_leases(patterns: Iterable[str] = LEASE_FILES) -> list[IPv4Address]:
    """Return the addresses in option 245 of the leases on this machine. Reads files."""
    addresses = []
    for pattern in map(Path, patterns):
        for file in sorted(pattern.parent.glob(pattern.name)):
            try:
                text = file.read_bytes()[-MAX_LEASE_BYTES:].decode("ascii", "replace")
            except OSError:
                continue  # another user's, or gone
            if (address := read_lease(text)) is not None:
                addresses.append(address)
    return addresses


async def ask_dhcp(
    mac: bytes | None = None,
    *,
    server: tuple[str, int] = BROADCAST,
    client: tuple[str, int] = CLIENT,
    seconds: float = REPLY_TIMEOUT,
) -> IPv4Address | None:
    """Ask for option 245 with one DHCPDISCOVER; return None if an answer has no such option.

    Without ``mac`` the network card with the default route asks. Raises TimeoutError if no server
    answers, and OSError if there is no such card or the port may not be used.
    """
    mac = mac or await asyncio.to_thread(find_mac)
    if mac is None:
        raise OSError("no network card has a default route")
    transaction, loop = secrets.token_bytes(4), asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.settimeout(0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(client)
        await loop.sock_sendto(bound, make_discover(transaction, mac), server)
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return read_reply(await loop.sock_recv(bound, 65536), transaction, mac)
                except ValueError:
                    continue  # it is for others


def find_mac(
    routes: Path = Path("/proc/net/route"), interfaces: Path = Path("/sys/class/net")
) -> bytes | None:
    """Return the address of the card with the best default route; None without, or not on Linux."""
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


class CandidateFinder:
    """Lists candidates, the most likely first. A request to DHCP is sent at most now and then."""

    def __init__(
        self,
        clock: Clock,
        *,
        leases: Callable[[], list[IPv4Address]] = read_leases,
        ask: Callable[[], Awaitable[IPv4Address | None]] = ask_dhcp,
    ) -> None:
        self.problems: list[str] = []
        """Why the last search has fewer candidates than it could have."""
        self._clock = clock
        self._leases = leases
        self._ask = ask
        self._next_request_at = float("-inf")

    async def candidates(self) -> AsyncGenerator[Candidate, None]:
        """Yield each candidate once. DHCP is asked only if the search goes on until there."""
        self.problems = []
        seen = {VIRTUAL_NETWORK}
        yield Candidate(VIRTUAL_NETWORK, 80, "the address in a virtual network")
        for reason, find in (
            ("option 245 of a DHCP lease", partial(asyncio.to_thread, self._leases)),
            ("option 245 of DHCP", self._ask_rarely),
        ):
            for address in await find():
                if address in seen:
                    continue
                seen.add(address)
                if any(address in network for network in ALLOWED):
                    for port in PORTS:
                        yield Candidate(address, port, reason)
                    continue
                problem = "and the metadata service has no public address"
                self.problems.append(f"{reason} is {address}, {problem}")
        if WIRE_SERVER not in seen:
            yield Candidate(WIRE_SERVER, 80, "the address of Azure's host")

    async def _ask_rarely(self) -> list[IPv4Address]:
        now = self._clock.monotonic()
        if now < self._next_request_at:
            self.problems.append("DHCP was asked a moment ago")
            return []
        self._next_request_at = now + DHCP_INTERVAL
        try:
            if (address := await self._ask()) is not None:
                return [address]
            problem = "the answer of DHCP has no option 245"
        except TimeoutError:
            problem = f"no DHCP server answered within {REPLY_TIMEOUT:g} s"
        except PermissionError:
            problem = (
                "DHCP cannot be asked: UDP port 68 needs CAP_NET_BIND_SERVICE "
                "(docs/operations.md#without-a-virtual-network)"
            )
        except OSError as error:
            problem = f"DHCP cannot be asked: {error.strerror or error}"
        self.problems.append(problem)
        return []
