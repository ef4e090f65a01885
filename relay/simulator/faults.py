"""Faults of the simulated IMDS: their kinds, which calls they meet, and the wrong answers.

`Faults` counts the calls, and `relay.simulator.server` asks it at each call. A fault replaces the
right answer (`answer_with_replacing_fault`) or changes it (`distort_answer`). The server itself
handles ``processed``: it then lets Azure accept the StartRequest first.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import chain
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
]
Target = Literal["document", "approval", "instance", "any"]
JSON: Final = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of some calls; without ``calls`` and ``lasts`` of the next one.

    Durations are seconds, and pass ``scale`` times faster.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    kind: Kind = "status"
    on: Target = "document"
    """``document``: GET of the events; ``approval``: POST; ``instance``: instance metadata."""
    vm: str | None = None
    """Only calls of this VM."""
    calls: int | None = None
    """How many calls fail."""
    lasts: Duration | None = None
    """How long calls fail; with ``calls``, whichever ends first."""
    processed: bool = False
    """Of status, hang, reset, redirect: Azure accepts the StartRequest, only its answer is lost."""
    status: int = 500
    """Of ``status``: the HTTP status."""
    retry_after: Duration | None = None
    """Of ``status``: the header ``Retry-After``, in whole seconds and at least one."""
    time: Duration = 5.0
    """Of ``delay``: before the answer."""
    size: int = 5 * 1024 * 1024
    """Of ``oversize``: how many bytes of white space are added."""
    location: str | None = None
    """Of ``redirect``: the target; None: the same address with ``redirected=true``."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of ``duplicate``: what differs in the second copy of every event."""

    @property
    def replaces_answer(self) -> bool:
        """Whether nothing of the right answer is sent."""
        return self.kind in ("status", "hang", "reset", "redirect")

    @property
    def label(self) -> str:
        """The fault in one word, for people."""
        return str(self.status) if self.kind == "status" else self.kind


@dataclass(slots=True)
class _ActiveFault:
    fault: Fault
    calls_left: int | None
    until: datetime | None


class Faults:
    """The active faults, oldest first. Without I/O."""

    def __init__(self) -> None:
        self._active: list[_ActiveFault] = []

    @property
    def active(self) -> tuple[Fault, ...]:
        """The faults that calls can still meet."""
        return tuple(active.fault for active in self._active)

    def add(self, fault: Fault, now: datetime, span: Callable[[float], timedelta]) -> None:
        """Activate a fault. ``span`` scales a duration."""
        calls_left = 1 if fault.calls is None and fault.lasts is None else fault.calls
        until = now + span(fault.lasts) if fault.lasts is not None else None
        self._active.append(_ActiveFault(fault, calls_left, until))

    def clear(self) -> None:
        """Remove all faults."""
        self._active.clear()

    def take_for_call(self, target: Target, vm: str, now: datetime) -> Fault | None:
        """Return the fault that this call meets, and count the call; None if it meets none."""
        self._active = [
            active for active in self._active if active.until is None or now < active.until
        ]
        for active in self._active:
            if active.fault.on not in (target, "any") or active.fault.vm not in (None, vm):
                continue
            if active.calls_left is not None:
                active.calls_left -= 1
                if active.calls_left == 0:
                    self._active.remove(active)
            return active.fault
        return None


async def answer_with_replacing_fault(
    request: web.Request, fault: Fault, *, span: Callable[[float], timedelta]
) -> web.StreamResponse:
    """Return the answer of a fault that replaces the right one.

    A hang lasts until the client or the simulator ends.
    """
    if fault.kind == "hang":
        await asyncio.Event().wait()
    if fault.kind == "reset":
        _reset_connection(request)
        return web.Response()
    if fault.kind == "redirect":
        location = fault.location or str(request.rel_url.update_query(redirected="true"))
        return web.Response(status=302, headers={"Location": location})
    headers = {}
    if fault.retry_after is not None:
        seconds = math.ceil(span(fault.retry_after).total_seconds())
        headers["Retry-After"] = str(max(1, seconds))
    body = orjson.dumps({"error": f"Simulated fault: {fault.status}"})
    return web.Response(status=fault.status, headers=headers, body=body, content_type=JSON)


async def distort_answer(
    body: bytes, fault: Fault, *, span: Callable[[float], timedelta], clock: Clock
) -> web.Response:
    """Return the answer that a fault makes of the right one, a 200 with this body."""
    if fault.kind == "delay":
        await clock.sleep(span(fault.time).total_seconds())
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
        case "oversize":
            body += b" " * fault.size
    return web.Response(body=body, content_type=content_type, charset="utf-8")


def _reset_connection(request: web.Request) -> None:
    """Reset the TCP connection: SO_LINGER with 0 makes the close send RST, see socket(7)."""
    if request.transport is None:
        return
    connection: socket.socket | None = request.transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.transport.abort()
