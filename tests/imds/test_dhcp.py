"""Option 245 of DHCP: from a lease on this machine, and from a real server."""

from __future__ import annotations

import os
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relay.imds.discover import (
    MAX_LEASE_BYTES,
    ask_dhcp,
    find_mac,
    make_discover,
    read_lease,
    read_leases,
    read_reply,
)
from tests.imds.dhcp_server import offer, offer_endpoint, run_dhcp_server

MAC = bytes.fromhex("000d3a9c99e3")
TRANSACTION = b"\x01\x02\x03\x04"
ADDRESS = IPv4Address("100.65.96.130")
CLIENT = ("127.0.0.1", 0)
NETWORKD = """\
# This is private data. Do not parse.
ADDRESS=10.0.0.4
NETMASK=255.255.255.0
OPTION_245=64416082
OPTION_249=18c0a8
"""

DHCLIENT = """\
lease {
  interface "eth0";
  fixed-address 10.0.0.4;
  option unknown-245 a:1:2:3;
  renew 1 2026/04/13 10:00:00;
}
lease {
  interface "eth0";
  option dhcp-server-identifier 168.63.129.16;
  option unknown-245 64:41:60:82;
  expire 4 2026/04/16 10:00:00;
}
"""


def test_a_discover_is_the_message_of_the_sample_with_an_answer_by_broadcast() -> None:
    flags, asks = b"\x80\x00", bytes((53, 1, 1, 255))
    head = b"\x01\x01\x06\x00" + TRANSACTION + bytes(2) + flags + bytes(16) + MAC
    assert make_discover(TRANSACTION, MAC) == head + bytes(202) + b"\x63\x82\x53\x63" + asks


async def test_the_answer_names_the_address_and_what_is_for_others_is_passed_over() -> None:
    wrong = IPv4Address("10.6.6.6").packed

    def confused(request: bytes) -> list[bytes]:
        other_machine = request[:28] + b"\x00\x0d\x3a\x00\x00\x01" + request[34:]
        other_request = request[:4] + b"none" + request[8:]
        no_cookie = offer(request, (245, wrong)).replace(b"\x63\x82\x53\x63", b"\x00" * 4)
        return [
            b"",
            b"rubbish",
            request + wrong,  # a request comes back
            offer(other_machine, (245, wrong)),
            offer(other_request, (245, wrong)),
            no_cookie,
            *offer_endpoint("100.65.96.130")(request),
        ]

    async with run_dhcp_server(confused) as (requests, address):
        assert await ask_dhcp(MAC, server=address, client=CLIENT) == ADDRESS
    (request,) = requests
    assert request == make_discover(request[4:8], MAC)


async def test_without_an_answer_the_wait_ends() -> None:
    async with run_dhcp_server(lambda _: []) as (_, address):
        with pytest.raises(TimeoutError):
            await ask_dhcp(MAC, server=address, client=CLIENT, seconds=0.05)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ((245, b""),),
        ((245, b"\x01\x02\x03"),),
        ((245, b"\x01\x02\x03\x04\x05"),),
        ((246, b"\x01\x02\x03\x04"),),
        ((12, b"\xf5\x04\x01\x02\x03\x04"),),
    ],
    ids=["none", "empty", "short", "long", "another", "inside another"],
)
def test_an_option_of_other_size_or_number_is_none(options: tuple[tuple[int, bytes], ...]) -> None:
    packet = offer(make_discover(TRANSACTION, MAC), *options)
    assert read_reply(packet, TRANSACTION, MAC) is None


def test_an_option_that_is_cut_off_is_none() -> None:
    packet = offer(make_discover(TRANSACTION, MAC), (245, ADDRESS.packed))
    cut = [read_reply(packet[: len(packet) - gone], TRANSACTION, MAC) for gone in range(1, 8)]
    assert cut == [ADDRESS, *[None] * 6]


@given(st.binary(max_size=400), st.binary(max_size=60))
@example(b"", b"\xf5")
@example(b"", b"\xf5\x04\x01")
def test_any_packet_is_an_address_nothing_or_an_error(packet: bytes, options: bytes) -> None:
    head = offer(make_discover(TRANSACTION, MAC))[:-1]
    for text in (packet, head + options):
        try:
            address = read_reply(text, TRANSACTION, MAC)
        except ValueError:
            continue
        assert address is None or address.packed in text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "OPTION_245=",
        "OPTION_245=6441608",
        "OPTION_245=644160820",
        "# OPTION_245=64416082",
        "OPTION_2450=64416082",
        "option unknown-245 64:41:60;",
        "option unknown-245 64:41:60:82:11;",
        'option unknown-245 "abc";',
        "option unknown-244 64:41:60:82;",
    ],
)
def test_a_lease_without_a_whole_address_is_none(text: str) -> None:
    assert read_lease(text) is None


def test_leases_are_read_where_they_can_be(tmp_path: Path) -> None:
    (tmp_path / "2").write_text(NETWORKD)
    (tmp_path / "3").write_text("ADDRESS=10.0.0.5\n")
    (tmp_path / "4").mkdir()
    (tmp_path / "5").symlink_to(tmp_path / "gone")
    (tmp_path / "6").write_bytes(b"\xff" * (MAX_LEASE_BYTES + 5) + b"\nOPTION_245=0a010203\n")
    os.chmod(tmp_path / "3", 0)  # noqa: PTH101  # root reads it regardless
    found = list(read_leases([f"{tmp_path}/*", f"{tmp_path}/gone/*"]))
    assert found == [ADDRESS, IPv4Address("10.1.2.3")]


def test_the_network_card_with_the_best_default_route_is_asked(tmp_path: Path) -> None:
    routes = tmp_path / "route"
    header = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    row = "{} {} 0108090A 0003 0 0 {} 00000000 0 0 0\n"
    cards = ("eth1", "00000000", 200), ("eth0", "00000000", 100), ("eth2", "0008090A", 0)
    routes.write_text(header + "".join(row.format(*card) for card in cards))
    macs = {name: tmp_path / name / "address" for name in ("eth0", "eth1")}
    for name, text in (("eth0", "00:0d:3a:9c:99:e3\n"), ("eth1", "00:0d:3a:00:00:01\n")):
        macs[name].parent.mkdir()
        macs[name].write_text(text)
    assert find_mac(routes, tmp_path) == MAC
    macs["eth0"].write_text("00:00:00:00:00:00\n")
    assert find_mac(routes, tmp_path) == bytes.fromhex("000d3a000001")
    macs["eth1"].unlink()
    assert find_mac(routes, tmp_path) is None
    assert find_mac(tmp_path / "gone", tmp_path) is None


def test_the_newest_lease_of_each_dhcp_client_is_read() -> None:
    assert read_lease(NETWORKD) == ADDRESS
    assert read_lease(DHCLIENT) == ADDRESS
    assert read_lease('  option unknown-245 "dA`c";') == IPv4Address("100.65.96.99")
    assert read_lease(r'  option unknown-245 "d\"\\c";') == IPv4Address("100.34.92.99")
