"""``/openapi.json``: OpenAPI 3.1, made from the table of routes and the types that answers are made of."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any, Literal

import orjson
from aiohttp import web
from pydantic import TypeAdapter

from relay import __version__
from relay.api.schema import problems
from relay.api.schema.responses import raw_response
from relay.api.schema.route import Access, Call, Parameter, Route

_IN_PATH = re.compile(r"{(\w+)}")
_BY_KEY: dict[str, list[str]] = {"bearer": []}
_SECURITY: dict[Access, list[dict[str, list[str]]]] = {
    "anyone": [],
    "proof": [],
    "key": [_BY_KEY],
    "key or loopback": [{}, _BY_KEY],
    "signature": [{"standardWebhooks": []}],
}
_SCHEMES = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "the key of a client of api.clients; on the local socket none is needed",
    },
    "standardWebhooks": {
        "type": "apiKey",
        "in": "header",
        "name": "webhook-signature",
        "description": "https://www.standardwebhooks.com: webhook-id, webhook-timestamp and webhook-signature over the body",
    },
}
_Mode = Literal["validation", "serialization"]


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    """The description of these routes."""
    schemas, components = _schemas(routes)
    refused = sorted({status for route in routes for status in _refusals(route)})
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "imds-relay",
            "version": __version__,
            "description": "Scheduled events of Azure, and the decisions about them.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {
                _problem(status): _answer(
                    status, (problems.MEDIA,), schemas[id(problems.ProblemBody)]
                )
                for status in refused
            },
            "securitySchemes": _SCHEMES,
        },
    }


def routes(others: Sequence[Route]) -> tuple[Route, ...]:
    """What can be called: the description of the other routes and of this one."""

    async def show(_call: Call) -> web.StreamResponse:
        return raw_response(200, body(), "application/json")

    @functools.cache
    def body() -> bytes:
        return orjson.dumps(describe((*others, route)))

    route = Route(
        "GET", "/openapi.json", "this description", show, {200: dict[str, Any]}, access="anyone"
    )
    return (route,)


def _schemas(routes: Sequence[Route]) -> tuple[dict[int, Any], dict[str, Any]]:
    """The schema of every body by the id of its type, and the components that they refer to."""
    read = [route.body for route in routes if route.body is not None]
    told = [problems.ProblemBody, *(body for route in routes for body in route.responses.values())]
    wanted: list[tuple[int, _Mode, TypeAdapter[Any]]] = [
        (id(one), "validation", TypeAdapter(one)) for one in dict.fromkeys(read)
    ]
    wanted += [
        (id(one), "serialization", TypeAdapter(one))
        for one in {id(one): one for one in told}.values()
    ]
    found, shared = TypeAdapter.json_schemas(wanted, ref_template="#/components/schemas/{model}")
    return {key: schema for (key, _), schema in found.items()}, shared.get("$defs", {})


def _operation(route: Route, schemas: dict[int, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _named(route),
        "summary": route.summary,
        "parameters": list(_parameters(route)),
        "security": _SECURITY[route.access],
        "responses": {
            **{
                str(status): _answer(status, route.media, schemas[id(body)])
                for status, body in route.responses.items()
            },
            **{
                str(status): {"$ref": f"#/components/responses/{_problem(status)}"}
                for status in _refusals(route)
            },
        },
    }
    if route.needs is not None:
        operation["description"] = f"Needs the right `{route.needs}`."
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[id(route.body)]}},
        }
    return operation


def _named(route: Route) -> str:
    words = re.findall(r"\w+", route.path.removeprefix("/v1"))
    return "_".join((route.method.lower(), *words))


def _parameters(route: Route) -> Iterator[dict[str, Any]]:
    for name in _IN_PATH.findall(route.path):
        yield {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
        }
    for one in route.parameters:
        yield _parameter(one)


def _parameter(one: Parameter) -> dict[str, Any]:
    schema = {"type": "string", "pattern": one.pattern}
    return {
        "name": one.name,
        "in": one.place,
        "description": one.description,
        "required": one.required,
        "schema": schema,
    }


def _answer(status: int, media: Sequence[str], schema: Any) -> dict[str, Any]:
    return {
        "description": HTTPStatus(status).phrase,
        "content": {one: {"schema": schema} for one in media},
    }


def _problem(status: int) -> str:
    return f"Problem{status}"


def _refusals(route: Route) -> list[int]:
    """The statuses of the problems that a route can answer with: most follow from the checks that it passes."""
    found = {400, 408, 413, 415, 417, *route.problem_statuses}
    if route.access != "anyone":
        found |= {429, 503}
    if route.access not in ("anyone", "proof"):
        found.add(401)
    if route.needs is not None:
        found.add(403)
    if route.lookup is not None:
        found.add(404)
    if route.parse is not None:
        found.add(422)
    return sorted(found)
