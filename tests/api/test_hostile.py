"""Hostile requests, byte by byte: each gets a problem, costs little and blocks nobody."""

from __future__ import annotations

import asyncio
import gzip
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from relay.api.connections import ServerLimits
from tests import hostile
from tests.api.running_relay import EVENT_ID, RunningRelay, make_event, run_relay

HOST = b"Host: relay\r\n"
KEY = b"Authorization: Bearer bearer-test-key-of-alice\r\n"
JSON = b"Content-Type: application/json\r\n"
POST = b"POST /v1/approvals HTTP/1.1\r\n" + HOST + KEY + JSON
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /healthz HTTP/1.1\r\n" + HOST


LONG = 60.0
DEADLINE = 20.0
"""Seconds: less than LONG, even on a busy machine."""


@dataclass(frozen=True, slots=True)
class RawResponse:
    """A response as it was received."""

    status: int
    media: str
    body: bytes


async def send(relay: RunningRelay, *parts: bytes, pause: float = 0.0) -> list[RawResponse]:
    """Send the parts with pauses, and return the responses until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.server.port)
    wire = bytearray()

    async def read() -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(65536):
                wire.extend(chunk)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(read())
        with suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)
    writer.close()
    return list(_answers(bytes(wire)))


def _answers(wire: bytes) -> Iterator[RawResponse]:
    while wire:
        head, _, wire = wire.partition(b"\r\n\r\n")
        status = re.match(rb"HTTP/1\.[01] (\d{3}) ", head)
        assert status is not None, head
        if status[1] == b"100":
            continue
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields[b"Content-Length"])
        yield RawResponse(int(status[1]), fields[b"Content-Type"].decode(), wire[:length])
        wire = wire[length:]


def refused(answers: list[RawResponse], status: int) -> None:
    assert answers, "no answer came"
    last = answers[-1]
    assert last.status == status, last
    assert last.media == "application/problem+json"
    assert orjson.loads(last.body)["status"] == last.status


PATIENT = ServerLimits(idle_timeout=LONG, body_timeout=LONG)
"""The server closes no connection because of time while a test runs."""
IMPATIENT = ServerLimits(idle_timeout=0.5, linger_timeout=0.2, body_timeout=0.5)


def _with_limits(limits: ServerLimits) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("limits", [limits], indirect=True, ids=[""])


@pytest.fixture
def limits(request: pytest.FixtureRequest) -> ServerLimits:
    """The limits of the server: those of `_with_limits`, or PATIENT."""
    limits: ServerLimits = getattr(request, "param", PATIENT)
    return limits


@pytest.fixture
async def relay(tmp_path: Path, limits: ServerLimits) -> AsyncIterator[RunningRelay]:
    """A relay with these limits, whose document holds `event()`."""
    async with run_relay(tmp_path, limits=limits) as started:
        await started.observe(make_event())
        yield started


@pytest.fixture(autouse=True)
async def _unharmed(relay: RunningRelay, caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """After each test the server answers, nothing was decided, and no traceback was logged."""
    caplog.set_level("DEBUG", "aiohttp")
    yield
    async with asyncio.timeout(DEADLINE):
        assert (await relay.call("GET", "/healthz", by=None)).status == 200
        assert (await relay.call("GET", f"/v1/events/{EVENT_ID}", by="bob")).status == 200
    assert await relay.recorded_events("approval.recorded") == []
    assert relay.azure.started == []
    severe = logging.ERROR
    assert [line for line in caplog.records if line.exc_info or line.levelno >= severe] == []
    assert "Traceback" not in caplog.text


def _body(relay: RunningRelay, **changes: Any) -> bytes:
    return orjson.dumps(relay.decision_body(**changes))


def _length(body: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n" % len(body)


def _chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)


# --- bodies


@_with_limits(replace(PATIENT, linger_timeout=0.2))
async def test_a_length_over_the_limit_is_refused_before_the_body(relay: RunningRelay) -> None:
    began = time.monotonic()
    refused(await send(relay, POST + b"Content-Length: 65537\r\n\r\n"), 413)
    refused(await send(relay, POST + b"Content-Length: 99999999999999999\r\n\r\n"), 413)
    assert time.monotonic() - began < DEADLINE


async def test_a_caller_that_sends_everything_first_sees_the_refusal(relay: RunningRelay) -> None:
    """Closing with unread bytes would reset the connection and lose the response."""

    def upload() -> bytes:
        with socket.create_connection(("127.0.0.1", relay.server.port), LONG) as sock:
            sock.sendall(POST + b"Content-Length: 500000\r\n\r\n" + b"x" * 500_000)
            return b"".join(iter(lambda: sock.recv(65536), b""))

    answer = await asyncio.to_thread(upload)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nConnection: close\r\n" in answer


async def test_expect_100_continue_is_answered(relay: RunningRelay) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.server.port)
    body = _body(relay, revision="stale")
    writer.write(POST + b"Expect: 100-continue\r\n" + _length(body))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await reader.readline()).startswith(b"HTTP/1.1 409")
    writer.close()


async def test_another_expectation_is_refused(relay: RunningRelay) -> None:
    refused(await send(relay, POST + b"Expect: magic\r\n" + _length(b"{}") + b"{}"), 417)


async def test_endless_chunks_are_refused_soon(relay: RunningRelay) -> None:
    """The server reads a limited number of bytes on, so that the caller sees the refusal."""
    endless = [_chunked(b"x" * 65536)] * 16_000  # a gigabyte
    began = time.monotonic()
    refused(await send(relay, CHUNKED, *endless), 413)
    assert time.monotonic() - began < DEADLINE


TWICE = (b"identity\r\nContent-Encoding: gzip", b"gzip\r\nContent-Encoding: identity")


async def test_an_encoded_body_is_refused_and_never_unpacked(relay: RunningRelay) -> None:
    bomb = gzip.compress(bytes(10_000_000))
    for encoding in (b"gzip", b"GZIP", b"deflate", b"br", b"gzip, identity", b"x", *TWICE):
        head = POST + b"Connection: close\r\nContent-Encoding: " + encoding + b"\r\n"
        refused(await send(relay, head + _length(bomb), bomb), 415)


async def test_another_content_type_is_refused(relay: RunningRelay) -> None:
    body = _body(relay)
    others = b"text/plain", b"application/json; charset=utf-16", b"json", b""
    for media in (*others, b"application/x-www-form-urlencoded", b"multipart/form-data"):
        head = POST.replace(JSON, b"Content-Type: " + media + b"\r\n") + b"Connection: close\r\n"
        refused(await send(relay, head + _length(body) + body), 415)


@_with_limits(IMPATIENT)
async def test_a_body_that_comes_too_slowly_is_given_up(relay: RunningRelay) -> None:
    drip = [bytes([byte]) for byte in _body(relay)]
    refused(await send(relay, POST + _length(_body(relay)), *drip, pause=0.03), 408)


async def test_a_body_that_breaks_off_decides_nothing(relay: RunningRelay) -> None:
    body = _body(relay)
    for cut in (0, 1, len(body) - 1):
        _, writer = await asyncio.open_connection("127.0.0.1", relay.server.port)
        writer.write(POST + _length(body) + body[:cut])
        await asyncio.sleep(0.05)
        writer.close() if cut else writer.transport.abort()


async def test_a_body_that_is_no_decision_is_400_or_422_with_its_field(relay: RunningRelay) -> None:
    for body in (*hostile.NO_OBJECTS, *hostile.REPEATED_KEYS):
        head = POST + b"Connection: close\r\n" + _length(body)
        refused(await send(relay, head + body), 400)
    relay.clock.freeze_monotonic()
    for field, value in hostile.WRONG_FIELDS:
        relay.clock.offset += 1.0
        body = orjson.dumps(hostile.with_wrong_field(relay.decision_body(), field, value))
        answer = await relay.call("POST", "/v1/approvals", body)
        assert (answer.status, answer.json["field"]) == (422, field), value


@pytest.mark.parametrize(
    "text",
    ["'; DROP TABLE journal; --", "\u202e gnol", "💣" * 60, "${jndi:ldap://x}", "../../etc/passwd"],
)
async def test_unusual_text_is_recorded_as_text(relay: RunningRelay, text: str) -> None:
    answer = await relay.decide(eventId=text, reason=f"{text}\x00\r\n\x1b[2J")
    assert answer.status == 404
    (refusal,) = await relay.recorded_events("approval.refused")
    assert (refusal["subject"], refusal["data"]["reason"]) == (text, f"{text}\x00\r\n\x1b[2J")


# --- framing

_LONG = b"x" * 9000
MALFORMED = {
    "no HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "zeros": bytes(1000),
    "noise": bytes(range(256)) * 8,
    "no version": b"GET /healthz\r\n\r\n",
    "version 9": b"GET /healthz HTTP/9.9\r\n\r\n",
    "a space in the target": b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n",
    "no colon": GET + b"nonsense\r\n\r\n",
    "a space before the colon": GET + b"X : y\r\n\r\n",
    "a zero in a value": GET + b"X: a\x00b\r\n\r\n",
    "a long line": b"GET /" + _LONG + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "a long value": GET + b"X: " + _LONG + b"\r\n\r\n",
    "a long name": GET + _LONG + b": x\r\n\r\n",
    "many fields": GET + b"X: y\r\n" * 2000 + b"\r\n",
    "a field without end": GET + b"X: " + b"y" * 100_000,
    "both lengths": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both, the other way": POST
    + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}{}{}",
    "a length twice": POST + b"Content-Length: 2, 2\r\n\r\n{}",
    "a negative length": POST + b"Content-Length: -1\r\n\r\n",
    "a signed length": POST + b"Content-Length: +2\r\n\r\n{}",
    "a hexadecimal length": POST + b"Content-Length: 0x2\r\n\r\n{}",
    "a length over 64 bits": POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked and more": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a chunk size that is none": CHUNKED + b"zz\r\n",
    "a negative chunk": CHUNKED + b"-1\r\n\r\n",
    "a chunk that is longer than said": CHUNKED + b"2\r\n{}xx\r\n0\r\n\r\n",
    "a chunk over 64 bits": CHUNKED + b"fffffffffffffffff\r\n",
    "a header folded": GET + b"X: a\r\n b\r\n\r\n",
    "a bare carriage return": GET + b"X: a\rb: c\r\n\r\n",
}


async def test_malformed_http_is_400_and_closes_the_connection(relay: RunningRelay) -> None:
    """Nothing behind it is taken for a request: a proxy in front might have seen it otherwise."""
    for name, malformed in MALFORMED.items():
        answers = await send(relay, malformed + GET + b"\r\n")
        refused(answers, 400)
        assert len(answers) == 1, name


@_with_limits(IMPATIENT)
@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c", b"TLS/1.0"])
async def test_an_upgrade_is_not_made(relay: RunningRelay, upgrade: bytes) -> None:
    head = b"GET /v1/stream HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\n"
    rubbish = b"\r\n\r\n\x00\xff rubbish \r\n\r\n"
    answers = await send(relay, head + b"Upgrade: " + upgrade + rubbish)
    assert answers[0].status == 401


ERRORS = (
    (b"GET /nothing HTTP/1.1", 404),
    (b"GET //healthz HTTP/1.1", 404),
    (b"GET /healthz/ HTTP/1.1", 404),
    (b"GET /v1/../healthz HTTP/1.1", 404),
    (b"GET /%2e%2e/etc/passwd HTTP/1.1", 404),
    (b"GET /v1/events/%zz HTTP/1.1", 401),
    (b"POST /v1/chat/slack HTTP/1.1", 404),
    (b"TRACE /healthz HTTP/1.1", 405),
    (b"OPTIONS * HTTP/1.1", 404),
    (b"CONNECT relay:443 HTTP/1.1", 404),
    (b"DELETE /v1/events HTTP/1.1", 405),
    (b"GET http://elsewhere/v1/events HTTP/1.1", 401),
    (b"GET http://[::1 HTTP/1.1", 400),
    (b"POST /healthz HTTP/1.0", 405),
)


async def test_every_error_is_a_problem(relay: RunningRelay) -> None:
    for line, status in ERRORS:
        refused(await send(relay, line + b"\r\n" + HOST + b"Connection: close\r\n\r\n"), status)


async def test_pipelined_requests_are_answered_in_order(relay: RunningRelay) -> None:
    first, other = GET + b"\r\n", b"GET /nothing HTTP/1.1\r\n" + HOST + b"\r\n"
    last = b"GET /readyz HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n"
    answers = await send(relay, (first + other) * 50 + last)
    assert [answer.status for answer in answers] == [200, 404] * 50 + [200]


async def test_two_credentials_are_401(relay: RunningRelay) -> None:
    head = b"GET /v1/events HTTP/1.1\r\nConnection: close\r\n" + HOST
    two = KEY + b"Authorization: Bearer bearer-test-key-of-bob\r\n\r\n"
    refused(await send(relay, head + two), 401)
    refused(await send(relay, head + b"authorization: Bearer \xff\xfe\r\n\r\n"), 401)


# --- connections


@_with_limits(IMPATIENT)
async def test_a_silent_connection_is_closed(relay: RunningRelay) -> None:
    began = time.monotonic()
    assert await send(relay) == []
    assert await send(relay, b"GET /healthz HT") == []
    assert await send(relay, b"GET /healthz HTTP/1.1\r\n", *[b"X: y\r\n"] * 30, pause=0.03) == []
    assert time.monotonic() - began < DEADLINE


@_with_limits(IMPATIENT)
async def test_an_idle_connection_is_closed_after_its_answer(relay: RunningRelay) -> None:
    began = time.monotonic()
    (answer,) = await send(relay, GET + b"\r\n")
    assert answer.status == 200
    assert 0.4 < time.monotonic() - began < DEADLINE


@_with_limits(replace(PATIENT, max_connections=3))
async def test_closed_connections_do_not_count(
    relay: RunningRelay, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        async with aiohttp.ClientSession() as client:
            assert (await relay.call("GET", "/v1/events", session=client)).status == 200
    assert "new one replaces" not in caplog.text


@_with_limits(replace(PATIENT, send_timeout=0.5))
async def test_a_caller_that_does_not_read_responses_is_dropped(relay: RunningRelay) -> None:
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect(("127.0.0.1", relay.server.port))
    deaf.setblocking(False)
    asking = (b"GET /openapi.json HTTP/1.1\r\n" + HOST + b"\r\n") * 100

    async def ask_without_end() -> None:
        while True:
            await asyncio.get_running_loop().sock_sendall(deaf, asking)

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(ask_without_end(), DEADLINE)
    deaf.close()


async def test_an_internal_error_is_500_and_reveals_nothing(
    relay: RunningRelay, caplog: pytest.LogCaptureFixture
) -> None:
    broken = replace(relay.relay, source=None)  # type: ignore[arg-type]  # breaks /readyz
    relay.server.state.attach_relay(broken)
    answer = await relay.call("GET", "/readyz", by=None)
    assert answer.status == 500
    assert answer.json["detail"] == "an internal error of the relay; its log says more"
    assert "AttributeError" in caplog.text
    assert b"Attribute" not in answer.body
    caplog.clear()
