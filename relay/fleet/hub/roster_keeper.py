"""Keeps the roster of a hub: stores it, reports silence and wrong clocks, and forgets agents."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import NoReturn

from relay.clock import Clock
from relay.events.build import Origin, relay_event
from relay.fleet.hub.roster import FRESH_FOR, Agent, Roster
from relay.store.sqlite import Store

UPKEEP_INTERVAL = 5.0
"""Seconds between two looks at the roster."""
_log = logging.getLogger(__name__)


class RosterKeeper:
    """Looks after the roster, into which `Hub` writes what it hears."""

    def __init__(
        self,
        origin: Origin,
        store: Store,
        clock: Clock,
        *,
        on_upkeep: Callable[[], None],
        forget: Callable[[Agent], Awaitable[None]],
    ) -> None:
        """``on_upkeep`` is called each `UPKEEP_INTERVAL`.

        ``forget`` gets each agent that was silent for `FORGOTTEN_AFTER`. It removes the agent from
        the state file and calls `forget_in_memory`.
        """
        self.roster = Roster()
        self.on_agents_changed: Callable[[], None] = lambda: None
        """Called when agents came or went. `Hub` sets it once there is a gate."""
        self._known_agents: frozenset[tuple[str, str]] = frozenset()
        self._origin = origin
        self._store = store
        self._clock = clock
        self._on_upkeep = on_upkeep
        self._forget = forget
        self._unsaved: set[tuple[str, str]] = set()
        self._silent_scopes: frozenset[str] = frozenset()
        self._wrong_clocks: frozenset[tuple[str, str]] = frozenset()

    async def load(self) -> None:
        """Read the agents that the state file knows."""
        rows = await self._store.read(lambda tx: tx.fleet.agents())
        self.roster.add_stored_agents(
            Agent(**{name: getattr(row, name) for name in row.__slots__}) for row in rows
        )

    def mark_agent_unsaved(self, agent: Agent) -> None:
        """Store this agent at the next opportunity."""
        self._unsaved.add((agent.scope, agent.relay))

    def forget_in_memory(self, agent: Agent) -> None:
        """Remove an agent from the memory. The caller removes it from the state file."""
        _log.info("agent %s of scope %s is forgotten", agent.relay, agent.scope)
        self.roster.forget(agent)
        self._unsaved.discard((agent.scope, agent.relay))

    async def run(self) -> NoReturn:
        """Report who is silent and whose clock is wrong, and forget who is gone."""
        while True:
            await self._clock.sleep(UPKEEP_INTERVAL)
            self._on_upkeep()
            now = self._clock.now()
            self._tell_of_silent_scopes(now)
            self._report_wrong_clocks(now)
            for agent in self.roster.agents_to_forget(now):
                await self._forget(agent)
            known = frozenset((agent.scope, agent.relay) for agent in self.roster)
            if known != self._known_agents:
                self._known_agents = known
                self.on_agents_changed()
            self.save()

    def save(self) -> None:
        """Have the store write the agents that have changed."""
        names, self._unsaved = self._unsaved, set()
        agents = [agent for name in names if (agent := self.roster.agent(*name)) is not None]
        if agents:
            saved = self._store.submit(lambda tx: tx.fleet.save_agents(agents), fail_open=True)
            # asyncio logs an exception that nobody retrieves; the store has reported this one.
            saved.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _tell_of_silent_scopes(self, now: datetime) -> None:
        silent = self.roster.silent_scopes(now)
        for scope in sorted(silent - self._silent_scopes):
            count = len(self.roster.agents_of_scope(scope))
            reason = (
                f"no agent of scope {scope} has been heard of for "
                f"{FRESH_FOR.total_seconds():g} s: none of its events starts or ends, until one is"
            )
            self._record_relay_event_about_scope("relay.silent", scope, reason, count, now)
        # A scope is not silent either if the hub hears nobody now, or has forgotten all its agents.
        heard = {
            scope
            for scope in self._silent_scopes - silent
            if self._has_fresh_agent_of_scope(scope, now)
        }
        for scope in sorted(heard):
            reason = f"an agent of scope {scope} is heard of again"
            self._record_relay_event_about_scope("relay.source-recovered", scope, reason, 1, now)
        self._silent_scopes = (self._silent_scopes - heard) & self.roster.scopes | silent

    def _has_fresh_agent_of_scope(self, scope: str, now: datetime) -> bool:
        return any(self.roster.is_fresh(agent, now) for agent in self.roster.agents_of_scope(scope))

    def _report_wrong_clocks(self, now: datetime) -> None:
        agents = self.roster.agents_with_wrong_clocks(now)
        names = frozenset((agent.scope, agent.relay) for agent in agents)
        for agent in agents:
            if (agent.scope, agent.relay) not in self._wrong_clocks:
                reason = (
                    f"the clock of agent {agent.name} of scope {agent.scope} is wrong by "
                    f"{agent.clock_offset:g} s: it gets no start orders"
                )
                self._record_relay_event_about_scope(
                    "relay.clock-skewed", agent.scope, reason, 1, now
                )
        self._wrong_clocks = names

    def _record_relay_event_about_scope(
        self, name: str, scope: str, reason: str, count: int, at: datetime
    ) -> None:
        origin = self._origin.copy_for_scope(scope)
        recorded = self._store.submit(
            lambda tx: tx.record(
                relay_event(
                    name, origin, at, sink=None, reason=reason, count=count, head=str(tx.head())
                ),
                at,
            ),
            fail_open=True,
        )
        # asyncio logs an exception that nobody retrieves; the store has reported this one.
        recorded.add_done_callback(lambda done: done.cancelled() or done.exception())
