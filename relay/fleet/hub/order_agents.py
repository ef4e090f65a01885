"""The agents that can carry out an order of the hub, and what they say before it is sent.

An agent is *able* if it can act (`Roster.can_agent_execute_order`) and its last word is the current
state of the event. It is *reachable* if it is able and RabbitMQ did not return the last order to
it. Agents that did not carry out an order lately come last.

What an agent says can be old. So `OrderPort` has agents asked for a pulse: before an order is
repeated, and if only agents that the event names are known to show it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime

from relay.clock import Clock, wait_for_event
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.hub.roster import Agent, Roster
from relay.fleet.messages import PulseRequest
from relay.fleet.routing import command_key

PULSE_TIMEOUT = 5.0
"""Seconds in which an agent must say what an event is, before an order is repeated."""
MAX_ASKED = 3
"""Agents that are asked at once for a pulse."""
UNNAMED_AGENT_PAUSES = (1.0, 0.5)
"""Seconds that the hub waits after it has asked agents whether they show the event, too.

They read the document once a second, so it asks twice.
"""
FAILURE_MEMORY = 600.0
"""Seconds in which an agent that did not carry out an order comes after all others."""

AgentsShowing = Callable[[str, str], frozenset[str] | None]
"""Returns the agents of a scope whose last word is the current state of an event.

The event is named by its key in the store, the agents by their relay words. None: not known.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedEvent:
    """The event of a grant, as the last `OrderPort.refresh_events_of_grants` found it."""

    scope: str
    grant: int
    key: str
    """Its key in the store."""
    resources: tuple[str, ...]
    not_before: datetime | None


@dataclass(slots=True)
class _AwaitedPulse:
    """A request to agents to say what they see.

    ``suffices`` says whether it is enough if this agent shows the event.
    """

    asked_at: datetime
    event: GrantedEvent
    suffices: Callable[[Agent], bool]
    answered: asyncio.Event = field(default_factory=asyncio.Event)


