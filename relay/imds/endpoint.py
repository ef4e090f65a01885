"""Says where the metadata service may be, for ``source.url: discover``.

Source: the events page and the sample to which it links
(docs/protocol.md#without-a-virtual-network).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_network

from relay.clock import Clock
from relay.imds.dhcp import (
    REPLY_TIMEOUT,
    find_mac,
    read_option_245_of_leases,
    request_option_245_address_over_dhcp,
)

VIRTUAL_NETWORK = IPv4Address("169.254.169.254")
"""The address in a virtual network."""
WIRE_SERVER = IPv4Address("168.63.129.16")
"""The address of Azure's host, the same in all regions."""
PORTS = (80, 8080)
"""The sample in Python calls port 80, the sample in C# port 8080."""
DHCP_INTERVAL = 30.0
"""Seconds between two requests to DHCP. The sample waits 10, 30 and 60 seconds."""
ALLOWED = tuple(
    ip_network(network)
    for network in (
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",  # shared (RFC 6598): Azure uses these addresses without a virtual network
        "169.254.0.0/16",  # link local
        "168.63.129.16/32",
    )
)
"""Networks in which the service may be. No public host is in them."""

AskDhcp = Callable[[], Awaitable[IPv4Address | None]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place where the metadata service may be."""

    address: IPv4Address
    port: int
    reason: str
    """Why it may be there."""

    @property
    def base_url(self) -> str:
        """The URL without a path."""
        return f"http://{self.address}" + (f":{self.port}" if self.port != 80 else "")


def may_be_imds_address(address: IPv4Address) -> bool:
    """Whether the metadata service may have this address: one that no public host has."""
    return any(address in network for network in ALLOWED)


async def ask_dhcp_via_default_route() -> IPv4Address | None:
    """Ask DHCP for option 245 through the network card with the default route.

    Raises OSError and TimeoutError as `request_option_245_address_over_dhcp` does, also if there is
    no such card.
    """
    mac = await asyncio.to_thread(find_mac)
    if mac is None:
        raise OSError("no network card has a default route")
    return await request_option_245_address_over_dhcp(mac)


class CandidateFinder:
    """Lists candidates, the most likely first. A request to DHCP is sent at most now and then."""

    def __init__(
        self,
        clock: Clock,
        *,
        leases: Callable[[], Iterable[IPv4Address]] = read_option_245_of_leases,
        ask: AskDhcp = ask_dhcp_via_default_route,
    ) -> None:
        self.problems: list[str] = []
        """Why the last search has fewer candidates than it could have."""
        self._clock = clock
        self._read_leases = leases
        self._ask = ask
        self._next_request_at: float | None = None

    async def find_candidates(self) -> AsyncGenerator[Candidate, None]:
        """Yield each candidate once. DHCP is asked only if the search goes on until there."""
        self.problems = []
        seen = {VIRTUAL_NETWORK}
        yield Candidate(VIRTUAL_NETWORK, 80, "the address in a virtual network")
        sources: dict[str, Callable[[], Awaitable[list[IPv4Address]]]] = {
            "option 245 of a DHCP lease": self._read_lease_addresses,
            "option 245 of DHCP": self._ask_dhcp_server,
        }
        for reason, addresses in sources.items():
            for address in await addresses():
                if address in seen:
                    continue
                seen.add(address)
                if not may_be_imds_address(address):
                    self.problems.append(
                        f"{reason} is {address}, and the metadata service has no public address"
                    )
                    continue
                for port in PORTS:
                    yield Candidate(address, port, reason)
        if WIRE_SERVER not in seen:
            yield Candidate(WIRE_SERVER, 80, "the address of Azure's host")

    async def _read_lease_addresses(self) -> list[IPv4Address]:
        return await asyncio.to_thread(lambda: list(self._read_leases()))

    async def _ask_dhcp_server(self) -> list[IPv4Address]:
        now = self._clock.monotonic()
        if self._next_request_at is not None and now < self._next_request_at:
            self.problems.append("DHCP was asked a moment ago")
            return []
        self._next_request_at = now + DHCP_INTERVAL
        try:
            address = await self._ask()
        except TimeoutError:
            self.problems.append(f"no DHCP server answered within {REPLY_TIMEOUT:g} s")
        except PermissionError:
            self.problems.append(
                "DHCP cannot be asked: UDP port 68 needs CAP_NET_BIND_SERVICE "
                "(docs/operations.md#without-a-virtual-network)"
            )
        except OSError as error:
            self.problems.append(f"DHCP cannot be asked: {error.strerror or error}")
        else:
            if address is not None:
                return [address]
            self.problems.append("the answer of DHCP has no option 245")
        return []
