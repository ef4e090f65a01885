"""The histories of events that the hub merges, in memory, and how they come from the state file.

The state file has what each agent last said (`relay.store.fleet`) and what was told about each
event (the journal). So a hub that restarts goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from relay.events.cloudevent import CloudEvent
from relay.events.model import ScheduledEvent
from relay.events.timestamps import parse_timestamp
from relay.fleet.hub.merge import EventHistory, LastWord, restore_history
from relay.store.fleet import AgentRow, SightingRow
from relay.store.rows import PageLimit
from relay.store.transaction import Transaction

MAX_ENDED = 10_000
"""Events that ended and are kept in memory. The others are read again when somebody names them."""
_MAX_CHANGES = 1_000
"""Changes of one event that are read. Azure makes a handful."""
_MAX_CHANGES_BYTES = 64 * 1024 * 1024
"""Bytes of them. The places of agents count from the first change, so none may be left out."""

EventName = tuple[str, str]
"""A scope, and an EventId in lower case."""


class EventHistoryCache:
    """The histories by scope and EventId."""

    def __init__(self) -> None:
        self._by_scope: dict[str, dict[str, EventHistory]] = {}
        self._unknown: set[EventName] = set()
        """The events of which nobody has told."""
        self._ended: dict[EventName, None] = {}
        """Those that ended or are unknown, the longest unused first."""
        self.ending: set[EventName] = set()
        """The events of which some agent said that they are gone, and that have not ended yet."""

    def event_names_to_load(self, names: Iterable[EventName]) -> set[EventName]:
        """Return the events that must be read from the state file first."""
        return {
            name
            for name in names
            if name[1] not in self._by_scope.get(name[0], {}) and name not in self._unknown
        }

    def get(self, name: EventName) -> EventHistory | None:
        """Return the history of an event; None if no agent has reported it.

        The caller has loaded what `event_names_to_load` returned.
        """
        return None if name in self._unknown else self._by_scope[name[0]][name[1]]

    def put(self, name: EventName, history: EventHistory | None) -> None:
        """Keep a history."""
        self._ended.pop(name, None)
        if history is None:
            self._unknown.add(name)
        else:
            self._unknown.discard(name)
            self._by_scope.setdefault(name[0], {})[name[1]] = history
        if history is not None and history.is_ending:
            self.ending.add(name)
        else:
            self.ending.discard(name)
        if history is None or history.ended_at is not None:
            self._ended[name] = None

    def evict_surplus_ended_events(self) -> None:
        """Drop the longest unused of too many events that ended, while no merge needs them."""
        while len(self._ended) > MAX_ENDED:
            self._drop_ended_event(next(iter(self._ended)))

    def histories_in_memory_of_scope(self, scope: str) -> Mapping[str, EventHistory]:
        """Return the histories of a scope that are in memory, by EventId. `put` changes them."""
        return self._by_scope.get(scope, {})

    def live(self) -> Iterator[tuple[EventName, EventHistory]]:
        """Yield the events that have not ended."""
        for scope in list(self._by_scope):
            for key, history in list(self.histories_in_memory_of_scope(scope).items()):
                if history.ended_at is None:
                    yield (scope, key), history

    def ending_event_ids(self, scope: str) -> list[str]:
        """Return the EventIds of a scope that may have ended."""
        return sorted(key for of_scope, key in self.ending if of_scope == scope)

    def _drop_ended_event(self, name: EventName) -> None:
        del self._ended[name]
        if name in self._unknown:
            self._unknown.discard(name)
            return
        of_scope = self._by_scope[name[0]]
        del of_scope[name[1]]
        if not of_scope:
            del self._by_scope[name[0]]


def read_histories(
    tx: Transaction, names: Collection[EventName]
) -> dict[EventName, EventHistory | None]:
    """Work for the store: return what it holds about each of these events; None: nothing."""
    keys = {tx.keys.make_key(scope, event_id): (scope, event_id) for scope, event_id in names}
    sightings = tx.fleet.sightings(list(keys))
    # Of most events that are asked for, nobody has said anything yet. A fleet has many agents.
    known = tx.fleet.agents() if sightings else []
    agents = {(agent.scope, agent.relay): agent for agent in known}
    words: dict[str, dict[str, LastWord]] = {}
    for row in sightings:
        agent = agents.get((keys[row.event_key][0], row.relay))
        words.setdefault(row.event_key, {})[row.relay] = _last_word_from_row(row, agent)
    return {
        name: restore_history(_read_recorded_changes(tx, key), words.get(key, {}))
        for key, name in keys.items()
    }


def read_stored_live_event_names(tx: Transaction) -> list[EventName]:
    """Work for the store: return the events that are in the document of some scope."""
    return [
        (occurrence.scope, occurrence.event.lowercase_event_id)
        for occurrence in tx.occurrences.live_occurrences()
    ]


def sighting_row_from_last_word(event_key: str, relay: str, word: LastWord) -> SightingRow:
    """Return the row of an agent's last word."""
    return SightingRow(
        event_key=event_key,
        relay=relay,
        state=word.state,
        place=word.place,
        at=word.at,
        seen=word.seen,
        rebooted=word.rebooted,
        gap=word.gap,
    )


def changed_last_words_by_agent(
    before: EventHistory | None, after: EventHistory
) -> Mapping[str, LastWord]:
    """Return the words that say something new. A word that was only repeated is not stored."""
    old = before.words if before is not None else {}
    return {
        relay: word
        for relay, word in after.words.items()
        if old.get(relay) is not word
        and (relay not in old or replace(old[relay], at=word.at, seen=word.seen) != word)
    }


def _last_word_from_row(row: SightingRow, agent: AgentRow | None) -> LastWord:
    seen = row.seen
    if row.state is not None and agent is not None and agent.last_pulse is not None:
        # A pulse repeats what the agent sees, and that is not stored.
        seen = max(seen, agent.last_pulse - timedelta(seconds=agent.poll_age or 0.0))
    return LastWord(
        state=row.state,
        place=row.place,
        at=row.at,
        seen=seen,
        rebooted=row.rebooted,
        gap=row.gap,
    )


def _read_recorded_changes(
    tx: Transaction, event_key: str
) -> Iterator[tuple[ScheduledEvent, datetime] | datetime]:
    for event in tx.journal.newest_changes_since(
        event_key, "", PageLimit(_MAX_CHANGES, _MAX_CHANGES_BYTES)
    ):
        at = _require_cloudevent_time(event)
        yield (
            at
            if event.name == "event.ended"
            else (ScheduledEvent.from_cloudevent_data(event.data), at)
        )


def _require_cloudevent_time(event: CloudEvent) -> datetime:
    moment = parse_timestamp(event.attributes["time"])
    if moment is None:
        raise ValueError(f"expected a time in the event {event.id} of the journal")
    return moment
