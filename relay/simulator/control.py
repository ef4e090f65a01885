"""The control API, ``/sim/…``: what tests in any language drive the simulator with. IMDS itself knows no such path."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web
from pydantic import ValidationError

from relay.simulator.playbook import ACTIONS, Action, perform, problems
from relay.simulator.scope import InvalidTransition, UnknownEvent
from relay.simulator.stage import Stage


class Control:
    """The handlers, for every address of the simulator."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def routes(self) -> list[web.RouteDef]:
        """Where they answer."""
        return [
            web.get("/sim/state", self._state, allow_head=False),
            web.get("/sim/calls", self._calls, allow_head=False),
            web.get("/sim/events/{event}", self._event, allow_head=False),
            web.post("/sim/{action}", self._act),
        ]

    async def _state(self, _: web.Request) -> web.Response:
        stage = self._stage
        return _json(
            {
                "now": stage.clock.now(),
                "scale": stage.setup.scale,
                "incarnation": stage.scope.incarnation,
                "vms": [vm.name for vm in stage.setup.vms],
                "events": stage.events,
                "faults": stage.faults.active,
            }
        )

    async def _calls(self, _: web.Request) -> web.Response:
        return _json(list(self._stage.calls))

    async def _event(self, request: web.Request) -> web.Response:
        try:
            return _json(self._stage.event(request.match_info["event"]))
        except UnknownEvent as error:
            return _json({"error": str(error)}, status=404)

    async def _act(self, request: web.Request) -> web.Response:
        name = request.match_info["action"]
        if name not in ACTIONS:
            return _json({"error": f"expected one of {', '.join(ACTIONS)}, got {name}"}, status=404)
        try:
            event = perform(
                self._stage, Action.model_validate({name: orjson.loads(await request.read())})
            )
        except orjson.JSONDecodeError as error:
            return _json({"error": f"expected JSON: {error}"}, status=400)
        except ValidationError as error:
            return _json({"error": "; ".join(problems(error.errors()))}, status=400)
        except UnknownEvent as error:
            return _json({"error": str(error)}, status=404)
        except InvalidTransition as error:
            return _json({"error": str(error)}, status=409)
        return _json(event or {})


def _json(value: Any, *, status: int = 200) -> web.Response:
    body = orjson.dumps(
        value,
        default=_plain,
        option=orjson.OPT_UTC_Z | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
    )
    return web.Response(status=status, body=body, content_type="application/json")


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    raise TypeError(f"expected JSON, got {type(value).__name__}")
