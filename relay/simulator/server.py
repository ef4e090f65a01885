"""The HTTP server of the simulator: each VM has an address that answers as IMDS does.

Sources: Microsoft, "Azure Metadata Service: Scheduled Events" and "Azure Instance Metadata
Service". docs/simulator.md#how-it-differs-from-azure lists what they leave open.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from ipaddress import ip_address
from typing import Any, Final, Self

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import ValidationError
from yarl import URL

from relay.clock import Clock
from relay.imds.document import API_VERSIONS
from relay.simulator.azure import RecordedCall, SimulatedAzure
from relay.simulator.playbook import ACTIONS, Action, describe_errors, perform_action
from relay.simulator.scope import InvalidTransition, UnknownEvent
from relay.simulator.setup import (
    INSTANCE_VERSIONS,
    JSON,
    VM,
    Setup,
    Target,
    compute_document,
    distort_answer,
    instance_document,
    replace_answer,
)

_EVENTS_PATH: Final = "/metadata/scheduledevents"
_log = logging.getLogger(__name__)
_log.addFilter(  # aiohttp answers what is not HTTP with 400, and would log a traceback
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
)


class Simulator(SimulatedAzure):
    """A simulated Azure with HTTP addresses: ``async with Simulator(Setup(…)) as sim``."""

    def __init__(
        self,
        setup: Setup | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        clock: Clock | None = None,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Listen on ``port`` for the first VM, on the next port for the next one; 0: free ports."""
        super().__init__(setup, clock=clock, report=report)
        self.host = host
        self._port = port
        self._listeners = AsyncExitStack()
        self._recent_calls: dict[str, deque[float]] = {}
        self._vms_by_port: dict[int, VM] = {}
        self.urls: dict[str, str] = {}
        """The URL of each VM's IMDS, by the VM's name, without a slash at the end."""
        self.is_loopback = True
        """Whether only this machine can reach the simulator."""

    @property
    def url(self) -> str:
        return next(iter(self.urls.values()))

    async def __aenter__(self) -> Self:
        """Listen. Raises OSError, and listens nowhere, if one address cannot be used."""
        app = web.Application(client_max_size=64 * 1024)
        app.add_routes(
            [
                web.get(_EVENTS_PATH, self._handle_call, allow_head=False),
                web.post(_EVENTS_PATH, self._handle_call),
                web.get("/metadata/instance", self._handle_call, allow_head=False),
                web.get("/metadata/instance/compute", self._handle_call, allow_head=False),
                web.get("/sim/state", self._get_state, allow_head=False),
                web.get("/sim/calls", self._get_calls, allow_head=False),
                web.get("/sim/events/{event}", self._get_event, allow_head=False),
                web.post("/sim/{action}", self._perform),
            ]
        )
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_log,
            handler_cancellation=True,
            keepalive_timeout=15.0,
            shutdown_timeout=0.2,
        )
        async with AsyncExitStack() as opening:
            await runner.setup()
            opening.push_async_callback(runner.cleanup)
            for number, vm in enumerate(self.setup.vms):
                port, before = self._port + number if self._port else 0, len(runner.addresses)
                await web.TCPSite(runner, self.host, port).start()
                for host, bound_port, *_ in runner.addresses[before:]:
                    url = str(URL.build(scheme="http", host=host, port=bound_port))
                    self.urls.setdefault(vm.name, url)
                    self._vms_by_port[bound_port] = vm
                    self.is_loopback &= ip_address(host).is_loopback
            opening.callback(asyncio.create_task(self.run_timer(), name="timer").cancel)
            self._listeners = opening.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listeners.aclose()

    async def _handle_call(self, request: web.Request) -> web.StreamResponse:
        call = await self._record_call(request)
        try:
            return await self._answer(request, call)
        finally:
            call.ended_at = self.clock.now()

    async def _answer(self, request: web.Request, call: RecordedCall) -> web.StreamResponse:
        said = f"{call.vm} {call.method} {call.path}"
        if self._exceeds_rate_limit(call.vm):
            call.status = 429
            self.report_line_with_time(
                f"{call.vm} called more than {self.setup.rate_limit} times in a second: 429"
            )
            body = _error_body("Too many requests")
            headers = {"Retry-After": "1"}
            return web.Response(status=429, body=body, headers=headers, content_type=JSON)
        fault = self.take_fault(_target(call), call.vm)
        if fault is not None:
            call.fault = fault.label
            self.report_line_with_time(f"{said} meets a fault: {call.fault}")
        if fault is not None and fault.replaces_answer:
            if fault.processed:
                await self._correct_answer(request, call)
            self.wake_waiters()
            answer = await replace_answer(request, fault, span=self.scale_duration)
            call.status = None if fault.kind == "reset" else answer.status
            return answer
        call.status, body = await self._correct_answer(request, call)
        if call.status >= 400:
            self.report_line_with_time(f"{said} is refused: {call.status} {body.decode()}")
        self.wake_waiters()
        if fault is None or call.status != 200:
            return web.Response(status=call.status, body=body, content_type=JSON, charset="utf-8")
        if fault.kind == "delay":
            await self.clock.sleep(self.scale_duration(fault.time).total_seconds())
        return distort_answer(body, fault)

    async def _record_call(self, request: web.Request) -> RecordedCall:
        if request.transport is None:
            raise ConnectionResetError("the client has gone")
        peer = request.transport.get_extra_info("peername")
        vm = self._vms_by_port[request.transport.get_extra_info("sockname")[1]]
        body = await request.read()
        call = RecordedCall(
            at=self.clock.now(),
            vm=vm.name,
            method=request.method,
            path=request.path,
            query=request.query_string,
            peer=":".join(map(str, peer[:2])),
            headers={name.lower(): value for name, value in request.headers.items()},
            body=body,
            event_ids=_event_ids(body) if request.method == "POST" else (),
        )
        if vm.name not in self._recent_calls:
            self._recent_calls[vm.name] = deque(maxlen=self.setup.rate_limit or 0)
            self.report_line_with_time(f"{vm.name} is called for the first time, by {call.peer}")
        self.calls.append(call)
        return call

    def _exceeds_rate_limit(self, vm: str) -> bool:
        recent_calls, now = self._recent_calls[vm], self.clock.monotonic()
        if recent_calls and len(recent_calls) == recent_calls.maxlen and recent_calls[0] > now - 1:
            return True
        recent_calls.append(now)
        return False

    async def _correct_answer(self, request: web.Request, call: RecordedCall) -> tuple[int, bytes]:
        version, target = request.query.get("api-version", ""), _target(call)
        known_versions = INSTANCE_VERSIONS if target == "instance" else API_VERSIONS
        needs_header = target == "instance" or version != API_VERSIONS[0]
        if needs_header and request.headers.get("Metadata", "").lower() != "true":
            return 400, _error_body("Bad request. Required metadata header not specified")
        if "X-Forwarded-For" in request.headers:
            return 400, _error_body(
                "Bad request. A request with the header X-Forwarded-For is not answered"
            )
        if version not in known_versions:
            text = "Bad request. api-version is invalid or was not specified in the request"
            return 400, _error_body(text, **{"newest-versions": known_versions[:-4:-1]})
        if target == "instance":
            if not self.setup.instance_metadata:
                return 404, _error_body("Not found")
            vm = next(vm for vm in self.setup.vms if vm.name == call.vm)
            is_whole = request.path.endswith("/instance")
            return 200, orjson.dumps(instance_document(vm) if is_whole else compute_document(vm))
        await self.clock.sleep(self.enable_by_call().total_seconds())
        if target != "approval":
            return 200, orjson.dumps(self.document(version, call.vm))
        if not call.event_ids:
            return 400, _error_body(
                'Bad request. The body is not {"StartRequests": [{"EventId": "…"}]}'
            )
        try:
            self.accept_start_request(call.event_ids, call.vm)
        except UnknownEvent:
            return 400, _error_body(
                "Bad request. An EventId is not that of an event in the document"
            )
        return 200, b""

    # --- the control API, which IMDS does not have: docs/simulator.md#the-control-api

    async def _get_state(self, _: web.Request) -> web.Response:
        return _json_response(
            {
                "now": self.clock.now(),
                "scale": self.setup.scale,
                "incarnation": self.incarnation,
                "vms": [vm.name for vm in self.setup.vms],
                "events": self.events,
                "faults": self.faults,
            }
        )

    async def _get_calls(self, _: web.Request) -> web.Response:
        return _json_response(list(self.calls))

    async def _get_event(self, request: web.Request) -> web.Response:
        try:
            return _json_response(self.event(request.match_info["event"]))
        except UnknownEvent as error:
            return _error_response(error, status=404)

    async def _perform(self, request: web.Request) -> web.Response:
        name = request.match_info["action"]
        if name not in ACTIONS:
            return _error_response(f"expected one of {', '.join(ACTIONS)}, got {name}", status=404)
        try:
            argument = orjson.loads(await request.read())
            event = perform_action(self, Action.model_validate({name: argument}))
        except orjson.JSONDecodeError as error:
            return _error_response(f"expected JSON: {error}", status=400)
        except ValidationError as error:
            return _error_response("; ".join(describe_errors(error)), status=400)
        except UnknownEvent as error:
            return _error_response(error, status=404)
        except InvalidTransition as error:
            return _error_response(error, status=409)
        return _json_response(event or {})


def _target(call: RecordedCall) -> Target:
    if call.path != _EVENTS_PATH:
        return "instance"
    return "approval" if call.method == "POST" else "document"


def _event_ids(body: bytes) -> tuple[str, ...]:
    try:
        event_ids = [request["EventId"] for request in orjson.loads(body)["StartRequests"]]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ()
    return tuple(event_ids) if all(isinstance(each, str) for each in event_ids) else ()


def _error_body(text: str, **more: Any) -> bytes:
    return orjson.dumps({"error": text, **more})


def _error_response(error: object, *, status: int) -> web.Response:
    return _json_response({"error": str(error)}, status=status)


def _json_response(value: Any, *, status: int = 200) -> web.Response:
    body = orjson.dumps(
        value,
        default=lambda body: body.decode("utf-8", "replace"),  # all else is JSON
        option=orjson.OPT_UTC_Z | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
    )
    return web.Response(status=status, body=body, content_type="application/json")
