"""/openapi.json: whole, valid, and of the very routes that are served."""

from __future__ import annotations

import re
from typing import Any

from openapi_spec_validator import OpenAPIV31SpecValidator

from relay.approvals.request import DecisionBody
from tests.api.running_relay import RunningRelay


async def _description(relay: RunningRelay) -> dict[str, Any]:
    answer = await relay.call("GET", "/openapi.json", by=None)
    document: dict[str, Any] = answer.json
    return document


async def test_the_description_is_valid_openapi(relay: RunningRelay) -> None:
    OpenAPIV31SpecValidator(await _description(relay)).validate()


async def test_the_conditions_of_a_standing_hold_say_what_they_mean(relay: RunningRelay) -> None:
    schemas = (await _description(relay))["components"]["schemas"]
    for key, field in schemas["Match"]["properties"].items():
        assert field.get("description"), key


async def test_every_described_route_is_served(relay: RunningRelay) -> None:
    """Each described path exists: it gives 401, a response, or an error about the request."""
    document = await _description(relay)
    for path, item in document["paths"].items():
        for method in item:
            answer = await relay.call(method.upper(), re.sub(r"{\w+}", "x", path), b"{}", by=None)
            assert answer.status in (200, 303, 401, 404, 422), (method, path, answer.body)
            assert b"no such path" not in answer.body, (method, path)


async def test_what_is_answered_before_a_handler_is_in_every_operation(
    relay: RunningRelay,
) -> None:
    before = {"400", "405", "408", "413", "415", "417", "500"}
    for path, item in (await _description(relay))["paths"].items():
        for method, operation in item.items():
            assert before <= operation["responses"].keys(), (method, path)


async def test_a_call_without_a_body_or_query_is_never_described_as_422(
    relay: RunningRelay,
) -> None:
    document = await _description(relay)
    assert "422" not in document["paths"]["/v1/stream"]["get"]["responses"]
    wrong = await relay.call("GET", "/v1/stream", headers={"Last-Event-ID": "x"})
    assert wrong.status == 400


async def test_the_described_body_is_the_model_that_reads_it(relay: RunningRelay) -> None:
    document = await _description(relay)
    described = document["components"]["schemas"]["DecisionBody"]
    assert described == DecisionBody.model_json_schema()
    operation = document["paths"]["/v1/approvals"]["post"]
    assert operation["requestBody"]["content"] == {
        "application/json": {"schema": {"$ref": "#/components/schemas/DecisionBody"}}
    }


async def test_every_operation_has_a_unique_id_and_all_parameters_of_its_path(
    relay: RunningRelay,
) -> None:
    document = await _description(relay)
    operations = [
        (path, operation) for path, item in document["paths"].items() for operation in item.values()
    ]
    names = [operation["operationId"] for _, operation in operations]
    assert len(names) == len(set(names))
    for path, operation in operations:
        assert {
            parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"
        } == set(re.findall(r"{(\w+)}", path))
