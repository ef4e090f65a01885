"""Keeps the roster of a hub: stores it, tells of silence and wrong clocks, and counts machines."""

from __future__ import annotations

from datetime import datetime

from relay.approvals.limits import Limit, count_selected_machines
from relay.clock import Clock
from relay.events.build import Origin, relay_event
from relay.fleet.hub.roster import FRESH_FOR, Agent, Roster
from relay.store.sqlite import Store, Work

COUNT_INTERVAL = 60.0
"""Seconds until the machines of a limit are counted again: a fleet can have many."""


class RosterKeeper:
    """Stores the roster, into which `Hub` writes what it hears, and tells what follows from it."""

    def __init__(self, origin: Origin, store: Store) -> None:
        self.roster = Roster()
        self._origin = origin
        self._store = store
        self._silent_scopes: frozenset[str] = frozenset()
        self._wrong_clocks: frozenset[tuple[str, str]] = frozenset()

    async def load(self) -> None:
        for row in await self._store.read(lambda tx: tx.fleet.agents()):
            self.roster.put(Agent(**{name: getattr(row, name) for name in row.__slots__}))

    def tell(self, now: datetime) -> None:
        self._tell_of_silent_scopes(now)
        self._report_wrong_clocks(now)

    def save(self) -> None:
        names = list(self.roster.unsaved)
        self.roster.unsaved.clear()
        agents = [agent for name in names if (agent := self.roster.agent(*name)) is not None]
        if agents:
            self._submit(lambda tx: tx.fleet.save_agents(agents))

    def _tell_of_silent_scopes(self, now: datetime) -> None:
        silent = self.roster.silent_scopes(now)
        for scope in sorted(silent - self._silent_scopes):
            count = len(self.roster.agents_of_scope(scope))
            reason = (
                f"no agent of scope {scope} has been heard of for "
                f"{FRESH_FOR.total_seconds():g} s: none of its events starts or ends, until one is"
            )
            self._record("relay.silent", scope, reason, count, now)
        # A scope is not silent either if the hub hears nobody now, or has forgotten all its agents.
        heard = {
            scope
            for scope in self._silent_scopes - silent
            if any(
                self.roster.freshness(each, now) == "fresh"
                for each in self.roster.agents_of_scope(scope)
            )
        }
        for scope in sorted(heard):
            reason = f"an agent of scope {scope} is heard of again"
            self._record("relay.source-recovered", scope, reason, 1, now)
        self._silent_scopes = (self._silent_scopes - heard) & self.roster.scopes | silent

    def _report_wrong_clocks(self, now: datetime) -> None:
        agents = self.roster.agents_with_wrong_clocks(now)
        for agent in agents:
            if (agent.scope, agent.relay) not in self._wrong_clocks:
                reason = (
                    f"the clock of agent {agent.name} of scope {agent.scope} is wrong by "
                    f"{agent.clock_offset:g} s: it gets no start orders"
                )
                self._record("relay.clock-skewed", agent.scope, reason, 1, now)
        self._wrong_clocks = frozenset((agent.scope, agent.relay) for agent in agents)

    def _record(self, name: str, scope: str, reason: str, count: int, at: datetime) -> None:
        origin = self._origin.copy_for_scope(scope)
        self._submit(
            lambda tx: tx.record(
                relay_event(
                    name, origin, at, sink=None, reason=reason, count=count, head=str(tx.head())
                ),
                at,
            )
        )

    def _submit(self, work: Work[object]) -> None:
        done = self._store.submit(work, fail_open=True)
        # asyncio logs an exception that nobody retrieves; the store has reported this one.
        done.add_done_callback(lambda done: done.cancelled() or done.exception())


class SelectedMachineCounter:
    """How many agents a limit selects, whose ``max`` is a share. Each agent is one machine."""

    def __init__(self, roster: Roster, clock: Clock) -> None:
        self._roster = roster
        self._clock = clock
        self._counts: dict[str, tuple[Limit, float, int]] = {}
        """By name: the limit, when it was counted, by the monotonic clock, and the count."""

    def machines_of_limit(self, limit: Limit) -> int:
        """Return how many machines a limit selects. The thread of the store calls this."""
        now = self._clock.monotonic()
        counted = self._counts.get(limit.name)
        # After a reload another limit can have this name.
        if counted is None or counted[0] != limit or now - counted[1] >= COUNT_INTERVAL:
            machines = ((agent.scope, agent.names or (agent.name,)) for agent in self._roster)
            counted = limit, now, count_selected_machines(limit, machines)
            self._counts[limit.name] = counted
        return counted[2]
