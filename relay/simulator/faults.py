"""What can go wrong with an answer of IMDS, for how many calls or how long, and how a wrong answer is made."""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, Literal

import orjson
from aiohttp import web

from relay.clock import Clock
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
    "oversize",
    "wrong-type",
    "drip",
]
Target = Literal["document", "approval", "instance", "any"]
JSON: Final = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong. Without ``calls`` and ``lasts`` it does so once. Spans run ``scale`` times faster."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    kind: Kind = "status"
    on: Target = "document"
    """``document``: GET of the events; ``approval``: POST; ``instance``: instance metadata."""
    vm: str | None = None
    """Only calls of this VM."""
    calls: int | None = None
    """Go wrong that many times."""
    lasts: Duration | None = None
    """Go wrong for that long; with ``calls``, whichever is over first."""
    processed: bool = False
    """Of status, hang, reset and redirect: Azure takes the StartRequest in, and only the answer is lost."""
    status: int = 500
    """Of ``status``: the HTTP status."""
    retry_after: Duration | None = None
    """Of ``status``: the header ``Retry-After``, in whole seconds and at least one."""
    time: Duration = 5.0
    """Of ``delay``: before the answer; of ``drip``: between two bytes."""
    size: int = 5 * 1024 * 1024
    """Of ``oversize``: how many bytes are added."""
    location: str | None = None
    """Of ``redirect``: where to; None: the same address with ``redirected=true``."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of ``duplicate``: what differs in the second copy of every event."""

    @property
    def instead(self) -> bool:
        """Nothing of the right answer is sent."""
        return self.kind in ("status", "hang", "reset", "redirect")


@dataclass(slots=True)
class _Active:
    fault: Fault
    left: int | None
    until: datetime | None


class Faults:
    """The faults that wait or last, oldest first. Without I/O."""

    def __init__(self) -> None:
        self._active: list[_Active] = []

    @property
    def active(self) -> tuple[Fault, ...]:
        """What will still go wrong."""
        return tuple(active.fault for active in self._active)

    def add(self, fault: Fault, now: datetime, span: Callable[[float], timedelta]) -> None:
        """Let it go wrong from now on."""
        left = 1 if fault.calls is None and fault.lasts is None else fault.calls
        self._active.append(
            _Active(fault, left, now + span(fault.lasts) if fault.lasts is not None else None)
        )

    def clear(self) -> None:
        """Let everything be well again."""
        self._active.clear()

    def take(self, target: Target, vm: str, now: datetime) -> Fault | None:
        """What goes wrong with this call, which is counted; None when nothing does."""
        self._active = [
            active for active in self._active if active.until is None or now < active.until
        ]
        for active in self._active:
            if active.fault.on not in (target, "any") or active.fault.vm not in (None, vm):
                continue
            if active.left is not None:
                active.left -= 1
                if active.left == 0:
                    self._active.remove(active)
            return active.fault
        return None


def distort_body(body: bytes, fault: Fault) -> tuple[bytes, str]:
    """The right body of an answer gone wrong, with its content type. An answer without a body cannot go wrong in its JSON."""
    if not body:
        return body, JSON
    match fault.kind:
        case "empty":
            return b"", JSON
        case "truncated":
            return body[: len(body) // 2], JSON
        case "malformed":
            return body.replace(b":", b"=", 1), JSON
        case "no-events":
            return orjson.dumps(
                {key: value for key, value in orjson.loads(body).items() if key != "Events"}
            ), JSON
        case "duplicate":
            document = orjson.loads(body)
            twice = [
                copy
                for event in document.get("Events", ())
                for copy in (event, event | dict(fault.fields))
            ]
            return orjson.dumps(document | {"Events": twice}), JSON
        case "oversize":
            return body + b" " * fault.size, JSON
        case "wrong-type":
            return body, "text/html"
        case _:
            return body, JSON


async def refuse(
    request: web.Request, fault: Fault, *, span: Callable[[float], timedelta]
) -> web.StreamResponse:
    """Answer with a fault that leaves nothing of the right answer. A hang lasts until the client or the simulator goes."""
    if fault.kind == "hang":
        await asyncio.Event().wait()
    if fault.kind == "reset":
        _reset(request)
        return web.Response()
    if fault.kind == "redirect":
        return web.Response(
            status=302,
            headers={
                "Location": fault.location or str(request.rel_url.update_query(redirected="true"))
            },
        )
    headers = {}
    if fault.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(span(fault.retry_after).total_seconds())))
    body = orjson.dumps({"error": f"Simulated fault: {fault.status}"})
    return web.Response(status=fault.status, headers=headers, body=body, content_type=JSON)


async def drip(
    request: web.Request, body: bytes, *, pause: float, clock: Clock
) -> web.StreamResponse:
    """Send a body byte by byte, ``pause`` seconds apart."""
    response = web.StreamResponse(
        headers={"Content-Type": f"{JSON}; charset=utf-8", "Content-Length": str(len(body))}
    )
    await response.prepare(request)
    for position in range(len(body)):
        await clock.sleep(pause)
        await response.write(body[position : position + 1])
    await response.write_eof()
    return response


def _reset(request: web.Request) -> None:
    """Break the connection off with a TCP reset."""
    if request.transport is None:
        return
    connection: socket.socket | None = request.transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.transport.abort()
