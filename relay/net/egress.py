"""The egress guard: metadata and host addresses are never connected to on behalf of a sink.

Loopback and private ranges are where receivers live and are allowed. The guard makes the sockets: a resolver would not see
address literals, and a check before the request would not see what a name resolves to.
"""

from __future__ import annotations

import errno
import re
import socket
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from aiohttp.connector import AddrInfoType
from yarl import URL

Address = IPv4Address | IPv6Address

REFUSED = tuple(
    ip_network(network)
    for network in (
        "169.254.0.0/16",  # link local: Azure's and others' instance metadata
        "168.63.129.16/32",  # Azure's host: wire server, DNS, health probes
        "fe80::/10",  # link local
        "fd00:ec2::254/128",  # instance metadata of another cloud
    )
)
_NAT64 = ip_network("64:ff9b::/96")

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\.?$){_LABEL}(?:\.{_LABEL})*\.?")


class AddressRefused(OSError):
    """A socket to a refused address was asked for. An OSError, since that is what a dialler takes for a failed address.

    The text is the same for every address: of several failures with one text the dialler passes the first on as it is.
    """

    def __init__(self) -> None:
        super().__init__(errno.EACCES, "a metadata or host address, which no sink may reach")


def is_refused(address: Address) -> bool:
    """Whether the address, or the IPv4 address that it stands for, must never be reached for anybody else."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif address in _NAT64:
            address = IPv4Address(int(address) & 0xFFFF_FFFF)
    return any(address in network for network in REFUSED)


def parse_address_literal(host: str) -> Address | None:
    """The address that a host's text stands for in any notation the C library takes (``2852039166``, ``0xa9.254.43518``).

    None for a name.
    """
    try:
        return ip_address(host)
    except ValueError:
        try:
            return IPv4Address(socket.inet_aton(host.removesuffix(".")))
        except (OSError, UnicodeError):
            return None


def guarded_socket(info: AddrInfoType) -> socket.socket:
    """Make the socket for an address that is about to be dialled. Raises AddressRefused instead where it must not be."""
    family, kind, protocol, _, target = info
    try:
        address = ip_address(str(target[0]))
    except ValueError:  # not an address: connecting would look it up, unseen
        raise AddressRefused from None
    if is_refused(address):
        raise AddressRefused
    return socket.socket(family, kind, protocol)


@lru_cache(maxsize=64)
def parse_receiver_url(text: str, *, allow_http: bool) -> URL:
    """Read the URL of a receiver. Raises ValueError, which holds nothing of the URL but its scheme."""
    if re.search(r"[\s\x00-\x1f\x7f]", text):
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
            "expected https, got http: set allow_http: true where the way to the receiver is trusted"
        )
    if url.scheme not in {"http", "https"} or not host:
        raise ValueError(
            "expected a URL that starts with https:// and names a host, got something else"
        )
    if url.raw_user is not None or url.raw_password is not None:
        raise ValueError(
            "expected a URL without user and password, got one with them: they end in logs; signatures prove the sender"
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
    if address is None:
        if _NAME.fullmatch(host) is None:
            raise ValueError(
                "expected a host name of letters, digits, hyphens and dots, got something else"
            )
        return
    if is_refused(address):
        raise ValueError(
            "expected a receiver's address, got a metadata or host address, which no sink may reach"
        )
    if address.version == 4 and host != str(address):
        raise ValueError(
            f"expected an address in its usual form, {address}, got another notation of it"
        )
