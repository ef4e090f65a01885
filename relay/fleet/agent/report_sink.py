"""Publishes what the agent recorded, and leaves out what the hub has from others.

All agents of a scope see the same document. An agent whose VM an event does not name waits a random
time for a state of the hub that names the event's id. So the hub gets few copies of each change.

The end of an event is an exception: the hub waits for it from each agent from which it has heard of
the event. So the sink remembers these events (`mark_end_must_be_reported`), and always reports
their end.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from relay.clock import Clock, wait_for_event
from relay.errors import Rejected, Superseded
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.events.names import relay_word
from relay.events.timestamps import parse_timestamp
from relay.fleet.messages import HubScopeState
from relay.fleet.routing import report_key
from relay.sinks import Receipt, SinkSettings

MAX_COPY_WAIT = 3.0
"""Seconds: the longest time that an agent waits for others to tell the hub first."""
COPY_WAIT_POWER = 1 / 3
"""Makes short waits rare: of many agents, few must wait less than the named VM needs to report."""
STATE_TIMEOUT = 150.0
"""Seconds without a state of the hub after which agents do not wait for one."""
MAX_REPORTED = 10_000
"""EventIds that an agent remembers to have reported."""

NamesThisVm = Callable[[Sequence[str]], bool]
"""Returns whether the resources of an event include this VM."""


class ReportSinkSettings(SinkSettings):
    """The settings of the sink that every agent has. They are not part of the configuration."""

    kind: Literal["hub"] = "hub"
    name: str = "hub"


class Publisher(Protocol):
    """How the sink reaches the hub."""

    async def publish(self, event: CloudEvent, key: str) -> None:
        """Return when a queue of the hub holds the event. Raises Deferred or Rejected."""


class ReportSink:
    """The sink of an agent: it publishes to the hub what the hub does not have yet.

    ``names_this_vm`` says whether resources include this VM. ``chance`` returns a random number in
    [0, 1).
    """

    concurrency = 64
    longest_pause = 5.0  # a try costs nothing while there is no connection
    give_up_after = math.inf  # a hub that is back gets the whole history

    def __init__(
        self,
        publisher: Publisher,
        origin: Origin,
        names_this_vm: NamesThisVm,
        clock: Clock,
        *,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._publisher = publisher
        self._origin = origin
        self._relay_word = relay_word(origin.relay)
        self._names_this_vm = names_this_vm
        self._clock = clock
        self._chance = chance
        self._told: frozenset[str] = frozenset()
        self._ending: frozenset[str] = frozenset()
        self._state_at: float | None = None  # monotonic
        self._listening_since = clock.monotonic()
        # The copies that wait, each with what ends its wait:
        self._copies: dict[str, tuple[CloudEvent, asyncio.Event]] = {}
        # The EventIds, in lower case, of which the hub has heard from this agent, oldest first:
        self._reported: dict[str, None] = {}

    def mark_listening_to_hub(self) -> None:
        """States of the hub arrive from now on."""
        self._listening_since = self._clock.monotonic()

    def remember_events_known_to_hub(self, state: HubScopeState) -> None:
        """Remember what the hub knows. It replaces what the hub said before."""
        self._told = frozenset(state.told)
        self._ending = frozenset(event_id.lower() for event_id in state.ending)
        if self._relay_word in state.awaited:
            # The hub has heard of one of these events from this agent, and does not say of which.
            for event_id in state.ending:
                self.mark_end_must_be_reported(event_id)
        self._state_at = self._clock.monotonic()
        for event, wait_is_over in self._copies.values():
            if (
                not self._may_be_reported_by_others(event)
                or self._reason_hub_knows_already(event) is not None
            ):
                wait_is_over.set()

    def mark_end_must_be_reported(self, event_id: str) -> None:
        """The hub hears of this event from this agent, so it must hear of its end too."""
        self._reported[event_id.lower()] = None
        if len(self._reported) > MAX_REPORTED:
            del self._reported[next(iter(self._reported))]

    async def deliver(self, event: CloudEvent) -> Receipt:
        """Return when the hub's queue has the event.

        Raises Superseded if the hub has it from another agent, Rejected if the hub takes no such
        event, and what `Publisher.publish` raises.
        """
        if not event.name.startswith(("event.", "relay.")):
            # A relay without a fleet recorded it here for a sink with the same name.
            raise Rejected("an agent reports no decisions: the hub makes them")
        if self._may_be_reported_by_others(event):
            await self._let_others_report_first(event)
        if event.name.startswith("event."):
            # Before the message is out: the hub may have it even if no confirm comes.
            self.mark_end_must_be_reported(_azure_event_id(event))
        await self._publisher.publish(event, report_key(event, self._origin))
        if event.name == "event.ended":
            self._reported.pop(_azure_event_id(event).lower(), None)
        return Receipt()

    def _may_be_reported_by_others(self, event: CloudEvent) -> bool:
        """Whether the hub may have the same from another agent of the scope."""
        if not event.name.startswith("event.") or self._names_this_vm(event.data["resources"]):
            return False
        # The hub waits for the end from each agent from which it has heard of the event.
        return event.name != "event.ended" or _azure_event_id(event).lower() not in self._reported

    async def _let_others_report_first(self, event: CloudEvent) -> None:
        """Return after a random time. Raises Superseded once the hub has the event."""
        if not self._hears_hub:
            return
        wait_is_over = asyncio.Event()
        self._copies[event.id] = event, wait_is_over
        try:
            reason = self._reason_hub_knows_already(event)
            seconds = self._seconds_to_wait_for_others(event)
            if reason is None and seconds > 0:
                await wait_for_event(wait_is_over, self._clock, seconds)
                reason = self._reason_hub_knows_already(event)
        finally:
            del self._copies[event.id]
        if reason is not None:
            raise Superseded(reason)

    def _seconds_to_wait_for_others(self, event: CloudEvent) -> float:
        """Return the seconds that this agent waits for others.

        They count from when the agent recorded the event and could hear the hub. So an event that
        waited for a place in the queue waits no longer here.
        """
        recorded = parse_timestamp(event.attributes["time"])
        now = self._clock.now()
        age = (now - recorded).total_seconds() if recorded is not None else 0.0
        listening = self._clock.monotonic() - self._listening_since
        wait = MAX_COPY_WAIT * math.pow(self._chance(), COPY_WAIT_POWER)
        return wait - max(0.0, min(age, listening))

    @property
    def _hears_hub(self) -> bool:
        """Whether a state of the hub came not long ago."""
        if self._state_at is None:
            return False
        return self._clock.monotonic() - self._state_at < STATE_TIMEOUT

    def _reason_hub_knows_already(self, event: CloudEvent) -> str | None:
        """Return how the hub knows of the event without this agent; None if it does not."""
        if event.id in self._told:
            return "the hub has it from another agent"
        if event.name == "event.ended" and _azure_event_id(event).lower() in self._ending:
            if not self._may_be_reported_by_others(event):
                return None  # the hub waits for the word of this agent
            return "the hub knows from another agent that the event is gone"
        return None


def _azure_event_id(event: CloudEvent) -> str:
    return str(event.data["eventId"])
