"""/openapi.json: whole, valid, and of the very routes that are served, which read bodies alike."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from relay.api.routes import ROUTES
from relay.approvals.request import DecisionBody
from relay.events.timestamps import format_rfc3339
from tests.api.running_relay import RunningRelay


@pytest.fixture
async def document(relay: RunningRelay) -> dict[str, Any]:
    """The description that a relay gives of its API."""
    document: dict[str, Any] = (await relay.call("GET", "/openapi.json", by=None)).json
    return document


def test_the_description_is_valid_openapi(document: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(document).validate()
    for key, field in document["components"]["schemas"]["Match"]["properties"].items():
        assert field.get("description"), key


async def test_each_described_path_is_served(relay: RunningRelay, document: dict[str, Any]) -> None:
    """Each described path exists: it gives 401, a response, or an error about the request."""
    for path, item in document["paths"].items():
        for method in item:
            answer = await relay.call(method.upper(), re.sub(r"{\w+}", "x", path), b"{}", by=None)
            assert answer.status in (200, 303, 401, 404, 422), (method, path, answer.body)
            assert b"no such path" not in answer.body, (method, path)


def test_every_operation_has_an_id_parameters_and_common_answers(document: dict[str, Any]) -> None:
    before = {"400", "405", "408", "413", "415", "417", "500"}
    names = []
    for path, item in document["paths"].items():
        for operation in item.values():
            assert before <= operation["responses"].keys(), path
            parameters = {each["name"] for each in operation["parameters"] if each["in"] == "path"}
            assert parameters == set(re.findall(r"{(\w+)}", path))
            names.append(operation["operationId"])
    assert len(names) == len(set(names))


def test_a_call_without_a_body_or_query_is_never_described_as_422(document: dict[str, Any]) -> None:
    assert "422" not in document["paths"]["/v1/stream"]["get"]["responses"]


def test_the_described_body_is_the_model_that_reads_it(document: dict[str, Any]) -> None:
    described = document["components"]["schemas"]["DecisionBody"]
    assert described == DecisionBody.model_json_schema()
    operation = document["paths"]["/v1/approvals"]["post"]
    assert operation["requestBody"]["content"] == {
        "application/json": {"schema": {"$ref": "#/components/schemas/DecisionBody"}}
    }


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
    with_body = {f"{route.method} {route.path}" for route in ROUTES if route.body}
    assert with_body == {
        call.replace("/drain", "/{client}").replace("/unknown/", "/{holdId}/") for call in BODIES
    }


async def test_every_body_is_one_object_with_unique_and_known_keys(relay: RunningRelay) -> None:
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
