"""Counts the machines of a fleet that a limit selects, for limits whose ``max`` is a share."""

from __future__ import annotations

from relay.approvals.limits import Limit, count_selected
from relay.clock import Clock
from relay.fleet.hub.roster import Roster

COUNT_INTERVAL = 60.0
"""Seconds until the machines of a limit are counted again: a fleet can have many."""


class MachineCounts:
    """How many agents of a roster a limit selects. Each agent is one machine."""

    def __init__(self, roster: Roster, clock: Clock) -> None:
        self._roster = roster
        self._clock = clock
        self._counts: dict[str, tuple[float, int]] = {}
        """By limit: when it was counted, by the monotonic clock, and the count."""

    def count(self, limit: Limit) -> int:
        """Return how many machines a limit selects. The thread of the store calls this."""
        now = self._clock.monotonic()
        counted = self._counts.get(limit.name)
        if counted is None or now - counted[0] >= COUNT_INTERVAL:
            machines = ((agent.scope, agent.names or (agent.name,)) for agent in self._roster)
            counted = self._counts[limit.name] = (now, count_selected(limit, machines))
        return counted[1]
