"""The control API, ``/sim/…``, with which programs in any language drive the simulator.

IMDS itself has no such paths. docs/simulator.md#the-control-api describes the calls.
"""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web
from pydantic import ValidationError

from relay.simulator.azure import SimulatedAzure
from relay.simulator.playbook import ACTIONS, Action, describe_errors, perform_action
from relay.simulator.scope import InvalidTransition, UnknownEvent


class ControlApi:
    """The handlers of the control API, the same for the address of every VM."""

    def __init__(self, azure: SimulatedAzure) -> None:
        self._azure = azure

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for an aiohttp application."""
        return [
            web.get("/sim/state", self._get_state, allow_head=False),
            web.get("/sim/calls", self._get_calls, allow_head=False),
            web.get("/sim/events/{event}", self._get_event, allow_head=False),
            web.post("/sim/{action}", self._perform),
        ]

    async def _get_state(self, _: web.Request) -> web.Response:
        azure = self._azure
        return _json_response(
            {
                "now": azure.clock.now(),
                "scale": azure.setup.scale,
                "incarnation": azure.incarnation,
                "vms": [vm.name for vm in azure.setup.vms],
                "events": azure.events,
                "faults": azure.faults.active,
            }
        )

    async def _get_calls(self, _: web.Request) -> web.Response:
        return _json_response(list(self._azure.calls))

    async def _get_event(self, request: web.Request) -> web.Response:
        try:
            return _json_response(self._azure.event(request.match_info["event"]))
        except UnknownEvent as error:
            return _error_response(error, status=404)

    async def _perform(self, request: web.Request) -> web.Response:
        name = request.match_info["action"]
        if name not in ACTIONS:
            return _error_response(f"expected one of {', '.join(ACTIONS)}, got {name}", status=404)
        try:
            argument = orjson.loads(await request.read())
            event = perform_action(self._azure, Action.model_validate({name: argument}))
        except orjson.JSONDecodeError as error:
            return _error_response(f"expected JSON: {error}", status=400)
        except ValidationError as error:
            return _error_response("; ".join(describe_errors(error.errors())), status=400)
        except UnknownEvent as error:
            return _error_response(error, status=404)
        except InvalidTransition as error:
            return _error_response(error, status=409)
        return _json_response(event or {})


def _error_response(error: object, *, status: int) -> web.Response:
    return _json_response({"error": str(error)}, status=status)


def _json_response(value: Any, *, status: int = 200) -> web.Response:
    body = orjson.dumps(
        value,
        default=_json_default_for_bytes,
        option=orjson.OPT_UTC_Z | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
    )
    return web.Response(status=status, body=body, content_type="application/json")


def _json_default_for_bytes(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    raise TypeError(f"expected JSON, got {type(value).__name__}")
