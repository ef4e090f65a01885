"""Sends the agents of each scope what the hub knows about it: a `HubScopeState`.

All agents of a scope see the same events. A state names the CloudEvents that the hub has recorded
from one agent (`told`), so the others do not report copies. It names the events that some agents
reported as gone (`ending`): an agent that still sees one of them after it has read its document
again says so, and the event does not end. It also names the agents that have reported one of them
and did not say that it is gone (`awaited`): these always report its end. Each state also shows an
agent that the hub listens.

The hub calls `send_soon` when an event of a scope has changed or agents are awaited.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from relay.clock import Clock, wait_for_event
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.messages import MAX_AWAITED, MAX_ENDING, MAX_TOLD, HubScopeState
from relay.fleet.routing import hub_state_key
from relay.store import EventKeyFormat, RecordedEvent

STATE_INTERVAL = 60.0
"""Seconds between two states of a scope in which nothing happens."""
MIN_STATE_INTERVAL = 0.5
"""Seconds between two states of a scope in which much happens. Each goes to all of its agents."""
TOLD_FOR = 15.0
"""Seconds for which states name a recorded event. An agent withholds a copy for three at most."""
_IDLE_CHECK_INTERVAL = 5.0


class HubStateSender:
    """Sends a state to a scope soon after an event of it has changed, and else each minute."""

    def __init__(
        self,
        origin: Origin,
        keys: EventKeyFormat,
        clock: Clock,
        send: Callable[[str, CloudEvent], None],
        ending_event_ids: Callable[[str], Sequence[str]],
        agents_awaited_in: Callable[[str], Sequence[str]],
    ) -> None:
        """``send`` publishes with a routing key; a state may be lost.

        ``ending_event_ids`` returns the EventIds of a scope that may have ended,
        ``agents_awaited_in`` the agents that still show one of them.
        """
        self._origin = origin
        self._keys = keys
        self._clock = clock
        self._send = send
        self._ending_event_ids = ending_event_ids
        self._agents_awaited_in = agents_awaited_in
        self._told: dict[str, deque[tuple[float, str]]] = {}
        self._sent_at: dict[str, float] = {}
        self._due: set[str] = set()
        self._wake = asyncio.Event()

    def remember_recorded_event_ids(self, events: Sequence[RecordedEvent]) -> None:
        """Remember the ids of events that were recorded."""
        now = self._clock.monotonic()
        for event in events:
            scope = (
                self._keys.scope_of_key(event.event_key) if event.event_key is not None else None
            )
            if scope is not None and event.name.startswith("event."):
                self._told.setdefault(scope, deque(maxlen=MAX_TOLD)).append((now, event.id))

    def send_soon(self, scope: str) -> None:
        """Send a state to the agents of a scope soon."""
        if self._is_send_interval_over(scope, self._clock.monotonic()):
            self._send_now(scope)
        else:
            self._due.add(scope)
            self._wake.set()

    async def run(self, scopes: Callable[[], Iterable[str]]) -> NoReturn:
        """Send what is due until cancelled. ``scopes`` returns those that have agents."""
        while True:
            self._wake.clear()
            now, known = self._clock.monotonic(), set(scopes())
            for scope in [scope for scope in self._due if self._is_send_interval_over(scope, now)]:
                self._due.discard(scope)
                self._send_now(scope)
            for scope in known:
                if now - self._sent_at.get(scope, now - STATE_INTERVAL) >= STATE_INTERVAL:
                    self._send_now(scope)
            for scope in self._sent_at.keys() - known:
                del self._sent_at[scope]
            if self._due:
                await self._clock.sleep(MIN_STATE_INTERVAL / 5)
            else:
                await wait_for_event(self._wake, self._clock, _IDLE_CHECK_INTERVAL)

    def _is_send_interval_over(self, scope: str, now: float) -> bool:
        sent_at = self._sent_at.get(scope)
        return sent_at is None or now - sent_at >= MIN_STATE_INTERVAL

    def _send_now(self, scope: str) -> None:
        now, at = self._clock.monotonic(), self._clock.now()
        self._sent_at[scope] = now
        state = HubScopeState(
            hub_time=at,
            told=self._recently_recorded_event_ids(scope, now),
            ending=tuple(self._ending_event_ids(scope))[:MAX_ENDING],
            awaited=tuple(self._agents_awaited_in(scope))[:MAX_AWAITED],
        )
        self._send(hub_state_key(scope), state.to_event(self._origin, at))

    def _recently_recorded_event_ids(self, scope: str, now: float) -> tuple[str, ...]:
        told = self._told.get(scope, deque())
        while told and now - told[0][0] > TOLD_FOR:
            told.popleft()
        if not told:
            self._told.pop(scope, None)
        return tuple(event_id for _, event_id in told)
