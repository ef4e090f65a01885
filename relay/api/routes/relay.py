"""The relay itself.

`/healthz`, `/readyz`, `/v1/status`, `/v1/fleet`, `/v1/reload`, and
`/metrics` and `/openapi.json`, which describe it to programs.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal, NotRequired, cast

from aiohttp import web
from typing_extensions import TypedDict

from relay import __version__
from relay.api.calls import Call, Scope, get, get_page, post
from relay.api.openapi import openapi_document
from relay.api.responses import Problem, bytes_response, rfc3339_or_null
from relay.api.state import KeyChange
from relay.approvals.request import Right
from relay.errors import ReloadRefused, StoreUnavailable
from relay.events.timestamps import format_rfc3339
from relay.store import Mode


class LivenessStatus(TypedDict):
    """The process runs."""

    status: Literal["ok"]


class UndeliveringSinks(TypedDict):
    """The names of sinks that do not deliver now. Their deliveries wait."""

    failing: list[str]
    disabled: list[str]
    paused: list[str]


class ReadinessStatus(TypedDict):
    """Polling and the store work."""

    status: Literal["ok"]
    source: Literal["ok"]
    store: Literal["ok"]
    sinks: UndeliveringSinks
    """They do not make the relay unready."""
    reasons: NotRequired[dict[str, str]]
    """Why sinks do not deliver, by name. Missing if all deliver."""
    configuration: NotRequired[Literal["refused"]]
    """The last reload was refused, and the earlier configuration stays in force."""
    configurationProblem: NotRequired[str]
    """Why."""


@get("/healthz", "whether the relay's process runs", access="public")
async def show_liveness(_call: Call) -> LivenessStatus:
    return LivenessStatus(status="ok")


@get(
    "/readyz",
    "whether polling and the store work",
    access="key, loopback or public",
    problems=(503,),
)
async def show_readiness(call: Call) -> ReadinessStatus:
    relay, reloader = call.relay, call.server.reloader
    is_lost, is_failing = relay.source.lost, relay.store.write_error is not None
    workers = relay.dispatcher.workers
    found: dict[str, Any] = {
        "source": "lost" if is_lost else "ok",
        "store": "failing" if is_failing else "ok",
        "sinks": UndeliveringSinks(
            failing=[sink.name for sink in workers if sink.failing and sink.state == "on"],
            disabled=[sink.name for sink in workers if sink.state == "disabled"],
            paused=[sink.name for sink in workers if sink.state == "paused"],
        ),
    }
    wrong = [sink for sink in workers if sink.failing or sink.state != "on"]
    # Reasons name principals, hosts, users and files.
    tells_reasons = "read" in call.caller.rights.can
    if tells_reasons and (reasons := {sink.name: sink.reason for sink in wrong if sink.reason}):
        found["reasons"] = reasons
    if reloader is not None and reloader.problem is not None:
        found["configuration"] = "refused"
        if tells_reasons:
            found["configurationProblem"] = reloader.problem
    if not (is_lost or is_failing):
        return cast("ReadinessStatus", {"status": "ok", **found})
    problems = [relay.source.lost_reason] if is_lost else []
    if is_failing:
        what = "notices are sent from memory, approvals are refused"
        problems.append(f"the state file cannot be written: {what}")
    raise Problem(503, "; ".join(problems), **found)


class PartHealth(TypedDict):
    """Whether a part of the relay works."""

    ok: bool
    reason: str | None
    """What it means that it does not work."""


class SourceStatus(PartHealth):
    """Whether the relay hears of events."""

    polls: int
    failures: int
    readAgeSeconds: float | None
    """The age of the document that was read last; null: none was read, or this is a hub."""
    clockOffsetSeconds: float | None
    """How far this relay's clock is ahead of that of the metadata service; null: not known."""


class CallerStatus(TypedDict):
    """Who calls."""

    principal: str
    can: list[Right]


class RelayStatus(TypedDict):
    """The state of the relay."""

    now: str
    """RFC 3339: the relay's clock."""
    version: str
    scope: str
    relay: str
    hub: bool
    """Whether this relay is the hub of a fleet."""
    caller: CallerStatus
    mode: Mode | None
    """The mode of approvals; null: the state file cannot be read now."""
    position: int | None
    """The end of the journal: an id of `/v1/stream`; null: the state file cannot be read now."""
    source: SourceStatus
    store: PartHealth
    approvalsLink: PartHealth | None
    """The connection over which approvals come from RabbitMQ; null: it is not configured."""


