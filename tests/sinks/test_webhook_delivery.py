"""The request on the wire, which other libraries verify and read, and deliveries that go well."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from standardwebhooks import Webhook as StandardWebhook

from relay import __version__
from relay.clock import SystemClock
from relay.errors import Deferred
from relay.sinks import Receipt
from relay.sinks.webhook import connect, signed_headers
from tests.builders import cloudevent
from tests.certificates import LOOPBACK
from tests.sinks.http_receiver import Connection, good, listening
from tests.sinks.webhook_sink import (
    NOW,
    OTHER_SECRET,
    SECRET,
    deliver,
    failure,
    received_request,
    settings,
    sink,
)


def test_the_timestamp_is_the_attempts_whole_seconds_in_utc() -> None:
    """A fraction, or local time taken for UTC, fails at every receiver."""
    east = NOW.astimezone(timezone(timedelta(hours=5, minutes=45)))
    for now in (NOW, east):
        headers = signed_headers((SECRET, OTHER_SECRET), cloudevent(), now)
        assert headers["webhook-timestamp"] == "1775946418"
        first, second = headers["webhook-signature"].split(" ")
        assert first.startswith("v1,")
        assert second.startswith("v1,")
        assert first != second


async def test_the_wire_carries_the_post_and_nothing_that_aiohttp_would_add() -> None:
    received = await received_request()
    assert received.line == "POST /hook/t0ken-in-path?key=t0ken-in-query HTTP/1.1"
    assert received.body == cloudevent().body
    assert {name.lower() for name in received.headers} == {
        *("host", "user-agent", "accept", "accept-encoding", "content-length"),
        *("content-type", "webhook-id", "webhook-timestamp", "webhook-signature"),
    }
    assert received.headers["User-Agent"] == f"imds-relay/{__version__}"
    assert received.headers["Accept-Encoding"] == "identity"
    assert received.headers["Content-Type"] == "application/cloudevents+json; charset=utf-8"


async def test_the_standardwebhooks_library_verifies_it_with_each_secret_of_a_rotation() -> None:
    async with (
        listening(good) as receiver,
        connect(settings(url=receiver.url, secrets=[SECRET, OTHER_SECRET]), SystemClock()) as sink,
    ):
        await sink.deliver(cloudevent())
    (received,) = receiver.requests
    for secret in (SECRET, OTHER_SECRET):
        verified = StandardWebhook(secret).verify(received.body, dict(received.headers))
        assert verified["id"] == cloudevent().id


async def test_the_cloudevents_sdk_reads_it() -> None:
    received = await received_request()
    headers = {name.lower(): value for name, value in received.headers.items()}
    event = from_http_event(HTTPMessage(headers, received.body))
    ours = cloudevent()
    assert event.get_id() == ours.id == headers["webhook-id"]
    assert event.get_type() == "io.imdsrelay.event.scheduled.v1"
    assert event.get_source() == ours.attributes["source"]
    assert event.get_subject() == ours.subject
    assert event.get_time() == datetime(2022, 4, 11, 22, 11, 58, 123456, UTC)
    assert event.get_extension("partitionkey") == ours.subject
    assert event.get_data() == ours.data


async def test_a_2xx_is_delivered_and_its_first_words_are_kept_for_the_log() -> None:
    async def thankful(connection: Connection) -> None:
        await connection.request()
        await connection.answer(202, {}, "  drained: dør\x1b[31m\n".encode())

    async with listening(thankful) as receiver:
        words = "drained: dør\N{REPLACEMENT CHARACTER}[31m"
        assert await deliver(receiver.url) == Receipt(202, words)


async def test_an_answer_that_repeats_the_url_is_kept_without_it() -> None:
    """Common frameworks do so in their 404 page, and path or query can be a credential."""

    async def echo(connection: Connection) -> None:
        target = (await connection.request()).line.split(" ")[1]
        path, _, query = target.partition("?")
        text = " ".join(f"no {part} here" for part in (target, path, query))
        await connection.answer(404, {}, text.encode())

    async with listening(echo) as receiver:
        assert (await failure(receiver.url)).answer == " ".join(["no … here"] * 3)


async def test_one_connection_is_used_again_and_again_and_cookies_are_not_kept() -> None:
    async def cookie(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.answer(204, {"Set-Cookie": "session=1; Path=/"})

    async with (
        listening(cookie) as receiver,
        sink(url=receiver.url.replace("127.0.0.1", "localhost")) as webhook,
    ):
        for _ in range(20):
            await webhook.deliver(cloudevent())
    assert (receiver.connections, len(receiver.requests)) == (1, 20)
    assert not any("Cookie" in request.headers for request in receiver.requests)


async def test_a_redirect_is_a_failure_and_never_followed() -> None:
    async with listening(good) as elsewhere:

        async def redirecting(connection: Connection) -> None:
            await connection.request()
            await connection.answer(307, {"Location": elsewhere.url})

        async with listening(redirecting) as receiver:
            refused = await failure(receiver.url)
    assert (refused.failure, refused.status) == ("slow", 307)
    assert (len(receiver.requests), elsewhere.connections) == (1, 0)


async def test_proxies_and_passwords_of_the_environment_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login relay password t0ken\n")
    netrc.chmod(0o600)
    async with listening(good) as proxy, listening(good) as receiver:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("NETRC", str(netrc))
        monkeypatch.delenv("no_proxy", raising=False)
        await deliver(receiver.url)
    assert proxy.connections == 0
    assert "Authorization" not in receiver.requests[0].headers


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("url", "https://u:t0ken@h/", "without user and password"),
        ("url", "http://169.254.169.254/t0ken", "a metadata or host address"),
        ("secrets", f"{SECRET}\nwhsec_t0ken", "number 2: expected whsec_"),
        ("secrets", "", "expected at least one secret"),
        ("bearer", "with spaces t0ken", "expected a token on one line"),
    ],
)
async def test_a_file_that_has_become_wrong_is_waited_for_and_told_without_its_content(
    tmp_path: Path, name: str, text: str, reason: str
) -> None:
    good_texts = {"url": "http://127.0.0.1:9/", "secrets": SECRET, "bearer": "t0ken"}
    for field, good_text in good_texts.items():
        (tmp_path / field).write_text(good_text)
    files = {f"{field}_file": str(tmp_path / field) for field in good_texts}
    sink_settings = settings(**files, secrets=[])
    (tmp_path / name).write_text(text)
    async with connect(sink_settings, SystemClock()) as webhook:
        with pytest.raises(Deferred, match=reason) as caught:
            await webhook.deliver(cloudevent())
    assert caught.value.failure == "transient"
    assert "t0ken" not in caught.value.reason


async def test_a_proxy_is_asked_for_the_receiver_and_knows_nothing_of_tls_within() -> None:
    async with listening(good, tls=True) as receiver:

        async def tunnel(connection: Connection) -> None:
            await connection.request()
            reader, writer = await asyncio.open_connection("127.0.0.1", receiver.port)
            await connection.send(b"HTTP/1.1 200 Connection established\r\n\r\n")

            async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
                while data := await source.read(65536):
                    target.write(data)

            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(copy(connection.reader, writer))
                    both.create_task(copy(reader, connection.writer))
            finally:
                writer.transport.abort()

        async with listening(tunnel) as proxy:
            trusting = ssl.create_default_context(cafile=LOOPBACK)
            url, by = receiver.url.replace("127.0.0.1", "localhost"), proxy.port
            receipt = await deliver(url, tls=trusting, proxy=f"http://127.0.0.1:{by}")
    assert receipt.status == 204
    (asked,) = proxy.requests
    assert asked.line == f"CONNECT localhost:{receiver.port} HTTP/1.1"
    assert receiver.requests[0].line == "POST /hook/t0ken-in-path?key=t0ken-in-query HTTP/1.1"
