"""Faults of the simulated IMDS: their kinds, which calls they meet, and the wrong answers.

A fault replaces the right answer (`replace_answer`) or changes it (`distort_answer`). The server
handles ``processed``: it then lets Azure accept the StartRequest first.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any, ClassVar, Final, Literal

import orjson
from aiohttp import web

from relay.settings import Duration

Kind = Literal[
    "status",
    "delay",
    "hang",
    "reset",
    "redirect",
    "empty",
    "truncated",
    "malformed",
    "no-events",
    "duplicate",
    "wrong-type",
]
Target = Literal["document", "approval", "instance", "any"]
JSON: Final = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of some calls; without ``calls`` and ``lasts`` of the next one.

    docs/simulator.md#faults has a row for each kind and field.

    Durations are seconds, and pass ``scale`` times faster.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    kind: Kind = "status"
    on: Target = "document"
    vm: str | None = None
    calls: int | None = None
    lasts: Duration | None = None
    """With ``calls``, whichever ends first."""
    processed: bool = False
    status: int = 500
    retry_after: Duration | None = None
    """Sent in whole seconds, and at least one."""
    time: Duration = 5.0
    location: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def replaces_answer(self) -> bool:
        return self.kind in ("status", "hang", "reset", "redirect")

    @property
    def label(self) -> str:
        return str(self.status) if self.kind == "status" else self.kind


async def replace_answer(
    request: web.Request, fault: Fault, *, span: Callable[[float], timedelta]
) -> web.Response:
    """Return the answer of a fault that replaces it. A hang lasts until the client ends."""
    if fault.kind == "hang":
        await asyncio.Event().wait()
    if fault.kind == "reset":
        if request.transport is not None:
            connection: socket.socket = request.transport.get_extra_info("socket")
            # SO_LINGER with 0 makes the close send RST: socket(7)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.transport.abort()
        return web.Response()
    if fault.kind == "redirect":
        location = fault.location or str(request.rel_url.update_query(redirected="true"))
        return web.Response(status=302, headers={"Location": location})
    headers = {}
    if fault.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(span(fault.retry_after).total_seconds())))
    body = orjson.dumps({"error": f"Simulated fault: {fault.status}"})
    return web.Response(status=fault.status, headers=headers, body=body, content_type=JSON)


def distort_answer(body: bytes, fault: Fault) -> web.Response:
    content_type = "text/html" if fault.kind == "wrong-type" and body else JSON
    match fault.kind if body else None:
        case "empty":
            body = b""
        case "truncated":
            body = body[: len(body) // 2]
        case "malformed":
            body = body.replace(b":", b"=", 1)
        case "no-events":
            document = orjson.loads(body)
            document.pop("Events", None)
            body = orjson.dumps(document)
        case "duplicate":
            document = orjson.loads(body)
            pairs = ((event, event | dict(fault.fields)) for event in document.get("Events", ()))
            body = orjson.dumps(document | {"Events": list(chain.from_iterable(pairs))})
    return web.Response(body=body, content_type=content_type, charset="utf-8")