@get(
    "/v1/status",
    "the state of the relay: source, state file, approvals, and who the caller is",
    needs="read",
)
async def show_status(call: Call) -> RelayStatus:
    relay, caller = call.relay, call.caller
    source, link, approvals_link = relay.source, relay.approvals_link, None
    if link is not None:
        lost = "no connection to RabbitMQ: approvals on the queue wait"
        approvals_link = _part_health(None if link.is_connected else lost)
    mode: Mode | None = None
    position: int | None = None
    with contextlib.suppress(StoreUnavailable):
        mode, position = await relay.store.read(
            lambda tx: (relay.gate.engine.effective_approval_mode(tx), tx.head().position)
        )
    return RelayStatus(
        now=format_rfc3339(relay.clock.now()),
        version=__version__,
        scope=relay.origin.scope,
        relay=relay.origin.relay,
        hub=relay.roster is not None,
        caller=CallerStatus(principal=caller.principal, can=sorted(caller.rights.can)),
        mode=mode,
        position=position,
        source=SourceStatus(
            ok=not source.lost,
            reason=source.lost_reason if source.lost else None,
            polls=source.polls,
            failures=source.failures,
            readAgeSeconds=source.read_age,
            clockOffsetSeconds=source.clock_offset,
        ),
        store=_part_health(relay.store.write_error),
        approvalsLink=approvals_link,
    )


def _part_health(problem: str | None) -> PartHealth:
    return PartHealth(ok=problem is None, reason=problem)


class AgentSummary(TypedDict):
    """An agent, as it last described itself."""

    scope: str
    relay: str
    """Its name as a word of a routing key: commands for it go to `to.<scope>.<relay>`."""
    name: str
    """Its name as it writes it."""
    user: str
    """Its RabbitMQ user."""
    state: Literal["fresh", "silent", "unknown"]
    """unknown: the hub has not listened for long enough to say that it is silent."""
    version: str | None
    zone: str | None
    vmId: str | None
    firstHeard: str
    lastHeard: str
    lastReport: str | None
    lastPulse: str | None
    pollAgeSeconds: float | None
    """The age of its last good poll at its last pulse."""
    clockOffsetSeconds: float | None
    """How far its clock is ahead of that of the metadata service."""


class FleetRoster(TypedDict):
    """The agents of a hub, by scope and name."""

    agents: list[AgentSummary]
    silentScopes: list[str]
    """The scopes whose agents are all silent."""


@get_page("/v1/fleet", "the agents of a hub, and which of them are silent", problems=(404,))
async def show_fleet(call: Call, scope: Scope) -> FleetRoster:
    roster, now = call.relay.roster, call.relay.clock.now()
    if roster is None:
        raise Problem(404, "this relay is no hub: it has no agents")
    agents = [
        AgentSummary(
            scope=agent.scope,
            relay=agent.relay,
            name=agent.name,
            user=agent.user,
            state=roster.freshness(agent, now),
            version=agent.version,
            zone=agent.zone,
            vmId=agent.vm_id,
            firstHeard=format_rfc3339(agent.first_heard),
            lastHeard=format_rfc3339(agent.last_heard),
            lastReport=rfc3339_or_null(agent.last_report),
            lastPulse=rfc3339_or_null(agent.last_pulse),
            pollAgeSeconds=agent.poll_age,
            clockOffsetSeconds=agent.clock_offset,
        )
        for agent in roster
        if scope in (None, agent.scope)
    ]
    agents.sort(key=lambda agent: (agent["scope"], agent["relay"]))
    silent = sorted(name for name in roster.silent_scopes(now) if scope in (None, name))
    return FleetRoster(agents=agents, silentScopes=silent)


class ChangedKey(TypedDict):
    """A key of the configuration whose value has changed."""

    key: str
    """Entries of a list that have names are keys too: `sinks.bus`."""
    change: KeyChange


class ConfigurationReloaded(TypedDict):
    """The configuration is in force."""

    changes: list[ChangedKey]
    """Empty if nothing has changed."""


@post(
    "/v1/reload",
    "read the configuration again and take it over; if it cannot be, the earlier one "
    "stays in force",
    needs="operate",
    problems=(422,),
)
async def reload(call: Call) -> ConfigurationReloaded:
    _ = call.relay  # 503 while it starts or stops
    if call.server.reloader is None:
        raise Problem(503, "the relay is starting, or was not started by `imds-relay run`")
    try:
        changes = await call.server.reloader.reload(call.caller.principal)
    except ReloadRefused as error:
        if error.is_stopping:
            raise Problem(503, "the relay is starting or stopping; try again") from None
        members: dict[str, Any] = {}
        if error.restart_keys:
            members["restartRequired"] = list(error.restart_keys)
        raise Problem(422, error.reason, **members) from None
    listed = [ChangedKey(key=key, change=change) for key, change in changes.items()]
    return ConfigurationReloaded(changes=listed)


@get("/openapi.json", "this description", access="public")
async def show_description(_call: Call) -> dict[str, Any]:
    return openapi_document()


@get(
    "/metrics",
    "for Prometheus; programs on this machine need no credentials",
    media_types=("text/plain", "application/openmetrics-text"),
    access="key or loopback",
    needs="read",
)
async def show_metrics(call: Call) -> web.Response:
    # A relay that nobody scrapes does without the library's megabyte of memory.
    from prometheus_client.exposition import choose_encoder  # noqa: PLC0415

    from relay.api.metrics import read_metrics  # noqa: PLC0415

    encode, content_type = choose_encoder(call.request.headers.get("Accept", ""))
    content = encode(await read_metrics(call.relay, call.server))
    return bytes_response(200, content, content_type)
