"""The egress guard: no packet goes to a metadata or host address, whatever the URL or name."""

from __future__ import annotations

import errno
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.net.egress import (
    REFUSED,
    AddressRefused,
    guarded_socket,
    is_refused,
    parse_address_literal,
)
from tests.programs import run_in_namespace
from tests.sinks.http_receiver import Names
from tests.sinks.webhook_sink import failure

REFUSED_ADDRESSES = """
169.254.0.0 169.254.169.254 169.254.255.255 168.63.129.16
fe80:: fe80::1 fe80::1%eth0 febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff fd00:ec2::254
::ffff:169.254.169.254 ::ffff:168.63.129.16 64:ff9b::169.254.169.254 64:ff9b::a83f:8110
::169.254.169.254 ::168.63.129.16
::ffff:0:169.254.169.254 ::ffff:0:168.63.129.16
2002:a9fe:a9fe::1 2002:a9fe:1:2:3:4:5:6 2002:a83f:8110::
2001:0:a9fe:a9fe::1
2001:0:102:304:8000:1234:5601:5601 2001:0:102:304::57c0:7eef
2001:db8::5efe:169.254.1.2 2001:db8::200:5efe:169.254.1.2 fd12::5efe:168.63.129.16
64:ff9b:1::169.254.1.2
64:ff9b:1:a9fe:1:200::
64:ff9b:1:aaa9:fe:102::
64:ff9b:1:aaaa:a9:fe01:200:: 64:ff9b:1:a83f:81:1000::
2a01:db8:a9fe:a9fe::
2a01:db8:12a9:fea9:fe::
2a01:db8:1234:a9fe:a9:fe00::
2a01:db8:1234:56a9:fe:a9fe::
2a01:db8:1234:5678:a9:fea9:fe00:0 2a01:db8:1234:5678:a9:fea9:feff:ffff
2a01:db8:1234:5678::169.254.169.254 2a01:db8:1234:a83f:81:1000:: 2a01:db8::a83f:8110
"""
"""The ranges; in IPv6: mapped and NAT64, compatible, translated, 6to4, Teredo (the server, and the
client with all bits inverted), ISATAP, NAT64 with a local prefix of 96, 48, 56 and 64 bits, and
with the prefix of a network of 32, 40, 48, 56, 64 and 96 bits."""
ALLOWED_ADDRESSES = """
127.0.0.1 10.0.0.4 172.16.0.1 192.168.1.1
169.253.255.255 169.255.0.0 168.63.129.15 168.63.129.17
::1 fd00::1 fd00:ec2::253 fe7f::1 fec0::1 ::ffff:127.0.0.1 64:ff9b::10.0.0.4 ::10.0.0.4
::ffff:0:10.0.0.4 64:ff9b:1::10.0.0.4 64:ff9b:1:a00:0:400:: 2002:a00:4::1
2001:0:102:304::f5ff:fffb 2001:db8::5efe:10.0.0.4
2a01:db8:a9fe::1 2a01:db8::a9fe:1 2a01:db8::a9fe:a9fd
"""
"""The last three have 169.254.0.0 in a prefix that nobody knows as one of NAT64."""


def guarded(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return guarded_socket((family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, 80)))


def test_no_socket_is_made_for_a_refused_address() -> None:
    for address in REFUSED_ADDRESSES.split():
        assert is_refused(ip_address(address)), address
        with pytest.raises(AddressRefused) as caught:
            guarded(address)
        assert (caught.value.errno, isinstance(caught.value, OSError)) == (errno.EACCES, True)


def test_loopback_private_ranges_and_all_else_are_allowed() -> None:
    for address in ALLOWED_ADDRESSES.split():
        assert not is_refused(ip_address(address)), address
        with guarded(address) as made:
            assert made.type == socket.SOCK_STREAM


def test_the_refused_ranges_are_those_of_the_documentation() -> None:
    """Promise 6."""
    documented = ("169.254.0.0/16", "fe80::/10", "fd00:ec2::254", "168.63.129.16")
    assert set(REFUSED) == set(map(ip_network, documented))


@given(
    st.integers(0, 2**32 - 1)
    | st.integers(0xA9FE0000 - 9, 0xA9FEFFFF + 9)
    | st.integers(0xA83F8110 - 2, 0xA83F8110 + 2)
)
def test_an_ipv4_address_is_judged_alike_in_every_form(number: int) -> None:
    address = IPv4Address(number)
    expected = address in ip_network("169.254.0.0/16") or str(address) == "168.63.129.16"
    high, low = number >> 16, number & 0xFFFF
    inverted = IPv4Address(number ^ 0xFFFF_FFFF)
    forms = (
        f"::ffff:{address}",
        f"::{address}",
        f"::ffff:0:{address}",
        f"64:ff9b::{address}",
        f"64:ff9b:1::{address}",
        f"64:ff9b:1:{high:x}:{low >> 8:x}:{low << 8 & 0xFFFF:x}::",
        f"2002:{high:x}:{low:x}::1",
        f"2001:0:{high:x}:{low:x}::",
        f"2001:0:102:304:8000:1:{inverted}",
        f"2a01:db8::5efe:{address}",
    )
    assert is_refused(address) == expected
    assert [form for form in forms if is_refused(IPv6Address(form)) != expected] == []


def test_what_is_not_an_address_gets_no_socket() -> None:
    """Connecting would look it up, and nobody would see what it stands for."""
    with pytest.raises(AddressRefused):
        guarded("metadata.test")


def test_a_name_is_no_literal() -> None:
    for host in ("drain.example.com", "localhost", "a", "1.2.3.4.5", "0xg", "", "é"):
        assert parse_address_literal(host) is None, host


async def test_a_name_of_a_refused_address_is_a_failure_that_somebody_must_mend() -> None:
    """Names can change, so a later try may work. A proxy is guarded, too."""
    for address in ("169.254.169.254", "fe80::1", "::ffff:168.63.129.16"):
        names = Names({"t0ken.test": [address]})
        for url, proxy in (
            ("http://t0ken.test/", None),
            ("https://drain.test/t0ken", "http://t0ken.test:3128"),
        ):
            error = await failure(url, resolver=names, proxy=proxy)
            assert error.failure == "slow"
            assert (
                error.reason == "expected a receiver's address, the name in the URL stands for "
                "a metadata or host address, which no sink may reach"
            )


def test_no_packet_reaches_a_refused_address_that_is_there_and_listens() -> None:
    """Addresses in each notation, names and a proxy. The kernel counts the connections."""
    run_in_namespace("tests.sinks.egress_namespace")
