"""Calls to the metadata service, against real servers on loopback, and their settings."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import time
from collections.abc import AsyncIterator
from datetime import timedelta

import orjson
import pytest
from pydantic import ValidationError

from relay import __version__
from relay.clock import SystemClock
from relay.errors import (
    DocumentError,
    DocumentTooLarge,
    SourceCallNotSentInTime,
    SourceError,
    SourceRefused,
    SourceUnavailable,
)
from relay.imds import SourceSettings
from relay.imds.client import MAX_DOCUMENT_BYTES, ImdsClient
from relay.ingest import DatedRead
from tests.clocks import NOON, ManualClock
from tests.imds.scripted_server import EMPTY, Answer, answers_in_order, run_server
from tests.sinks.http_receiver import Connection, Received, listening

CHUNKED = {"Transfer-Encoding": "chunked"}


@contextlib.asynccontextmanager
async def client_of(url: str, **times: float) -> AsyncIterator[ImdsClient]:
    usual = {"url": url, "timeout": 60.0, "first_timeout": 60.0}
    settings = SourceSettings.model_validate(usual | times)
    async with ImdsClient(settings, SystemClock()) as client:
        yield client


async def failure_of(answer: Answer, *, timeout: float = 60.0) -> SourceError:  # noqa: ASYNC109 - the settings' own name
    async with (
        run_server(answer) as server,
        client_of(server.url, timeout=timeout, first_timeout=timeout) as client,
    ):
        with pytest.raises(SourceError) as caught:
            await client.read_document()
    return caught.value


# --- requests


async def test_every_call_says_metadata_true_and_nothing_that_azure_refuses() -> None:
    """Else, or with X-Forwarded-For, IMDS answers 400 (docs/protocol.md#no-proxies)."""
    async with run_server() as server, client_of(server.url) as client:
        await client.read_document()
        await client.send_start_request("A")
        await client.read_instance_metadata_body()
    assert len(server.requests) == 3
    for request in server.requests:
        assert request.headers.getall("Metadata") == ["true"]
        assert request.headers.getall("Accept-Encoding") == ["identity"]
        assert request.headers["User-Agent"] == f"imds-relay/{__version__}"
        refused = {"X-Forwarded-For", "Forwarded", "Via", "Cookie", "Authorization", "Connection"}
        assert not refused & set(request.headers)


async def test_a_start_request_names_the_event_in_the_case_it_came_in() -> None:
    event_id = "C7061BAC-afdc-4513-B24B-AA5F13A16123"
    async with run_server(Answer(b"")) as server, client_of(server.url) as client:
        await client.send_start_request(event_id)
    (request,) = server.requests
    target = "/metadata/scheduledevents?api-version=2020-07-01"
    assert (request.method, request.target) == ("POST", target)
    assert request.headers.getall("Content-Type") == ["application/json"]
    assert orjson.loads(request.body) == {"StartRequests": [{"EventId": event_id}]}


async def test_a_proxy_of_the_environment_is_bypassed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server() as server, run_server(Answer(status=502)) as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        async with client_of(server.url) as client:
            assert (await client.read_document()).content == EMPTY
    assert proxy.requests == []


# --- what is answered


@pytest.mark.parametrize("status", [404, 410, 429, 500, 502, 503, 504])
async def test_a_passing_failure_is_unavailable(status: int) -> None:
    failure = await failure_of(Answer(b"sorry", status))
    assert isinstance(failure, SourceUnavailable)
    assert (failure.status, failure.retry_after) == (status, None)
    assert str(status) in failure.reason


async def test_400_is_our_own_fault_and_quotes_what_azure_says() -> None:
    text = b'{"error": "Bad request. api-version is invalid"}' + b"x" * 5000
    failure = await failure_of(Answer(text, 400))
    assert isinstance(failure, SourceRefused)
    assert failure.status == 400
    assert "api-version is invalid" in failure.reason
    assert len(failure.reason) < 400


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_a_failure_and_never_followed(status: int) -> None:
    async with run_server() as elsewhere:
        location = {"Location": f"{elsewhere.url}/metadata/scheduledevents?token=secret"}
        async with (
            run_server(Answer(b"", status, headers=location)) as server,
            client_of(server.url) as client,
        ):
            with pytest.raises(
                SourceUnavailable, match=rf"{status}: a redirect to {elsewhere.url}/"
            ) as read:
                await client.read_document()
            with pytest.raises(SourceUnavailable):
                await client.send_start_request("A")
    assert read.value.status == status
    assert "secret" not in read.value.reason
    assert elsewhere.requests == []
    assert len(server.requests) == 2


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("3600", 60.0)])
async def test_retry_after_reaches_the_caller_up_to_a_minute(header: str, seconds: float) -> None:
    failure = await failure_of(Answer(b"", 429, headers={"Retry-After": header}))
    assert isinstance(failure, SourceUnavailable)
    assert failure.retry_after == seconds