class OrderAgents:
    """Chooses the agents for the orders of an `OrderPort`, and asks them for pulses."""

    def __init__(
        self,
        roster: Roster,
        send_transient: Callable[[str, CloudEvent], None],
        origin: Origin,
        clock: Clock,
        agents_showing: AgentsShowing,
    ) -> None:
        """``send_transient`` publishes with a routing key what may be lost."""
        self._roster = roster
        self._send_transient = send_transient
        self._origin = origin
        self._clock = clock
        self._agents_showing = agents_showing
        self._awaited: dict[str, _AwaitedPulse] = {}
        """The request to each scope that waits for a pulse."""
        self._returned: dict[str, set[str]] = {}
        """The agents of each scope that an order did not reach, until they are heard again."""
        self._failed_at: dict[str, dict[str, float]] = {}
        """When agents of each scope did not carry out an order, by the monotonic clock."""

    # --- what is known about agents

    def note_heard(self, scope: str, relay: str) -> None:
        """Note that what a message of an agent says is recorded. The roster knows of it already."""
        returned = self._returned.get(scope)
        if returned is not None:
            returned.discard(relay)
            if not returned:
                del self._returned[scope]
        awaited = self._awaited.get(scope)
        if awaited is not None and self._has_agent_shown_event_since_asked(awaited, relay):
            awaited.answered.set()

    def note_order_returned_by_broker(self, scope: str, relay: str) -> None:
        """Note that RabbitMQ returned an order to an agent."""
        self._returned.setdefault(scope, set()).add(relay)

    def note_failure(self, scope: str, relay: str) -> None:
        """Note that an agent did not carry out an order, or that nobody knows whether it did."""
        self._failed_at.setdefault(scope, {})[relay] = self._clock.monotonic()

    def forget_failure(self, scope: str, relay: str) -> None:
        """Note that an agent has sent a StartRequest and brought the answer of IMDS."""
        self._failed_at.get(scope, {}).pop(relay, None)

    # --- who gets an order

    def find_reachable_agents_best_first(self, event: GrantedEvent) -> list[Agent]:
        """Return the agents that an order about an event reaches, as far as the hub knows.

        The best come first, whether they failed lately or not.
        """
        returned = self._returned.get(event.scope, ())
        return [
            agent
            for agent in self._find_able_agents_best_first(event)
            if agent.relay not in returned
        ]

    def choose(self, event: GrantedEvent) -> Agent | None:
        """Return the agent that gets the next order about an event; None: nobody can."""
        failed_at = self._recent_failure_time_by_agent(event.scope)
        return min(
            self.find_reachable_agents_best_first(event),
            key=lambda agent: failed_at.get(agent.relay, float("-inf")),
            default=None,
        )

    def explain_why_none(self, event: GrantedEvent) -> str:
        """Return why nobody can carry out an order about an event."""
        now = self._clock.now()
        agents = self._roster.agents_of_scope(event.scope)
        fresh = [agent for agent in agents if self._roster.is_fresh(agent, now)]
        able = self._roster.find_able_agents_best_first(event.scope, event.resources, now)
        return (
            f"no agent can carry out the order: of {len(agents)} agents of the scope, "
            f"{len(fresh)} were heard lately, and {len(able)} of these read their document and "
            "have a right clock; they do not show the event as it is, or orders do not reach them"
        )

    def _find_able_agents_best_first(self, event: GrantedEvent) -> list[Agent]:
        """Return the agents that can carry out an order about an event, the best first."""
        return self._roster.find_able_agents_best_first(
            event.scope,
            event.resources,
            self._clock.now(),
            among=self._agents_showing(event.scope, event.key),
        )

    def _recent_failure_time_by_agent(self, scope: str) -> dict[str, float]:
        since = self._clock.monotonic() - FAILURE_MEMORY
        recent = {relay: at for relay, at in self._failed_at.get(scope, {}).items() if at > since}
        if recent:
            self._failed_at[scope] = recent
        else:
            self._failed_at.pop(scope, None)
        return recent

    # --- what agents are asked

    async def request_and_await_pulse_showing_event(self, event: GrantedEvent) -> bool:
        """Ask agents for a pulse, and wait until what one of them says is recorded.

        Return whether one that shows the event said so within `PULSE_TIMEOUT`.
        """
        now = self._clock.now()
        agents = [
            *self.find_reachable_agents_best_first(event),
            *self._roster.find_able_agents_best_first(event.scope, event.resources, now),
            *(
                agent
                for agent in self._roster.agents_of_scope(event.scope)
                if self._roster.is_fresh(agent, now)
            ),
        ]
        return await self._request_pulses_until_one_suffices(
            event, agents, (PULSE_TIMEOUT,), lambda _: True
        )

    async def ask_agents_outside_event_resources(self, event: GrantedEvent) -> None:
        """Ask whether others show the event, if only agents that it names are known to show it.

        Of the agents that see a change, most leave it to another to report it.
        """
        failed = self._recent_failure_time_by_agent(event.scope)
        returned = self._returned.get(event.scope, ())

        def is_unaffected_and_reliable_agent(agent: Agent) -> bool:
            is_named = agent.is_named_in(event.resources)
            return not is_named and agent.relay not in failed and agent.relay not in returned

        if any(map(is_unaffected_and_reliable_agent, self._find_able_agents_best_first(event))):
            return
        now = self._clock.now()
        able = self._roster.find_able_agents_best_first(event.scope, event.resources, now)
        agents = list(filter(is_unaffected_and_reliable_agent, able))
        if agents:
            await self._request_pulses_until_one_suffices(
                event, agents, UNNAMED_AGENT_PAUSES, is_unaffected_and_reliable_agent
            )

    async def _request_pulses_until_one_suffices(
        self,
        event: GrantedEvent,
        agents: Iterable[Agent],
        pauses: Iterable[float],
        suffices: Callable[[Agent], bool],
    ) -> bool:
        """Ask the first of these agents for pulses, before each pause, until one suffices.

        Return whether one did: then what it says is recorded.
        """
        relays = list(dict.fromkeys(agent.relay for agent in agents))[:MAX_ASKED]
        awaited = _AwaitedPulse(self._clock.now(), event, suffices)
        self._awaited[event.scope] = awaited
        try:
            for pause in pauses:
                request = PulseRequest().to_event(self._origin, self._clock.now())
                for relay in relays:
                    self._send_transient(command_key(event.scope, relay), request)
                await wait_for_event(awaited.answered, self._clock, pause)
                if awaited.answered.is_set():
                    break
        finally:
            del self._awaited[event.scope]
        return awaited.answered.is_set()

    def _has_agent_shown_event_since_asked(self, awaited: _AwaitedPulse, relay: str) -> bool:
        """Whether a message of an agent that shows the event came after the request."""
        return any(
            agent.relay == relay
            and agent.last_heard >= awaited.asked_at
            and awaited.suffices(agent)
            for agent in self._find_able_agents_best_first(awaited.event)
        )
