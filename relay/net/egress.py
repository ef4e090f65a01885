"""The egress guard: no sink connects to a metadata or host address.

`guarded_socket` creates the sockets of sinks, chat platforms and connections to the broker. A
guarded resolver would not see addresses in URLs, and a check before the request would not see to
which address a name resolves. Loopback and private addresses are allowed, because receivers are
there. An address at which the relay found the metadata service is refused too.

`parse_receiver_url` reads the URLs of receivers. It refuses the same addresses earlier, where an
operator can read why.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterator
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from aiohttp.connector import AddrInfoType
from yarl import URL

Address = IPv4Address | IPv6Address

REFUSED = tuple(
    ip_network(network)
    for network in (
        "169.254.0.0/16",  # link local: instance metadata of Azure and others
        "168.63.129.16/32",  # Azure's host: wire server, DNS, health probes
        "fe80::/10",  # link local
        "fd00:ec2::254/128",  # instance metadata of another cloud
    )
)
_IPV4_IN_IPV6 = tuple(
    (ip_network(network), start)
    for network, start in (
        ("::/96", 11),  # IPv4-compatible
        ("::ffff:0:0/96", 11),  # IPv4-mapped
        ("::ffff:0:0:0/96", 11),  # IPv4-translated
        ("64:ff9b::/96", 11),  # NAT64
        ("2002::/16", 2),  # 6to4
        *(("64:ff9b:1::/48", start) for start in (6, 7, 8, 11)),  # NAT64 with a local prefix
    )
)
"""Where an IPv4 address begins in an IPv6 address without byte 8, which RFC 6052 reserves."""
_ISATAP = (bytes.fromhex("00005efe"), bytes.fromhex("02005efe"))
_HOST_SERVICES = tuple(IPv4Address(text).packed for text in ("169.254.169.254", "168.63.129.16"))

discovered_imds: set[Address] = set()
"""Where this process found the metadata service: refused as well."""

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}\.?$){_LABEL}(?:\.{_LABEL})*\.?")
_SPACE_OR_CONTROL = re.compile(r"[\s\x00-\x1f\x7f]")


class AddressRefused(OSError):
    """The guard refuses this address. An OSError, so that the next address of a name is tried.

    The text is the same for all addresses: if all attempts fail with the same text, the caller of
    aiohappyeyeballs gets this error, else a summary.
    """

    def __init__(self) -> None:
        super().__init__(errno.EACCES, "a metadata or host address, which no sink may reach")


def is_refused(address: Address) -> bool:
    """Return whether no sink may reach the address, or an IPv4 address that it contains."""
    if address in discovered_imds or any(address in network for network in REFUSED):
        return True
    if isinstance(address, IPv4Address):
        return False
    if any(map(is_refused, _contained_addresses(address))):
        return True
    # Any prefix can be one of NAT64, so the bytes of two addresses are refused anywhere. All of
    # link local is not looked for: an address contains two given bytes by chance too often.
    packed = address.packed
    digits = packed[:8] + packed[9:]
    return any(service in packed or service in digits for service in _HOST_SERVICES)


def _contained_addresses(address: IPv6Address) -> Iterator[IPv4Address]:
    """Yield the IPv4 addresses to which a tunnel or a translator could pass a packet on."""
    yield from address.teredo or ()
    digits = address.packed[:8] + address.packed[9:]
    starts = {start for network, start in _IPV4_IN_IPV6 if address in network}
    if address.packed[8:12] in _ISATAP:
        starts.add(11)
    yield from (IPv4Address(digits[start : start + 4]) for start in starts)


def parse_address_literal(host: str) -> Address | None:
    """Return the address in any notation of the C library, as ``0xa9.254.43518``; None: a name."""
    try:
        return ip_address(host)
    except ValueError:
        pass
    try:
        return IPv4Address(socket.inet_aton(host.removesuffix(".")))
    except (OSError, UnicodeError):
        return None


def guarded_socket(info: AddrInfoType) -> socket.socket:
    """Return a socket for an address, before the connection. Raises AddressRefused."""
    family, kind, protocol, _, target = info
    try:
        address = ip_address(str(target[0]))
    except ValueError:  # a name: connecting would resolve it, unseen by the guard
        raise AddressRefused from None
    if is_refused(address):
        raise AddressRefused
    return socket.socket(family, kind, protocol)


@lru_cache(maxsize=64)  # a sink reads its URL for each request: a file can hold it
def parse_receiver_url(text: str, *, allow_http: bool) -> URL:
    """Return the URL of a receiver. Raises ValueError, which repeats at most its scheme."""
    if _SPACE_OR_CONTROL.search(text):
        raise ValueError("expected a URL without spaces and control characters, got one with them")
    try:
        url = URL(text)
        host = url.raw_host or ""
    except ValueError:
        raise ValueError(
            "expected a URL such as https://receiver.example.com/path, got something else"
        ) from None
    if url.scheme == "http" and not allow_http:
        raise ValueError(
            "expected https, got http: "
            "set allow_http: true where the way to the receiver is trusted"
        )
    if url.scheme not in {"http", "https"} or not host:
        raise ValueError(
            "expected a URL that starts with https:// and names a host, got something else"
        )
    if url.raw_user is not None or url.raw_password is not None:
        raise ValueError(
            "expected a URL without user and password, got one with them: they end in logs; "
            "signatures prove the sender"
        )
    if "#" in text:
        raise ValueError(
            "expected a URL without a fragment, got one with it: a fragment is never sent"
        )
    if not url.port:
        raise ValueError("expected a port from 1 to 65535, got 0")
    _check_host(host)
    return url


def _check_host(host: str) -> None:
    address = parse_address_literal(host)
    if address is None and _HOST_NAME.fullmatch(host) is None:
        raise ValueError(
            "expected a host name of letters, digits, hyphens and dots, got something else"
        )
    if address is not None and is_refused(address):
        raise ValueError(
            "expected a receiver's address, got a metadata or host address, which no sink may reach"
        )
    if isinstance(address, IPv4Address) and host != str(address):
        raise ValueError(
            f"expected an address in its usual form, {address}, got another notation of it"
        )
