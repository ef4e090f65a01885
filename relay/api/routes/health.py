"""``/healthz`` and ``/readyz``: whether the relay lives, and whether it does its work."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from aiohttp import web
from typing_extensions import TypedDict

from relay.api import Relay
from relay.api.schema.problems import Problem
from relay.api.schema.responses import json_response
from relay.api.schema.route import Call, Route


class Alive(TypedDict):
    """The process answers."""

    status: Literal["ok"]


class SinksShown(TypedDict):
    """Sinks that do not deliver now, by name. Their entries wait."""

    failing: list[str]
    disabled: list[str]
    paused: list[str]


class Ready(TypedDict):
    """Polling and the store are well. Sinks that are not are named, and leave it so."""

    status: Literal["ok"]
    source: Literal["ok"]
    store: Literal["ok"]
    sinks: SinksShown
    reasons: NotRequired[dict[str, str]]
    """By the name of such a sink: why it does not deliver. Left out where all deliver."""


async def _alive(_call: Call) -> web.StreamResponse:
    return json_response(200, {"status": "ok"})


async def _ready(call: Call) -> web.StreamResponse:
    relay = call.relay
    lost, failing = relay.source.lost, relay.store.failing is not None
    parts: dict[str, Any] = {
        "source": "lost" if lost else "ok",
        "store": "failing" if failing else "ok",
        **_sinks(relay),
    }
    if lost or failing:
        wrong = [text for text, is_so in ((_LOST, lost), (_FAILING, failing)) if is_so]
        raise Problem(503, "; ".join(wrong), **parts)
    return json_response(200, {"status": "ok", **parts})


_LOST = "the metadata service gives no usable answer"
_FAILING = "the state file cannot be written: notices go out from memory, approvals are refused"


def _sinks(relay: Relay) -> dict[str, Any]:
    status = relay.dispatcher.status()
    shown = {
        "failing": [sink.name for sink in status if sink.failing and sink.state == "on"],
        "disabled": [sink.name for sink in status if sink.state == "disabled"],
        "paused": [sink.name for sink in status if sink.state == "paused"],
    }
    named = {name for names in shown.values() for name in names}
    reasons = {sink.name: sink.reason for sink in status if sink.name in named and sink.reason}
    return {"sinks": shown, "reasons": reasons} if reasons else {"sinks": shown}


ROUTES = (
    Route("GET", "/healthz", "whether the relay is alive", _alive, {200: Alive}, access="anyone"),
    Route(
        "GET",
        "/readyz",
        "whether polling and the store are well",
        _ready,
        {200: Ready},
        access="anyone",
        problem_statuses=(503,),
    ),
)
