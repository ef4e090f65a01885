"""What every answer of this server has in common, problems included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

COMMON_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Server": "imds-relay",  # without it aiohttp tells the world its version and Python's
}
"""Headers of every answer."""


def json_response(
    status: int,
    payload: Any,
    *,
    media: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """An answer in JSON. ``payload`` is what orjson can write; `orjson.Fragment` is JSON already."""
    return raw_response(status, orjson.dumps(payload), media, headers)


def raw_response(
    status: int, body: bytes, media: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    """An answer whose body is at hand. ``media`` is its whole Content-Type."""
    return web.Response(
        status=status,
        body=body,
        headers={**COMMON_HEADERS, "Content-Type": media, **(headers or {})},
    )
