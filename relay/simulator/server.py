"""The HTTP side: an address for each VM, where Scheduled Events and instance metadata answer as IMDS does."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from ipaddress import ip_address
from types import TracebackType
from typing import Any, Final, Self

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import BaseModel, Field, ValidationError
from yarl import URL

from relay.clock import Clock
from relay.simulator import faults
from relay.simulator.control import Control
from relay.simulator.event import API_VERSIONS, NO_HEADER_NEEDED
from relay.simulator.faults import JSON, Fault, Target
from relay.simulator.instance import INSTANCE_VERSIONS, VM, compute, instance
from relay.simulator.scope import Setup, UnknownEvent
from relay.simulator.stage import Call, Stage, name_of

_BODY: Final = 64 * 1024
_EVENTS: Final = "/metadata/scheduledevents"
_Right = tuple[int, bytes]  # status and body of the answer that IMDS would give


class _StartRequest(BaseModel):
    EventId: str


class _StartRequests(BaseModel):
    StartRequests: list[_StartRequest] = Field(min_length=1)


class Simulator(Stage):
    """``async with Simulator(Setup(vms=(VM("vm-0"), VM("vm-1")))) as sim``: a Stage that can be called over HTTP."""

    def __init__(
        self,
        setup: Setup | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        clock: Clock | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Listen on ``port`` for the first VM, the next one for the second, and so on; 0: free ports."""
        super().__init__(setup, clock=clock, tell=tell)
        self.host = host
        self._port = port
        self._open = AsyncExitStack()
        self._recent: dict[str, deque[float]] = {vm.name: deque() for vm in self.setup.vms}
        self._heard: set[str] = set()
        self.urls: dict[str, str] = {}
        """Where each VM finds its IMDS, by its name; without a slash at the end."""
        self.loopback = True
        """Nobody but this machine can reach it."""

    @property
    def url(self) -> str:
        """Where the first VM finds its IMDS."""
        return next(iter(self.urls.values()))

    async def __aenter__(self) -> Self:
        """Listen. Raises OSError when an address cannot be had, after letting go of the others."""
        log = logging.getLogger(__name__)
        log.addFilter(_is_ours)
        async with AsyncExitStack() as opening:
            for number, vm in enumerate(self.setup.vms):
                runner = web.AppRunner(
                    self._app(vm),
                    access_log=None,
                    logger=log,
                    handler_cancellation=True,
                    keepalive_timeout=15.0,
                    shutdown_timeout=0.2,
                )
                await runner.setup()
                opening.push_async_callback(runner.cleanup)
                await web.TCPSite(
                    runner, self.host, self._port + number if self._port else 0
                ).start()
                host, port = runner.addresses[0][:2]
                self.urls[vm.name] = str(URL.build(scheme="http", host=host, port=port))
                self.loopback &= ip_address(host).is_loopback
            self._open = opening.pop_all()
        self.begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let go of every call and address."""
        self.stop()
        await self._open.aclose()

    def _app(self, vm: VM) -> web.Application:
        async def events(request: web.Request) -> web.StreamResponse:
            return await self._answer(
                request, vm, "approval" if request.method == "POST" else "document"
            )

        async def about(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, vm, "instance")

        app = web.Application(client_max_size=_BODY)
        app.add_routes(
            [
                web.get(_EVENTS, events, allow_head=False),
                web.post(_EVENTS, events),
                web.get("/metadata/instance", about, allow_head=False),
                web.get("/metadata/instance/compute", about, allow_head=False),
                *Control(self).routes(),
            ]
        )
        return app

    async def _answer(self, request: web.Request, vm: VM, target: Target) -> web.StreamResponse:
        call = await self._received(request, vm)
        if self._too_many(vm):
            call.status = 429
            self.tell(f"{vm.name} called more than {self.setup.rate_limit} times in a second: 429")
            return web.Response(
                status=429,
                headers={"Retry-After": "1"},
                body=_error("Too many requests"),
                content_type=JSON,
            )
        fault = self.faults.take(target, vm.name, self.clock.now())
        if fault is not None:
            call.fault = name_of(fault)
            self.tell(f"{vm.name} {call.method} {call.path} meets a fault: {call.fault}")
            if fault.instead:
                return await self._instead(request, call, vm, target, fault)
        status, body = await self._right(request, call, vm, target)
        call.status = status
        if status >= 400:
            self.tell(f"{vm.name} {call.method} {call.path} is refused: {status} {body.decode()}")
        self.notify()
        if fault is None or status != 200:
            return web.Response(status=status, body=body, content_type=JSON, charset="utf-8")
        pause = self.scope.span(fault.time).total_seconds()
        if fault.kind == "drip":
            return await faults.drip(request, body, pause=pause, clock=self.clock)
        if fault.kind == "delay":
            await self.clock.sleep(pause)
        wrong, content_type = faults.distort_body(body, fault)
        return web.Response(body=wrong, content_type=content_type, charset="utf-8")

    async def _instead(
        self, request: web.Request, call: Call, vm: VM, target: Target, fault: Fault
    ) -> web.StreamResponse:
        if fault.processed:
            await self._right(request, call, vm, target)
        self.notify()
        response = await faults.refuse(request, fault, span=self.scope.span)
        call.status = None if fault.kind == "reset" else response.status
        return response

    async def _received(self, request: web.Request, vm: VM) -> Call:
        peer = (
            request.transport.get_extra_info("peername") if request.transport is not None else None
        )
        call = Call(
            at=self.clock.now(),
            vm=vm.name,
            method=request.method,
            path=request.path,
            query=request.query_string,
            peer=":".join(map(str, peer[:2])) if peer else "",
            headers={name.lower(): value for name, value in request.headers.items()},
            body=await request.read(),
        )
        if request.method == "POST":
            call.event_ids = _event_ids(call.body)
        if call.vm not in self._heard:
            self._heard.add(call.vm)
            self.tell(f"{call.vm} is called for the first time, by {call.peer}")
        self.calls.append(call)
        return call

    def _too_many(self, vm: VM) -> bool:
        recent, now = self._recent[vm.name], self.clock.monotonic()
        while recent and recent[0] <= now - 1:
            recent.popleft()
        if self.setup.rate_limit is not None and len(recent) >= self.setup.rate_limit:
            return True
        recent.append(now)
        return False

    async def _right(self, request: web.Request, call: Call, vm: VM, target: Target) -> _Right:
        """The answer that IMDS would give; the api-version decides what is checked and what is shown."""
        version = request.query.get("api-version", "")
        header = request.headers.get("Metadata", "").lower() == "true"
        if not header and not (version == NO_HEADER_NEEDED and target != "instance"):
            return 400, _error("Bad request. Required metadata header not specified")
        if "X-Forwarded-For" in request.headers:
            return 400, _error(
                "Bad request. A request with the header X-Forwarded-For is not answered"
            )
        known = INSTANCE_VERSIONS if target == "instance" else API_VERSIONS
        if version not in known:
            text = "Bad request. api-version is invalid or was not specified in the request"
            return 400, _error(text, **{"newest-versions": known[:-4:-1]})
        if target == "instance":
            return self._about(vm, whole=request.path.endswith("/instance"))
        await self.clock.sleep(self.scope.call(self.clock.now()).total_seconds())
        if target == "approval":
            return self._approved(call, vm)
        self.tick()
        return 200, orjson.dumps(self.scope.document(version, vm.name))

    def _about(self, vm: VM, *, whole: bool) -> _Right:
        if not self.setup.instance_metadata:
            return 404, _error("Not found")
        return 200, orjson.dumps(instance(vm) if whole else compute(vm))

    def _approved(self, call: Call, vm: VM) -> _Right:
        if not call.event_ids:
            return 400, _error('Bad request. The body is not {"StartRequests": [{"EventId": "…"}]}')
        try:
            self.scope.approve(call.event_ids, vm.name, self.clock.now())
        except UnknownEvent:
            return 400, _error("Bad request. An EventId is not that of an event in the document")
        return 200, b""


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a fault is ours to hear of: requests that are not HTTP are answered 400, and no traceback is due for them."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def _event_ids(body: bytes) -> tuple[str, ...]:
    try:
        return tuple(
            request.EventId for request in _StartRequests.model_validate_json(body).StartRequests
        )
    except ValidationError:
        return ()


def _error(text: str, **more: Any) -> bytes:
    return orjson.dumps({"error": text, **more})
