"""Receivers that hang, drip, flood and lie: bounded in time and memory, and no secret shown."""

from __future__ import annotations

import asyncio
import gzip
import ssl
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from relay.errors import Deferred
from tests.builders import cloudevent
from tests.certificates import LOOPBACK
from tests.sinks.http_receiver import Behaviour, Connection, Names, good, listening, says
from tests.sinks.webhook_sink import deliver, failure, sink, within

MIB = 1024 * 1024
TIMEOUT = "300ms"
SOON = 20.0
"""Seconds within which a request ends that does not need the other timeout of 30 s."""


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture
async def little_memory() -> AsyncIterator[None]:
    """The test and its receiver need at most 1 MB, without what a first failure loads."""
    async with listening(says()) as receiver:
        await failure(receiver.url, timeout="50ms")
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


# --- before there is an answer


async def never_reads(connection: Connection) -> None:
    connection.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a stream's transport both reads and writes
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    "behaviour",
    [
        pytest.param(says(), id="nothing"),
        pytest.param(never_reads, id="does not read"),
        pytest.param(says(HEAD, drip=b"X: y\r\n"), id="headers now and then"),
        pytest.param(says(drip=b"HTTP/1.1 100 Continue\r\n\r\n", pause=0), id="continue"),
    ],
)
@pytest.mark.usefixtures("little_memory")
async def test_who_never_answers_is_left_at_the_timeout(behaviour: Behaviour) -> None:
    async with listening(behaviour) as receiver, within(SOON, at_least=0.3):
        refused = await failure(receiver.url, timeout=TIMEOUT)
    assert (refused.failure, refused.status) == ("transient", None)
    assert refused.reason == "expected an answer within 0.3 s, none came"


@pytest.mark.usefixtures("little_memory")
async def test_the_timeout_covers_a_tls_handshake_that_hangs() -> None:
    async def silent(_: Connection) -> None:
        await asyncio.Event().wait()

    async with listening(silent) as receiver, within(SOON):
        refused = await failure(receiver.url.replace("http:", "https:"), timeout=TIMEOUT)
    assert "expected an answer within 0.3 s" in refused.reason


@pytest.mark.usefixtures("little_memory")
async def test_what_is_not_http_is_a_failure_that_passes() -> None:
    for response, reason in (
        (b"", "the connection was closed without one"),
        (HEAD + b"Conte", "the connection was closed without one"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "expected an HTTP answer, got something else"),
        (HEAD + b"no colon\r\n\r\n", "expected an HTTP answer, got something else"),
        (
            HEAD + b"X: " + b"y" * 70_000 + b"\r\n\r\n",
            "expected an HTTP answer, got something else",
        ),
        (HEAD + b"X: y\r\n" * 10_000 + b"\r\n", "expected an HTTP answer, got something else"),
    ):
        async with listening(says(response, then="hang up")) as receiver, within(SOON):
            refused = await failure(receiver.url)
        assert refused.failure == "transient"
        assert reason in refused.reason


async def refuses_before_it_has_read(connection: Connection) -> None:
    await connection.reader.readuntil(b"\r\n\r\n")
    await connection.answer(413, {"Connection": "close"})


@pytest.mark.parametrize("behaviour", [never_reads, refuses_before_it_has_read])
async def test_a_huge_event_that_is_not_read_whole_fails_in_time(behaviour: Behaviour) -> None:
    huge = cloudevent(data={"resources": ["x" * 100] * 200_000})
    async with (
        listening(behaviour) as receiver,
        sink(url=receiver.url, timeout=TIMEOUT) as webhook,
        within(SOON),
    ):
        with pytest.raises(Deferred):
            await webhook.deliver(huge)


async def test_a_certificate_that_is_not_trusted_or_for_another_name_is_a_passing_failure() -> None:
    trusting = ssl.create_default_context(cafile=LOOPBACK)
    names = Names({"t0ken.test": ["127.0.0.1"]})
    async with listening(good, tls=True) as receiver:
        for url, tls, problem in (
            (receiver.url, None, "self-signed certificate; name the CA"),
            (f"https://t0ken.test:{receiver.port}/", trusting, "it is for another name; correct"),
        ):
            refused = await failure(url, resolver=names if tls else None, tls=tls)
            assert refused.failure == "transient"
            assert refused.reason.startswith(
                f"expected a certificate that this machine trusts: {problem}"
            )
    assert receiver.requests == []


# --- once there is an answer, its status decides


@pytest.mark.parametrize(
    "behaviour",
    [
        pytest.param(says(HEAD, b"Content-Length: 1000\r\n\r\n", drip=b"."), id="drips"),
        pytest.param(says(HEAD, b"Content-Length: 9\r\n\r\nstart", then="hang up"), id="stops"),
        pytest.param(says(HEAD, b"\r\nstart", then="half-close"), id="half-closes"),
        pytest.param(says(HEAD, b"Content-Length: 5\r\n\r\n"), id="nothing more"),
    ],
)
@pytest.mark.usefixtures("little_memory")
async def test_a_2xx_is_delivered_whatever_becomes_of_its_body(behaviour: Behaviour) -> None:
    """The status says that the receiver has the event. The body may take a second at most."""
    async with listening(behaviour) as receiver, within(SOON):
        receipt = await deliver(receiver.url, timeout="400ms")
    assert receipt.status == 200
    assert receipt.response is None or receipt.response.startswith((".", "start"))


@pytest.mark.usefixtures("little_memory")
async def test_of_a_gigabyte_64_kibibytes_are_read_and_the_connection_is_dropped() -> None:
    flood = b"x" * 65536

    async def floods(connection: Connection) -> None:
        await connection.request()
        await connection.send(HEAD, b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(16384):
                await connection.send(b"10000\r\n", flood, b"\r\n")
                taken.append(len(flood))
        finally:
            dropped.set()

    taken: list[int] = []
    dropped = asyncio.Event()
    async with listening(floods) as receiver, sink(url=receiver.url) as webhook, within(SOON):
        receipt = await webhook.deliver(cloudevent())
        await dropped.wait()  # while the session is still open
    assert (receipt.status, receipt.response) == (200, "x" * 1024)
    assert sum(taken) < 16 * MIB  # what the kernel's buffers on both sides hold


@pytest.mark.usefixtures("little_memory")
async def test_a_bomb_is_not_unpacked() -> None:
    bomb = gzip.compress(b"\0" * (64 * MIB), compresslevel=9)
    tracemalloc.reset_peak()

    async def bombs(connection: Connection) -> None:
        await connection.request()
        await connection.answer(500, {"Content-Encoding": "gzip"}, bomb)

    async with listening(bombs) as receiver, within(SOON):
        refused = await failure(receiver.url)
    assert (refused.status, refused.answer) == (500, None)


async def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next_one() -> None:
    async def hasty(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n" * 2)
        await connection.request()
        await connection.answer(500)

    async with listening(hasty) as receiver, sink(url=receiver.url) as webhook:
        assert (await webhook.deliver(cloudevent())).status == 200
        await webhook.deliver(cloudevent())
    assert receiver.connections == 2
