"""`/v1/fleet`: the agents of a hub."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from relay.api.routes.events import SCOPE, parse_scope_name
from relay.api.schema.responses import Problem, rfc3339_or_null
from relay.api.schema.route import Call, Route
from relay.events.timestamps import format_rfc3339


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


async def _show_fleet(call: Call) -> FleetRoster:
    scope = parse_scope_name(call.request)
    roster, now = call.relay.roster, call.relay.clock.now()
    if roster is None:
        raise Problem(404, "this relay is no hub: it has no agents")
    agents = [
        AgentSummary(
            scope=agent.scope,
            relay=agent.relay,
            name=agent.name,
            user=agent.user,
            state=roster.classify_agent_freshness(agent, now),
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


ROUTES = (
    Route(
        method="GET",
        path="/v1/fleet",
        summary="the agents of a hub, and which of them are silent",
        handler=_show_fleet,
        needs="read",
        is_large=True,
        parameters=(SCOPE,),
        problem_statuses=(404,),
    ),
)
