"""Responses in JSON and other formats, with the headers that all responses have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

COMMON_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Server": "imds-relay",  # aiohttp's default names its version and that of Python
}


def json_response(
    status: int,
    body: Any,
    *,
    media_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """Return a JSON response. `orjson.Fragment` marks parts of the body that are JSON already."""
    return raw_response(status, orjson.dumps(body), media_type, headers)


def raw_response(
    status: int, body: bytes, content_type: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return a response with this body and complete Content-Type."""
    return web.Response(
        status=status,
        body=body,
        headers={**COMMON_HEADERS, "Content-Type": content_type, **(headers or {})},
    )
