"""`/healthz` and `/readyz`: whether the process runs, and whether the relay works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from relay.api.schema.problems import Problem
from relay.api.schema.route import Call, Route
from relay.delivery.dispatcher import SinkStatus


class HealthStatus(TypedDict):
    """The process runs."""

    status: Literal["ok"]


class UndeliveringSinks(TypedDict):
    """The names of sinks that do not deliver now. Their deliveries wait."""

    failing: list[str]
    disabled: list[str]
    paused: list[str]


class SinkReadiness(TypedDict):
    """The sinks that do not deliver. They do not make the relay unready."""

    sinks: UndeliveringSinks
    reasons: NotRequired[dict[str, str]]
    """Why sinks do not deliver, by name. Missing if all deliver."""


class ReadinessStatus(SinkReadiness):
    """Polling and the store work."""

    status: Literal["ok"]
    source: Literal["ok"]
    store: Literal["ok"]


async def _show_health(_call: Call) -> HealthStatus:
    return HealthStatus(status="ok")


async def _show_readiness(call: Call) -> ReadinessStatus:
    relay = call.relay
    lost, failing = relay.source.lost, relay.store.write_error is not None
    parts: dict[str, Any] = {
        "source": "lost" if lost else "ok",
        "store": "failing" if failing else "ok",
        **_sinks(relay),
    }
    if reasons:
        readiness["reasons"] = reasons
    return readiness


ROUTES = (
    Route(
        method="GET",
        path="/healthz",
        summary="whether the relay's process runs",
        handler=_show_health,
        access="public",
    ),
    Route(
        method="GET",
        path="/readyz",
        summary="whether polling and the store work",
        handler=_show_readiness,
        access="public",
        problem_statuses=(503,),
    ),
)
