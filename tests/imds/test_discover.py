"""Where the metadata service is without a virtual network: option 245 of DHCP, and the search."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typing_extensions import override  # in typing from Python 3.12

from relay.errors import SourceError, SourceUnavailable
from relay.imds import SourceSettings
from relay.imds.client import ImdsClient
from relay.imds.discover import (
    ALLOWED,
    DHCP_INTERVAL,
    MAX_LEASE_BYTES,
    Candidate,
    CandidateFinder,
    ask_dhcp,
    find_mac,
    make_discover,
    read_lease,
    read_leases,
    read_reply,
)
from relay.net.egress import is_refused
from tests.clocks import ManualClock
from tests.imds.dhcp_server import offer, offer_endpoint, run_dhcp_server
from tests.imds.scripted_server import Answer, run_server
from tests.programs import run_in_namespace

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


def test_an_option_of_other_size_or_number_is_none() -> None:
    """Also one of the right form inside another."""
    sizes = [((245, bytes(size)),) for size in (0, 3, 5)]
    others = [((246, b"\x01\x02\x03\x04"),), ((12, b"\xf5\x04\x01\x02\x03\x04"),)]
    for options in ((), *sizes, *others):
        packet = offer(make_discover(TRANSACTION, MAC), *options)
        assert read_reply(packet, TRANSACTION, MAC) is None, options


def test_an_option_that_is_cut_off_is_none() -> None:
    packet = offer(make_discover(TRANSACTION, MAC), (245, ADDRESS.packed))
    cut = [read_reply(packet[:-gone], TRANSACTION, MAC) for gone in range(1, 8)]
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


def test_a_lease_without_a_whole_address_is_none() -> None:
    networkd = ("", "OPTION_245=", "OPTION_245=6441608", "OPTION_245=644160820")
    for text in (*networkd, "# OPTION_245=64416082", "OPTION_2450=64416082"):
        assert read_lease(text) is None, text
    dhclient = ("245 64:41:60", "245 64:41:60:82:11", '245 "abc"', "244 64:41:60:82")
    for text in dhclient:
        assert read_lease(f"option unknown-{text};") is None, text


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


# --- the search

PRIVATE, SHARED = IPv4Address("10.9.8.9"), IPv4Address("100.65.96.130")
METADATA, WIRE_SERVER = IPv4Address("169.254.169.254"), IPv4Address("168.63.129.16")
PUBLIC, LOCAL = IPv4Address("20.50.2.1"), IPv4Address("127.0.0.1")


def answering(address: IPv4Address | Exception | None) -> Callable[[], Awaitable[Any]]:
    """Return what stands for DHCP: it gives this answer."""

    async def ask() -> IPv4Address | None:
        if isinstance(address, Exception):
            raise address
        return address

    return ask


async def found(finder: CandidateFinder) -> list[str]:
    return [candidate.base_url async for candidate in finder.candidates()]


def test_only_addresses_that_no_public_host_has_are_allowed() -> None:
    allowed = {"169.254.1.1", "168.63.129.16", "10.0.0.1", "172.31.255.255", "192.168.3.4"}
    others = {"168.63.129.15", "11.0.0.0", "172.32.0.0", "192.169.0.0", "100.128.0.0", "127.0.0.1"}
    for text in (*allowed, *others, "20.50.2.1", "0.0.0.0", "224.0.0.1", "255.255.255.255"):
        assert any(IPv4Address(text) in network for network in ALLOWED) == (text in allowed), text


async def test_the_address_in_a_virtual_network_comes_first_and_azures_host_last() -> None:
    finder = CandidateFinder(ManualClock(), leases=lambda: [SHARED], ask=answering(PRIVATE))
    assert await found(finder) == [
        "http://169.254.169.254",
        "http://100.65.96.130",
        "http://100.65.96.130:8080",
        "http://10.9.8.9",
        "http://10.9.8.9:8080",
        "http://168.63.129.16",
    ]
    assert finder.problems == []


async def test_a_public_address_is_no_candidate_and_is_named() -> None:
    finder = CandidateFinder(ManualClock(), leases=lambda: [PUBLIC], ask=answering(PUBLIC))
    assert await found(finder) == ["http://169.254.169.254", "http://168.63.129.16"]
    assert finder.problems == [
        "option 245 of a DHCP lease is 20.50.2.1, and the metadata service has no public address"
    ]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "the answer of DHCP has no option 245"),
        (TimeoutError(), "no DHCP server answered within 10 s"),
        (PermissionError(13, "Permission denied"), "needs CAP_NET_BIND_SERVICE"),
        (OSError(98, "Address already in use"), "DHCP cannot be asked: Address already in use"),
        (OSError("no network card has a default route"), "no network card has a default route"),
    ],
    ids=["no option", "silence", "no right", "port in use", "no card"],
)
async def test_what_dhcp_does_not_say_is_a_problem(answer: Exception | None, problem: str) -> None:
    finder = CandidateFinder(ManualClock(), leases=list, ask=answering(answer))
    assert await found(finder) == ["http://169.254.169.254", "http://168.63.129.16"]
    assert len(finder.problems) == 1
    assert problem in finder.problems[0]


async def test_dhcp_is_asked_at_most_once_in_half_a_minute() -> None:
    asked = 0

    async def ask() -> IPv4Address:
        nonlocal asked
        asked += 1
        return PRIVATE

    clock = ManualClock()
    finder = CandidateFinder(clock, leases=list, ask=ask)
    answers = []
    for seconds in (0.0, 0.0, DHCP_INTERVAL - 1, 2.0):
        clock.advance(seconds)
        answers.append(("http://10.9.8.9" in await found(finder), asked, finder.problems))
    pause = ["DHCP was asked a moment ago"]
    assert answers == [(True, 1, []), (False, 1, pause), (False, 1, pause), (True, 2, [])]


async def test_a_start_request_is_sent_nowhere_before_the_service_is_found() -> None:
    clock = ManualClock()
    finder = CandidateFinder(clock, leases=list, ask=answering(PRIVATE))
    async with ImdsClient(SourceSettings(url="discover"), clock, finder) as client:
        with pytest.raises(SourceUnavailable, match="none is found yet"):
            await client.send_start_request("A")
        assert client.base_url is None


class LocalCandidates(CandidateFinder):
    """Finds servers of this machine, where no metadata service of Azure can be."""

    searches = 0
    urls: Sequence[str] = ()

    @override
    async def candidates(self) -> AsyncGenerator[Candidate, None]:
        self.searches += 1
        for url in self.urls:
            yield Candidate(LOCAL, int(url.rpartition(":")[2]), "a test")


async def test_the_service_is_the_first_that_gives_a_document_and_no_sink_reaches_it() -> None:
    clock = ManualClock()
    finder = LocalCandidates(clock)
    async with run_server(clock=clock) as other, run_server(clock=clock) as server:
        other.answer = Answer(b"no document")
        finder.urls = other.url, server.url
        async with ImdsClient(SourceSettings(url="discover"), clock, finder) as client:
            await client.read_document()
            assert client.base_url == server.url
            assert is_refused(LOCAL)
        assert not is_refused(LOCAL)


@pytest.mark.parametrize("failing", [Answer(b"", 503), Answer(b"no document")], ids=["503", "200"])
async def test_a_service_is_searched_again_15_s_after_the_first_failure(failing: Answer) -> None:
    """Failures that follow, and a 429, do not let the time begin anew."""
    clock = ManualClock()
    finder = LocalCandidates(clock)
    async with (
        run_server(clock=clock) as server,
        ImdsClient(SourceSettings(url="discover"), clock, finder) as client,
    ):
        finder.urls = [server.url]

        async def read(seconds: float, answer: Answer) -> int:
            clock.advance(seconds)
            server.answer = answer
            with suppress(SourceError):
                await client.read_document()
            return finder.searches

        assert await read(0, Answer()) == 1
        assert await read(100, Answer(b"", 429)) == 1
        assert [await read(5, failing), await read(5, failing), await read(9.9, failing)] == [1] * 3
        assert await read(5, failing) == 2
        assert await read(5, Answer()) == 2
        assert await read(100, failing) == 2


def test_a_whole_relay_finds_the_service_and_approves_in_the_oldest_version() -> None:
    """`endpoint_namespace` runs it in a network namespace."""
    run_in_namespace("tests.imds.endpoint_namespace")