# --- broken answers


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(Answer(raw=b"", then="close"), id="closed without a word"),
        pytest.param(Answer(raw=b"", then="reset"), id="reset without a word"),
        pytest.param(
            Answer(b"{", headers={"Content-Length": "100"}, then="close"), id="closed in the body"
        ),
        pytest.param(
            Answer(b"{", headers={"Content-Length": "100"}, then="reset"), id="reset in the body"
        ),
        pytest.param(
            Answer(b"5\r\n{    \r\n", headers=CHUNKED, then="close"), id="closed between chunks"
        ),
        pytest.param(Answer(b"zz\r\n{}\r\n0\r\n\r\n", headers=CHUNKED), id="no chunk"),
        pytest.param(Answer(raw=b"HELLO\r\n\r\n", then="close"), id="no HTTP"),
        pytest.param(
            Answer(raw=b"HTTP/1.1 200 OK\r\nContent-Len", then="close"), id="closed in the headers"
        ),
    ],
)
async def test_a_broken_answer_is_unavailable(answer: Answer) -> None:
    assert isinstance(await failure_of(answer), SourceUnavailable)


async def test_a_call_that_fails_on_a_kept_connection_is_not_sent_twice() -> None:
    """The library would send a GET again: a call beside the budget."""
    async with (
        run_server(answers_in_order(Answer(), Answer(raw=b"", then="reset"))) as server,
        client_of(server.url) as client,
    ):
        await client.read_document()
        with pytest.raises(SourceUnavailable):
            await client.read_document()
    assert len(server.requests) == 2
    assert server.requests[0].peer == server.requests[1].peer


async def test_an_answer_declared_too_large_is_refused_before_it_is_read() -> None:
    headers = {"Content-Length": str(MAX_DOCUMENT_BYTES + 1)}
    failure = await failure_of(Answer(b"{", headers=headers, then="hang"))
    assert isinstance(failure, DocumentTooLarge)
    assert str(MAX_DOCUMENT_BYTES) in failure.reason


async def test_an_answer_that_goes_on_and_on_is_cut_off() -> None:
    """The client closes the connection soon after the limit."""
    sent = 0
    ended = asyncio.Event()

    async def pour(connection: Connection) -> None:
        nonlocal sent
        await connection.request()
        await connection.send(Answer(b"", headers=CHUNKED).head())
        with contextlib.suppress(ConnectionError):
            while True:
                await connection.send(b"10000\r\n", b" " * 0x10000, b"\r\n")
                sent += 0x10000
        ended.set()

    async with listening(pour) as server, client_of(f"http://127.0.0.1:{server.port}") as client:
        with pytest.raises(DocumentTooLarge):
            await client.read_document()
        await asyncio.wait_for(ended.wait(), 60)
    assert MAX_DOCUMENT_BYTES <= sent < 6 * MAX_DOCUMENT_BYTES, (
        "what is over the limit is what lay in the buffers of two sockets"
    )


@pytest.mark.parametrize(
    ("encoding", "encode"), [("gzip", gzip.compress), ("br", bytes), ("deflate", bytes)]
)
async def test_an_encoded_answer_is_refused(encoding: str, encode: type[bytes]) -> None:
    """The client asks for no compression. Decompression would evade the size limit."""
    failure = await failure_of(Answer(encode(EMPTY), headers={"Content-Encoding": encoding}))
    assert isinstance(failure, DocumentError)
    assert encoding in failure.reason


# --- time


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(Answer(raw=b"", then="hang"), id="no word"),
        pytest.param(Answer(raw=b"HTTP/1.1 200 OK\r\n", then="hang"), id="half of the headers"),
        pytest.param(
            Answer(b"{", headers={"Content-Length": "99"}, then="hang"), id="half of the body"
        ),
        pytest.param(Answer(drip=0.1), id="a byte now and then"),
    ],
)
async def test_the_timeout_covers_the_whole_call(answer: Answer) -> None:
    began = time.monotonic()
    failure = await failure_of(answer, timeout=0.4)
    assert isinstance(failure, SourceUnavailable)
    assert "within 0.4s" in failure.reason
    assert failure.status is None
    assert 0.39 <= time.monotonic() - began < 20  # it waits for no end that never comes


async def test_the_first_call_may_take_long_and_the_next_may_not() -> None:
    answers = answers_in_order(Answer(pause=0.4), Answer(pause=3600))
    async with run_server(answers) as server, client_of(server.url, timeout=0.2) as client:
        assert (await client.read_document()).content == EMPTY
        with pytest.raises(SourceUnavailable, match=r"within 0\.2s"):
            await client.read_document()


