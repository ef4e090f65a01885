"""The request on the wire: a signed POST that other libraries can verify and read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from standardwebhooks import Webhook as StandardWebhook
from yarl import URL

from relay import __version__
from relay.clock import SystemClock
from relay.net.http import Request
from relay.sinks.webhook import CommonRequestParts, build_request, connect
from tests.builders import cloudevent
from tests.sinks.http_receiver import Received, good, listening
from tests.sinks.webhook_sink import NOW, OTHER_SECRET, SECRET, settings

URL_ = URL("https://drain.example.com/azure?x=%2F")


def request_at(now: datetime, *secrets: str) -> Request:
    """The request for an event at a time."""
    parts = CommonRequestParts(url=URL_, secrets=secrets or (SECRET,), headers={}, hidden_texts=())
    return build_request(parts, cloudevent(), now)


async def received_request(**fields: Any) -> Received:
    """The request of one delivery, as the receiver got it."""
    async with (
        listening(good) as receiver,
        connect(settings(url=receiver.url, **fields), SystemClock()) as sink,
    ):
        await sink.deliver(cloudevent())
    return receiver.requests[0]


def test_building_a_request_is_pure_and_gives_the_headers_of_the_documentation() -> None:
    event = cloudevent()
    request = request_at(NOW, SECRET, OTHER_SECRET)
    assert request == request_at(NOW, SECRET, OTHER_SECRET)
    assert (request.url, request.body) == (URL_, event.body)
    assert set(request.headers) == {
        "Content-Type",
        "webhook-id",
        "webhook-timestamp",
        "webhook-signature",
    }
    assert request.headers["Content-Type"] == "application/cloudevents+json; charset=utf-8"
    assert request.headers["webhook-id"] == event.id
    first, second = request.headers["webhook-signature"].split(" ")
    assert first.startswith("v1,")
    assert second.startswith("v1,")
    assert first != second


def test_the_timestamp_is_the_attempts_whole_seconds_in_utc() -> None:
    """A fraction, or local time taken for UTC, fails at every receiver."""
    east = NOW.astimezone(timezone(timedelta(hours=5, minutes=45)))
    for now in (NOW, east):
        assert request_at(now).headers["webhook-timestamp"] == "1775946418"


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
