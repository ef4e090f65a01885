"""Counts the machines of a fleet that a limit selects, for limits whose ``max`` is a share."""

from __future__ import annotations

from relay.approvals.limits import Limit, count_selected_machines
from relay.clock import Clock
from relay.fleet.hub.roster import Roster

COUNT_INTERVAL = 60.0
"""Seconds until the machines of a limit are counted again: a fleet can have many."""


class SelectedMachineCounter:
    """How many agents of a roster a limit selects. Each agent is one machine."""

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
            counted = self._counts[limit.name] = (
                limit,
                now,
                count_selected_machines(limit, machines),
            )
        return counted[2]
