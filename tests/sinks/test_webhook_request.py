"""The request on the wire: a signed POST that other libraries can verify and read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from standardwebhooks import Webhook as StandardWebhook

from relay import __version__
from relay.clock import SystemClock
from relay.sinks.webhook import connect, signed_headers
from tests.builders import cloudevent
from tests.sinks.http_receiver import Received, good, listening
from tests.sinks.webhook_sink import NOW, OTHER_SECRET, SECRET, settings


async def received_request(**fields: Any) -> Received:
    """The request of one delivery, as the receiver got it."""
    async with (
        listening(good) as receiver,
        connect(settings(url=receiver.url, **fields), SystemClock()) as sink,
    ):
        await sink.deliver(cloudevent())
    return receiver.requests[0]


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


async def test_the_wire_carries_the_post_and_nothing_that_aiohttp_or_the_machine_would_add() -> (
    None
):
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
    received = await received_request(secrets=[SECRET, OTHER_SECRET])
    for secret in (SECRET, OTHER_SECRET):
        assert (
            StandardWebhook(secret).verify(received.body, dict(received.headers))["id"]
            == cloudevent().id
        )


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