def spans_of_three(requests: list[Received]) -> list[float]:
    """Return the seconds between the arrivals of a call and of the second call after it."""
    arrived = sorted(request.at for request in requests)
    return [later - earlier for earlier, later in zip(arrived, arrived[2:], strict=False)]


async def test_no_more_than_two_calls_of_any_kind_arrive_in_one_second() -> None:
    clock = ManualClock()
    async with (
        run_server(clock=clock) as server,
        ImdsClient(SourceSettings(url=server.url), clock) as client,
        clock.ticking(0.01),
        asyncio.TaskGroup() as calls,
    ):
        calls.create_task(client.read_document())
        calls.create_task(client.send_start_request("A"))
        calls.create_task(client.read_instance_metadata_body())
        calls.create_task(client.read_document())
        calls.create_task(client.send_start_request("B"))
        calls.create_task(client.read_instance_metadata_body())
    assert len(server.requests) == 6
    assert min(spans_of_three(server.requests)) >= 1.0
    assert max(spans_of_three(server.requests)) < 1.5, "and no time is wasted"


# --- calls with a deadline


async def test_a_read_gives_the_time_of_the_service_and_the_moments_before_it_was_asked() -> None:
    clock = ManualClock()

    def answer_later(_: Received) -> Answer:
        clock.advance(3)
        return Answer(headers={"Date": "Sat, 11 Apr 2026 12:00:02 GMT"})

    async with (
        run_server(answer_later, clock) as server,
        ImdsClient(SourceSettings(url=server.url), clock) as client,
    ):
        read = await client.read_document()
    assert read == DatedRead(EMPTY, NOON + timedelta(seconds=2), NOON, 0.0)


@pytest.mark.parametrize("checks_in_time", [0, 1, 2])
async def test_a_start_request_whose_time_is_over_is_not_sent(checks_in_time: int) -> None:
    """The time is checked before the call, before the headers, and before the body.

    aiohttp writes the headers together with the body.
    """
    remaining = [60.0] * checks_in_time + [0.0]

    def seconds_left() -> float:
        return remaining.pop(0) if len(remaining) > 1 else remaining[0]

    async with run_server(Answer(b"")) as server, client_of(server.url) as client:
        with pytest.raises(SourceCallNotSentInTime):
            await client.send_start_request("A", seconds_left=seconds_left)
        assert remaining == [0.0]
        await client.send_start_request("B", seconds_left=lambda: 60.0)
    (request,) = server.requests
    assert orjson.loads(request.body) == {"StartRequests": [{"EventId": "B"}]}


async def test_a_start_request_without_an_answer_is_cut_off_at_its_deadline_and_reset() -> None:
    """The answer may still come, so it is not known whether Azure has accepted it."""
    reset = asyncio.Event()

    async def never_answer(connection: Connection) -> None:
        await connection.request()
        try:
            await connection.reader.read()
        except ConnectionResetError:
            reset.set()

    async with (
        listening(never_answer) as server,
        client_of(f"http://127.0.0.1:{server.port}") as client,
    ):
        began = time.monotonic()
        with pytest.raises(SourceUnavailable, match="before the deadline"):
            await client.send_start_request("A", seconds_left=lambda: 0.3)
        assert 0.29 <= time.monotonic() - began < 20
        await asyncio.wait_for(reset.wait(), 60)


# --- the section `source`


def test_the_defaults_are_those_of_the_documentation() -> None:
    assert SourceSettings().model_dump() == {
        "url": "http://169.254.169.254",
        "api_version": "2020-07-01",
        "interval": 1.0,
        "timeout": 10.0,
        "first_timeout": 130.0,
    }


def test_a_url_is_an_origin() -> None:
    for url in ("http://127.0.0.1:8169", "https://simulator.example", "http://[::1]:80"):
        for written in (url, f"{url}/"):
            assert SourceSettings(url=written).url == url
    assert SourceSettings(url="discover").url == "discover"


def test_anything_else_is_refused_without_saying_what_may_be_secret() -> None:
    no_origin = ["169.254.169.254", "ftp://169.254.169.254", "http://", "http://host:99999"]
    no_origin += ["http://host:0", "http://[::1", "", "Discover"]
    users = ["http://user:hunter2@host", "http://hunter2@host"]
    more = ["http://host/metadata", "http://host?a=hunter2", "http://host#hunter2"]
    origin = "expected http:// or https:// and a host, such as http://169.254.169.254, or discover"
    for urls, message in (
        (no_origin, origin),
        (users, "without user and password"),
        (more, "without path, query or fragment"),
    ):
        for url in urls:
            with pytest.raises(ValidationError) as error:
                SourceSettings(url=url)
            assert message in str(error.value)
            assert "hunter2" not in str(error.value)
