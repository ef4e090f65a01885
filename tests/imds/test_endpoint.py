"""Where the metadata service is without a virtual network: searched for, checked, found again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from ipaddress import IPv4Address
from typing import Any

import pytest
from typing_extensions import override  # in typing from Python 3.12

from relay.errors import SourceError, SourceUnavailable
from relay.imds import SourceSettings
from relay.imds.client import ImdsClient
from relay.imds.discover import ALLOWED, DHCP_INTERVAL, Candidate, CandidateFinder
from relay.net.egress import is_refused
from tests.clocks import ManualClock
from tests.imds.scripted_server import Answer, run_server
from tests.namespace import run_in_namespace

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
