"""POST /v1/callbacks/{client}, signed by the reference library of Standard Webhooks."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import orjson
import pytest

from tests import hostile
from tests.api.running_relay import OTHER_SECRET, Response, RunningRelay


def _body(relay: RunningRelay, **changes: str) -> bytes:
    return orjson.dumps(relay.decision_body(**changes))


async def test_a_signed_callback_is_a_vote_of_its_client(relay: RunningRelay) -> None:
    answer = await relay.post_callback(_body(relay, ticket="CHG-7"))
    assert (answer.status, answer.json["state"]) == (202, "pending")
    (recorded,) = await relay.recorded_events("approval.recorded")
    said = [recorded["data"][name] for name in ("principal", "channel", "ticket")]
    assert said == ["client:drain", "callback", "CHG-7"]


async def test_the_webhook_id_identifies_a_repeat_over_http_too(relay: RunningRelay) -> None:
    """They are one principal: what came as a callback is not done again with a key."""
    body = _body(relay)
    first = await relay.post_callback(body)
    later = await relay.post_callback(body)
    headers = {"webhook-id": "msg_1"}
    over_http = await relay.call("POST", "/v1/approvals", body, by="drain", headers=headers)
    assert first.json == later.json == over_http.json
    assert len(await relay.recorded_events("approval.recorded")) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"secret": OTHER_SECRET},
        {"client": "nobody"},
        {"client": "bob"},  # has no secret
        {"webhook_id": "msg_2"},
        {"webhook_signature": None},
        {"webhook_timestamp": "0"},
    ],
    ids=str,
)
async def test_a_wrong_signature_is_a_bare_401(relay: RunningRelay, wrong: dict[str, str]) -> None:
    answer = await relay.post_callback(_body(relay), **wrong)
    assert answer.status == 401
    said = "expected a body signed as Standard Webhooks with this client's secret"
    assert answer.json["detail"] == said
    assert await relay.recorded_events("approval.recorded") == []
    assert await relay.recorded_events("approval.refused") == []


async def test_a_key_is_no_signature_and_a_signature_is_no_key(relay: RunningRelay) -> None:
    body = _body(relay)
    assert (await relay.call("POST", "/v1/callbacks/alice", body, by="alice")).status == 401
    assert (await relay.post_callback(body)).status == 202
    signed = {
        "webhook-id": "msg_9",
        "webhook-timestamp": str(int(time.time())),
        "webhook-signature": "v1,AAAA",
    }
    assert (await relay.call("POST", "/v1/approvals", body, by=None, headers=signed)).status == 401


async def test_a_signed_malformed_body_is_400_and_a_wrong_field_422(relay: RunningRelay) -> None:
    for body in (*hostile.NO_OBJECTS, *hostile.REPEATED_KEYS):
        signed = body.isascii()  # the library signs text only
        assert (await relay.post_callback(body)).status == (400 if signed else 401)
    relay.clock.freeze_monotonic()
    for field, value in hostile.WRONG_FIELDS:
        relay.clock.offset += 1.0
        wrong = hostile.with_wrong_field(relay.decision_body(), field, value)
        answer = await relay.post_callback(json.dumps(wrong).encode())  # in ASCII
        assert (answer.status, answer.json["field"]) == (422, field), value


def _capture(relay: RunningRelay, body: bytes) -> Callable[[], Awaitable[Response]]:
    """Return a function that sends the same signed callback each time."""
    headers = relay.signed(body)
    return lambda: relay.call("POST", "/v1/callbacks/drain", body, by=None, headers=headers)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        ({}, 202),
        ({"revision": "stale"}, 409),
        ({"eventId": "unknown"}, 404),
        ({"decision": 1}, 422),
    ],
)
async def test_a_captured_callback_costs_its_client_nothing(
    relay: RunningRelay, content: dict[str, object], status: int
) -> None:
    """Copies are charged to the address, which bounds them."""
    relay.clock.freeze_monotonic()
    send = _capture(relay, orjson.dumps(relay.decision_body() | content))
    first = await send()
    copies = [await send() for _ in range(103)]
    assert {answer.body for answer in copies[:100]} == {first.body}
    assert [answer.status for answer in copies] == [status] * 100 + [429] * 3
    calls = Counter([(await relay.call("GET", "/v1/events", by="drain")).status for _ in range(50)])
    assert calls == {403: 49, 429: 1}


async def test_a_client_over_its_rate_does_not_get_through_by_repeats(relay: RunningRelay) -> None:
    relay.clock.freeze_monotonic()
    for _ in range(50):
        await relay.call("GET", "/v1/events", by="drain")
    send = _capture(relay, _body(relay))
    assert [(await send()).status for _ in range(3)] == [429] * 3
    relay.clock.offset = 1.0
    assert (await send()).status == 202
