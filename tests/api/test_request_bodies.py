"""Every route with a JSON body reads it in the same way."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest

from relay.api.routes import all_routes
from relay.events.timestamps import format_rfc3339
from tests.api.running_relay import RunningRelay

_TOMORROW = format_rfc3339(datetime.now(UTC) + timedelta(days=1))
BODIES: dict[str, dict[str, Any]] = {
    "POST /v1/approvals": {"eventId": "unknown", "decision": "hold", "revision": "x"},
    "PUT /v1/approvals/mode": {"mode": "off"},
    "POST /v1/callbacks/drain": {"eventId": "unknown", "decision": "hold", "revision": "x"},
    "POST /v1/dead-letters/redeliver": {"sink": "box"},
    "POST /v1/standing-holds": {"reason": "r", "match": {}, "ends": _TOMORROW},
    "POST /v1/standing-holds/unknown/end": {"reason": "r"},
}
"""A valid body for each route that has one."""


async def _send(relay: RunningRelay, call: str, body: bytes) -> tuple[int, dict[str, Any]]:
    method, path = call.split()
    if path.startswith("/v1/callbacks/"):
        answer = await relay.post_callback(body)
    else:
        answer = await relay.call(method, path, body)
    return answer.status, answer.json


def test_every_route_with_a_body_is_tested_here() -> None:
    with_body = {f"{route.method} {route.path}" for route in all_routes() if route.body}
    assert with_body == {
        call.replace("/drain", "/{client}").replace("/unknown/", "/{holdId}/") for call in BODIES
    }


@pytest.mark.parametrize("call", BODIES)
async def test_a_key_that_appears_twice_is_400(relay: RunningRelay, call: str) -> None:
    """Readers of JSON disagree on which of two values counts (RFC 8259, section 4)."""
    body = orjson.dumps(BODIES[call])
    first_field = body[1:].partition(b",")[0].removesuffix(b"}")
    status, problem = await _send(relay, call, b"{" + first_field + b"," + body[1:])
    assert (status, "with every key once" in problem["detail"]) == (400, True)


@pytest.mark.parametrize("call", BODIES)
@pytest.mark.parametrize("content", [b"", b"[]", b"null", b'"text"', b"{"], ids=repr)
async def test_anything_but_an_object_is_400(
    relay: RunningRelay, call: str, content: bytes
) -> None:
    status, _problem = await _send(relay, call, content)
    assert status == 400


@pytest.mark.parametrize("call", BODIES)
async def test_an_unknown_field_is_422_and_named(relay: RunningRelay, call: str) -> None:
    status, problem = await _send(relay, call, orjson.dumps({**BODIES[call], "unknown": 1}))
    assert (status, problem["field"]) == (422, "unknown")


@pytest.mark.parametrize("call", BODIES)
async def test_a_valid_body_is_read(relay: RunningRelay, call: str) -> None:
    status, _problem = await _send(relay, call, orjson.dumps(BODIES[call]))
    assert status in (200, 201, 202, 404)
