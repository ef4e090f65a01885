"""Every route with a JSON body reads it in the same way."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import orjson

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


async def test_every_body_is_read_as_one_object_with_unique_and_known_keys(
    relay: RunningRelay,
) -> None:
    """Readers of JSON disagree on which of two values counts (RFC 8259, section 4)."""
    for call, valid in BODIES.items():
        body = orjson.dumps(valid)
        first_field = body[1:].partition(b",")[0].removesuffix(b"}")
        status, problem = await _send(relay, call, b"{" + first_field + b"," + body[1:])
        assert (status, "with every key once" in problem["detail"]) == (400, True), call
        for content in (b"", b"[]", b"null", b'"text"', b"{"):
            assert (await _send(relay, call, content))[0] == 400, (call, content)
        status, problem = await _send(relay, call, orjson.dumps({**valid, "unknown": 1}))
        assert (status, problem["field"]) == (422, "unknown"), call
        status, _problem = await _send(relay, call, body)
        assert status in (200, 201, 202, 404), call
