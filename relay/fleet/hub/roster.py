"""The agents of a fleet: who they are, who has been heard of lately, and who can act. Pure.

`Hub` writes into the roster what it hears, stores it, and tells what follows from it (`news`).

An agent is *fresh* if the hub has heard of it within `FRESH_FOR`, and *silent* if the hub has
listened for as long and heard nothing. Directly after the hub has connected, an agent can be
neither. The hub listens while it is connected and nothing waits for it in its queue: what an agent
said may be there. After `FORGOTTEN_AFTER` of silence the hub forgets an agent.

All times are by the clock of the hub, but those of documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Literal

from relay.approvals.limits import Limit, count_selected_machines
from relay.events.model import (
    ScheduledEvent,
    add_underscore_prefixed_names,
    other_instance_names,
    relay_word,
)
from relay.fleet.messages import Pulse
from relay.fleet.routing import AuthorizedSender
from relay.store.fleet import AgentRow

FRESH_FOR = timedelta(seconds=150)
"""Two pulses can be lost before an agent is silent."""
FORGOTTEN_AFTER = timedelta(hours=24)
MAX_LISTEN_PAUSE = timedelta(seconds=60)
"""If nothing was noted for so long, the hub did not listen: its process or machine stood still, or
its queue was not empty whenever it asked."""
MAX_CLOCK_OFFSET = 2.0
"""Seconds. An agent whose clock is wrong by more cannot keep a deadline."""
MAX_POLL_AGE = 60.0
"""Seconds. An agent that has read no document for so long cannot act."""
COUNT_INTERVAL = 60.0
"""Seconds until the machines of a limit are counted again: a fleet can have many."""


class Agent(AgentRow):
    """What the hub knows about an agent: its row, and what follows from it."""

    __slots__ = ()

    @property
    def last_heard(self) -> datetime:
        return max(filter(None, (self.first_heard, self.last_report, self.last_pulse)))

    @property
    def is_clock_wrong(self) -> bool:
        """Whether its clock is known to be wrong by more than `MAX_CLOCK_OFFSET`."""
        return self.clock_offset is not None and abs(self.clock_offset) > MAX_CLOCK_OFFSET

    @property
    def candidate_rank(self) -> tuple[float, float, str]:
        """What sorts the agents that can execute an order: who read and was heard last first.

        Those who read in the last five seconds are equally good.
        """
        poll_age = self.poll_age or 0.0
        pulse = self.last_pulse.timestamp() if self.last_pulse is not None else 0.0
        return 0.0 if poll_age <= 5.0 else poll_age, -pulse, self.relay

    def is_named_in(self, resources: Iterable[str]) -> bool:
        """Whether the ``Resources`` of an event name the VM of this agent.

        Without names from a pulse, a VM is called as its relay is. Azure can write the name of an
        instance of a scale set in two ways, and with an underscore in front.
        """
        if self.names:
            return any(resource.lower() in self.names for resource in resources)
        names = add_underscore_prefixed_names(
            frozenset({self.relay, *other_instance_names(self.relay)})
        )
        return any(relay_word(resource) in names for resource in resources)


class Roster:
    def __init__(self, agents: Iterable[Agent] = ()) -> None:
        self._unsaved: set[tuple[str, str]] = set()
        """Scope and relay word of the agents that have changed."""
        self._agents: dict[str, dict[str, Agent]] = {}
        self._listening_since: datetime | None = None
        self._listened_at: datetime | None = None
        self._heard: set[tuple[str, str]] = set()
        """The agents that were heard since the hub has connected."""
        self._told_silent: frozenset[str] = frozenset()
        self._told_wrong: frozenset[tuple[str, str]] = frozenset()
        """The agents whose clocks are wrong."""
        self._counts: dict[str, tuple[Limit, float, int]] = {}
        """By the name of a limit: the limit, when it was counted, and the count."""
        for agent in agents:
            self.put(agent)

    def __iter__(self) -> Iterator[Agent]:
        for agents in list(self._agents.values()):
            yield from list(agents.values())

    def put(self, agent: Agent) -> Agent:
        self._agents.setdefault(agent.scope, {})[agent.relay] = agent
        return agent

    # --- what the hub hears

    def note_listening(self, now: datetime) -> bool:
        """Note that the hub listens. Call this at least twice a minute while it does.

        Return True if it did not listen before: agents may have said what nobody heard. Silence
        counts from then on, and the merge has to wait once more (`merge.wait_again`).
        """
        listened = self.has_listened(now)
        self._listened_at = now
        if listened:
            return False
        self._listening_since = now
        for agent in self:  # the clock may have been set back
            self.put(
                replace(
                    agent,
                    first_heard=min(agent.first_heard, now),
                    last_report=agent.last_report and min(agent.last_report, now),
                    last_pulse=agent.last_pulse and min(agent.last_pulse, now),
                )
            )
        return True

    def has_listened(self, now: datetime) -> bool:
        """Whether the hub has listened without a pause until now."""
        before = self._listened_at
        return before is not None and before <= now <= before + MAX_LISTEN_PAUSE

    def note_connection_lost(self) -> None:
        self._listening_since = self._listened_at = None
        self._heard.clear()

    def note_message(
        self, sender: AuthorizedSender, name: str, now: datetime, pulse: Pulse | None = None
    ) -> Agent:
        """Note a message of an agent, perhaps a pulse. Return what is known about it now."""
        known = self.agent(sender.scope, sender.relay) or Agent(
            scope=sender.scope, relay=sender.relay, user=sender.user, name=name, first_heard=now
        )
        self._unsaved.add((sender.scope, sender.relay))
        self._heard.add((sender.scope, sender.relay))
        if pulse is None:
            return self.put(replace(known, user=sender.user, name=name, last_report=now))
        return self.put(
            replace(
                known,
                user=sender.user,
                name=name,
                last_pulse=now,
                vm_id=pulse.vm_id,
                version=pulse.version,
                zone=pulse.zone,
                names=tuple(sorted({name.lower() for name in pulse.names})),
                poll_age=pulse.poll_age,
                clock_offset=pulse.clock_offset,
            )
        )

    def note_documents(self, read: Iterable[tuple[str, str, datetime]]) -> None:
        """Note when agents read documents that were merged, by the clock of IMDS."""
        for scope, relay, at in read:
            if (known := self.agent(scope, relay)) is not None:
                self._unsaved.add((scope, relay))
                self.put(replace(known, document_at=max(known.document_at or at, at)))

    def take_unsaved(self) -> list[Agent]:
        """Return the agents that have changed, to store them."""
        names, self._unsaved = self._unsaved, set()
        return [agent for name in names if (agent := self.agent(*name)) is not None]

    def forget(self, agent: Agent) -> None:
        agents = self._agents.get(agent.scope, {})
        agents.pop(agent.relay, None)
        if not agents:
            self._agents.pop(agent.scope, None)

    # --- what follows from it

    @property
    def scopes(self) -> frozenset[str]:
        return frozenset(self._agents)

    def agent(self, scope: str, relay: str) -> Agent | None:
        return self._agents.get(scope, {}).get(relay)

    def agents_of_scope(self, scope: str) -> list[Agent]:
        return list(self._agents.get(scope, {}).values())

    def freshness(self, agent: Agent, now: datetime) -> Literal["fresh", "silent", "unknown"]:
        """Return whether it is silent; unknown: the hub has not listened for long enough."""
        if now - agent.last_heard <= FRESH_FOR:
            return "fresh"
        since = self._listening_since
        if since is None or not self.has_listened(now):
            return "unknown"
        return "silent" if now - max(agent.last_heard, since) > FRESH_FOR else "unknown"

    def may_speak(self, scope: str, now: datetime, relay: str) -> bool:
        """Whether an agent is known and not silent: one not heard yet may show an event."""
        agent = self.agent(scope, relay)
        return agent is not None and self.freshness(agent, now) != "silent"

    def may_yet_connect(self, scope: str, now: datetime, relay: str) -> bool:
        """Whether an agent may speak, and is unheard since the hub has connected."""
        return (scope, relay) not in self._heard and self.may_speak(scope, now, relay)

    def silent_scopes(self, now: datetime) -> frozenset[str]:
        return frozenset(
            scope
            for scope, agents in self._agents.items()
            if all(self.freshness(agent, now) == "silent" for agent in agents.values())
        )

    def agents_to_forget(self, now: datetime) -> list[Agent]:
        return [
            agent
            for agent in self
            if now - agent.last_heard >= FORGOTTEN_AFTER and self.freshness(agent, now) == "silent"
        ]

    def agents_terminated_by(self, scope: str, event: ScheduledEvent) -> list[Agent]:
        """Return the agents to forget because an event that has ended deleted their VMs."""
        if (event.event_type or "").lower() != "terminate":
            return []
        return [
            agent for agent in self.agents_of_scope(scope) if agent.is_named_in(event.resources)
        ]

    def agents_with_wrong_clocks(self, now: datetime) -> list[Agent]:
        fresh = (agent for agent in self if self.freshness(agent, now) == "fresh")
        return [agent for agent in fresh if agent.is_clock_wrong]

    def news(self, now: datetime) -> Iterator[tuple[str, str, str, int]]:
        """Yield what is to be told of silence and wrong clocks: each once, and each return.

        It is the name of an event, the scope, the reason, and how many agents it is about.
        """
        silent = self.silent_scopes(now)
        for scope in sorted(silent - self._told_silent):
            reason = (
                f"no agent of scope {scope} has been heard of for "
                f"{FRESH_FOR.total_seconds():g} s: none of its events starts or ends, until one is"
            )
            yield "relay.silent", scope, reason, len(self.agents_of_scope(scope))
        # A scope is not silent either if the hub hears nobody now, or has forgotten all its agents.
        heard = {
            scope
            for scope in self._told_silent
            if any(self.freshness(it, now) == "fresh" for it in self.agents_of_scope(scope))
        }
        for scope in sorted(heard):
            yield "relay.source-recovered", scope, f"an agent of scope {scope} is heard of again", 1
        self._told_silent = (self._told_silent - heard) & self.scopes | silent
        wrong = self.agents_with_wrong_clocks(now)
        for agent in wrong:
            if (agent.scope, agent.relay) not in self._told_wrong:
                reason = (
                    f"the clock of agent {agent.name} of scope {agent.scope} is wrong by "
                    f"{agent.clock_offset:g} s: it gets no start orders"
                )
                yield "relay.clock-skewed", agent.scope, reason, 1
        self._told_wrong = frozenset((agent.scope, agent.relay) for agent in wrong)

    def machines_of_limit(self, limit: Limit, now: float) -> int:
        """Return how many machines a limit selects, whose ``max`` is a share.

        Each agent is one. ``now`` is monotonic. The thread of the store calls this.
        """
        counted = self._counts.get(limit.name)
        # After a reload another limit can have this name.
        if counted is None or counted[0] != limit or now - counted[1] >= COUNT_INTERVAL:
            machines = ((agent.scope, agent.names or (agent.name,)) for agent in self)
            counted = limit, now, count_selected_machines(limit, machines)
            self._counts[limit.name] = counted
        return counted[2]

    def can_agent_execute_order(self, agent: Agent, now: datetime) -> bool:
        """Whether an agent can execute an order: it pulses and reads, and its clock is right."""
        return (
            agent.last_pulse is not None
            and now - agent.last_pulse <= FRESH_FOR
            and agent.clock_offset is not None
            and not agent.is_clock_wrong
            and agent.poll_age is not None
            and agent.poll_age <= MAX_POLL_AGE
        )
