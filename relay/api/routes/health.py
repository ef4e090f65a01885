"""`/healthz` and `/readyz`: whether the process runs, and whether the relay works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from relay.api import ConfigurationReloader
from relay.api.schema.responses import Problem
from relay.api.schema.route import Call, Route
from relay.delivery.worker import Worker


class LivenessStatus(TypedDict):
    """The process runs."""

    status: Literal["ok"]


class UndeliveringSinks(TypedDict):
    """The names of sinks that do not deliver now. Their deliveries wait."""

    failing: list[str]
    disabled: list[str]
    paused: list[str]


class SinkProblems(TypedDict):
    """The sinks that do not deliver. They do not make the relay unready."""

    sinks: UndeliveringSinks
    reasons: NotRequired[dict[str, str]]
    """Why sinks do not deliver, by name. For callers with `read` or on the relay's machine.

    Missing if all deliver.
    """


class ConfigurationProblem(TypedDict):
    """Missing if the configuration in force is the one that was read last."""

    configuration: NotRequired[Literal["refused"]]
    """The last reload was refused, and the earlier configuration stays in force."""
    configurationProblem: NotRequired[str]
    """Why. For the same callers as `reasons`."""


class ReadinessStatus(SinkProblems, ConfigurationProblem):
    """Polling and the store work."""

    status: Literal["ok"]
    source: Literal["ok"]
    store: Literal["ok"]


async def _show_liveness(_call: Call) -> LivenessStatus:
    return LivenessStatus(status="ok")


async def _show_readiness(call: Call) -> ReadinessStatus:
    relay = call.relay
    # Reasons name principals, hosts, users and files.
    tells_reasons = "read" in call.caller.rights.can
    sinks = _sink_problems(relay.dispatcher.workers, tells_reasons=tells_reasons)
    configuration = _configuration_problem(call.server.reloader, tells_reasons=tells_reasons)
    problems = []
    if relay.source.lost:
        problems.append(relay.source.lost_reason)
    if relay.store.write_error is not None:
        problems.append(
            "the state file cannot be written: notices are sent from memory, approvals are refused"
        )
    if problems:
        raise Problem(
            503,
            "; ".join(problems),
            source="lost" if relay.source.lost else "ok",
            store="ok" if relay.store.write_error is None else "failing",
            **sinks,
            **configuration,
        )
    return ReadinessStatus(status="ok", source="ok", store="ok", **sinks, **configuration)


def _configuration_problem(
    reloader: ConfigurationReloader | None, *, tells_reasons: bool
) -> ConfigurationProblem:
    if reloader is None or reloader.problem is None:
        return ConfigurationProblem()
    if not tells_reasons:
        return ConfigurationProblem(configuration="refused")
    return ConfigurationProblem(configuration="refused", configurationProblem=reloader.problem)


def _sink_problems(sinks: Sequence[Worker], *, tells_reasons: bool) -> SinkProblems:
    readiness = SinkProblems(
        sinks=UndeliveringSinks(
            failing=[sink.name for sink in sinks if sink.failing and sink.state == "on"],
            disabled=[sink.name for sink in sinks if sink.state == "disabled"],
            paused=[sink.name for sink in sinks if sink.state == "paused"],
        )
    )
    reasons = {
        sink.name: sink.reason
        for sink in sinks
        if sink.reason and (sink.failing or sink.state != "on")
    }
    if reasons and tells_reasons:
        readiness["reasons"] = reasons
    return readiness


ROUTES = (
    Route(
        method="GET",
        path="/healthz",
        summary="whether the relay's process runs",
        handler=_show_liveness,
        access="public",
    ),
    Route(
        method="GET",
        path="/readyz",
        summary="whether polling and the store work",
        handler=_show_readiness,
        access="key, loopback or public",
        problem_statuses=(503,),
    ),
)
