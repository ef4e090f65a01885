"""`/openapi.json`: OpenAPI 3.1, generated from the routes and their request and response types."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from operator import attrgetter
from typing import Any, Literal

from pydantic import TypeAdapter

from relay import __version__
from relay.api.callers import NEVER_REFUSED, Access
from relay.api.calls import ROUTES, Route
from relay.api.responses import PROBLEM_MEDIA_TYPE, ProblemDetails
from relay.api.sessions import PAGE_HEADER, PAGE_HEADER_VALUE, SESSION_COOKIE

_BEARER: dict[str, list[str]] = {"bearer": []}
_SESSION: dict[str, list[str]] = {"session": []}
_SECURITY: Mapping[Access, list[dict[str, list[str]]]] = {
    "public": [],
    "key": [_BEARER, _SESSION],
    "key or public": [{}, _BEARER, _SESSION],
    "key or loopback": [{}, _BEARER, _SESSION],
    "key, loopback or public": [{}, _BEARER, _SESSION],
    "signature": [{"standardWebhooks": []}],
}
_SECURITY_SCHEMES = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "the key of a client of api.clients; not needed on the local socket",
    },
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": SESSION_COOKIE.name,
        "description": "for the relay's own pages, after a sign-in; all but GET also needs "
        f"{PAGE_HEADER}: {PAGE_HEADER_VALUE}",
    },
    "standardWebhooks": {
        "type": "apiKey",
        "in": "header",
        "name": "webhook-signature",
        "description": "https://www.standardwebhooks.com: "
        "webhook-id, webhook-timestamp and webhook-signature over the body",
    },
}
_Schemas = Mapping[Any, Any]
_SIGNATURE_HEADERS = (
    ("webhook-id", "identifies a repeat, which gets the first answer again", "^.+$"),
    ("webhook-timestamp", "seconds since 1970, at most 300 s ago and 60 s ahead", "^[0-9]{1,12}$"),
    ("webhook-signature", "v1,<base64> once for each secret, separated by spaces", "^.+$"),
)
_OF_EVERY_CALL = (400, 405, 408, 413, 415, 417, 500)
"""Framing, method, body, content type, Expect, and internal errors."""


@functools.cache
def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document of all routes. Their modules must be imported."""
    routes = sorted(ROUTES, key=attrgetter("path"))
    schemas, components = _json_schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    problem_statuses = sorted({status for route in routes for status in _problem_statuses(route)})
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
                f"Problem{status}": _response(
                    status, (PROBLEM_MEDIA_TYPE,), schemas[ProblemDetails]
                )
                for status in problem_statuses
            },
            "securitySchemes": _SECURITY_SCHEMES,
        },
    }


def _json_schemas(routes: Sequence[Route]) -> tuple[_Schemas, dict[str, Any]]:
    requests = dict.fromkeys(route.body for route in routes if route.body is not None)
    responses = dict.fromkeys((ProblemDetails, *(route.response_type for route in routes)))
    inputs: list[tuple[Any, Literal["validation", "serialization"], TypeAdapter[Any]]] = [
        *((model, "validation", TypeAdapter(model)) for model in requests),
        *((model, "serialization", TypeAdapter(model)) for model in responses),
    ]
    schemas, shared = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
    return {model: schema for (model, _mode), schema in schemas.items()}, shared.get("$defs", {})


def _operation(route: Route, schemas: _Schemas) -> dict[str, Any]:
    success = _response(route.status, route.media_types, schemas[route.response_type])
    problems: dict[str, Any] = {
        str(status): {"$ref": f"#/components/responses/Problem{status}"}
        for status in _problem_statuses(route)
    }
    if route.shows_problems:  # those that come before its own checks are no pages
        for status in _problem_statuses(route):
            problem = _response(status, (PROBLEM_MEDIA_TYPE,), schemas[ProblemDetails])
            problem["content"]["text/html"] = {"schema": schemas[str]}
            problems[str(status)] = problem
    words = re.findall(r"\w+", route.path.removeprefix("/v1"))
    operation: dict[str, Any] = {
        "operationId": "_".join((route.method.lower(), *words)),
        "summary": route.summary,
        "parameters": list(_parameters(route)),
        "security": _SECURITY[route.access],
        "responses": {str(route.status): success, **problems},
    }
    if route.needs is not None:
        operation["description"] = f"Needs the right `{route.needs}`."
    if route.body is not None:
        content = {"application/json": {"schema": schemas[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameters(route: Route) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", route.path):
        schema = {"type": "string", "minLength": 1}
        yield {"name": name, "in": "path", "required": True, "schema": schema}
    shown = [(each.place, each.name, each.description, each.pattern) for each in route.parameters]
    if route.access == "signature":
        shown += [("header", *header) for header in _SIGNATURE_HEADERS]
    for place, name, description, pattern in shown:
        yield {
            "name": name,
            "in": place,
            "description": description,
            "required": route.access == "signature",
            "schema": {"type": "string", "pattern": pattern},
        }


def _response(status: int, media_types: Sequence[str], schema: Any) -> dict[str, Any]:
    return {
        "description": HTTPStatus(status).phrase,
        "content": {media_type: {"schema": schema} for media_type in media_types},
    }


def _problem_statuses(route: Route) -> list[int]:
    statuses = {*_OF_EVERY_CALL, *route.problems}
    if "{" in route.path:
        statuses.add(404)
    if route.access != "public":  # the relay is needed
        statuses.add(503)
    if route.access not in NEVER_REFUSED:
        statuses |= {401, 429}
        if _SESSION in _SECURITY[route.access]:
            statuses.add(403)
    if route.body is not None or any(each.place == "query" for each in route.parameters):
        statuses.add(422)
    return sorted(statuses)
