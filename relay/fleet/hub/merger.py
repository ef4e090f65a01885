"""Merges what agents say about events, and records what is new.

`relay.fleet.hub.merge` makes the history of an event of a word, and says whether the word is news.
News become `EventNews`, from which `Recorder` records an ``event.*``, as for what a poller sees.

The histories of the events that have not ended are in memory. The state file has what each agent
last said (`relay.store.fleet`) and what was told about each event (the journal). So a hub that
restarts goes on where it stopped. One batch is merged and recorded after the other. If the state
file may not have it, the memory is read again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import NoReturn

from relay.clock import Clock
from relay.errors import DeliveryError, StoreUnavailable
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.events.model import ScheduledEvent
from relay.events.timestamps import parse_timestamp
from relay.fleet.hub.link import HubLink
from relay.fleet.hub.merge import (
    EventHistory,
    LastWord,
    MergeResult,
    Word,
    apply_word,
    end_if_still_gone,
    forget_agent,
    restore_history,
    wait_again,
    words_of_pulse,
)
from relay.fleet.hub.roster import Agent, Roster
from relay.fleet.messages import MAX_ASKED, PulseRequest
from relay.fleet.routing import scope_key
from relay.ingest import EventNews, Recorder
from relay.store import EventKeyFormat, TrackedEvent
from relay.store.fleet import AgentRow, SightingRow
from relay.store.rows import PageLimit
from relay.store.sqlite import Store
from relay.store.transaction import Transaction

MAX_ENDED = 10_000
"""Events that ended and are kept in memory. The others are read again when somebody names them."""
MAX_WORDS = 1_000
"""Words that are merged together. Their events must fit into the memory at the same time."""
END_INTERVAL = 0.5
"""Seconds between two looks at what ends, and so between two requests to all agents of a scope."""
RETRY_DELAY = 1.0
"""Seconds until work is tried again that the state file refused."""
KEYS = EventKeyFormat(with_scope=True)

_log = logging.getLogger(__name__)

EventName = tuple[str, str]
"""A scope, and an EventId in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What an agent saw at one time: one word of a report, or all events of its document.

    ``words`` are by EventId in lower case. ``incarnation`` is that of the document.
    """

    scope: str
    relay: str
    seen: datetime
    words: Mapping[str, Word]
    is_document: bool
    incarnation: int | None = None


@dataclass(slots=True)
class _Batch:
    news: list[EventNews] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    words: dict[tuple[str, str], SightingRow] = field(default_factory=dict)
    """By the key of the event and the agent: what it said last, if that is new or a report."""


class EventMerger:
    """The histories of all events of the fleet, and the way from them into the store.

    The ``roster`` knows which agents are fresh, and whether they can be heard. Over the ``link`` it
    asks the agents of a scope whether events are still there.
    """

    def __init__(
        self, origin: Origin, store: Store, clock: Clock, roster: Roster, link: HubLink
    ) -> None:
        self.copies = 0
        """Reports that said nothing new: other agents had said it before."""
        self.completed: list[TrackedEvent] = []
        """Events that Azure has carried out and that have ended. `Hub` takes them out."""
        self._by_scope: dict[str, dict[str, EventHistory]] = {}
        self._over: dict[EventName, None] = {}
        """Those of them that have ended, the longest unused first."""
        self._ending: set[EventName] = set()
        """Those of which some agent said that they are gone, and that have not ended yet."""
        self._unasked: set[str] = set()
        """Scopes in which an event may have ended, and whose agents must be asked."""
        self._store = store
        self._clock = clock
        self._roster = roster
        self._link = link
        self._origin = origin
        self._recorder = Recorder(origin, None, None)
        self._lock = asyncio.Lock()
        self._must_load = True

    async def load(self) -> None:
        """Read what the state file has. The roster must be read before."""
        stored = await self._store.read(lambda tx: self._read_histories(tx, _live_events(tx)))
        self._by_scope, self._over, self._ending = {}, {}, set()
        for name, history in stored.items():
            self._put(name, wait_again(history, self._clock.now()))
        self._must_load = False

    def history(self, scope: str, event_id: str) -> EventHistory | None:
        return self._by_scope.get(scope, {}).get(event_id)

    def agents_showing(self, scope: str, event_id: str) -> frozenset[str]:
        """Return the agents whose last word is the current state of an event: they can act on it.

        The EventId is in lower case, and the agents are named by their relay words.
        """
        history = self.history(scope, event_id)
        if history is None:
            return frozenset()
        words = history.words.items()
        return frozenset(agent for agent, word in words if word.state == history.told[-1])

    async def merge(self, heard: Sequence[Heard], relay_events: Sequence[CloudEvent] = ()) -> None:
        """Merge what agents said, and record what is new, and what they report about themselves."""
        batch: list[Heard] = []
        for each in heard:
            if batch and sum(len(one.words) for one in batch) + len(each.words) > MAX_WORDS:
                await self._merge(batch, ())
                batch = []
            batch.append(each)
        await self._merge(batch, relay_events)

    async def _merge(self, heard: Sequence[Heard], relay_events: Sequence[CloudEvent]) -> None:
        async with self._lock:
            await self._load_missing({(each.scope, name) for each in heard for name in each.words})
            # Whoever is cancelled does not know what the state file has: it is read again.
            self._must_load = True
            now, batch = self._clock.now(), _Batch()
            for each in heard:
                self._apply(each, now, batch)
            await self._write(batch, relay_events)

    def _apply(self, heard: Heard, now: datetime, batch: _Batch) -> None:
        scope, fresh = heard.scope, partial(self._roster.may_speak, heard.scope, now)
        words = heard.words
        if heard.is_document:
            words = words_of_pulse(heard.relay, words, self._by_scope.get(scope, {}))
        for event_id, word in words.items():
            before = self.history(scope, event_id)
            after, news = apply_word(before, heard.relay, word, heard.seen, now, fresh)
            reporter = None if heard.is_document else heard.relay
            self.copies += reporter is not None and news is None
            if after is not None:
                self._take((scope, event_id), (after, news), batch, heard.incarnation, reporter)

    def _take(
        self,
        name: EventName,
        result: MergeResult,
        batch: _Batch,
        incarnation: int | None = None,
        reporter: str | None = None,
    ) -> None:
        """Take a result into the memory and the batch.

        What a pulse only repeats is not stored. The word of a ``reporter`` is: it can come again.
        """
        (scope, event_id), (after, news) = name, result
        before = self.history(scope, event_id)
        old, key = before.words if before is not None else {}, KEYS.make_key(scope, event_id)
        self._put(name, after)
        for relay, word in after.words.items():
            known = old.get(relay)
            if known is word:
                continue
            is_new = known is None or replace(known, seen=word.seen) != word
            if is_new or relay == reporter:
                batch.words[key, relay] = SightingRow(event_key=key, relay=relay, **asdict(word))
        if isinstance(news, ScheduledEvent):
            batch.news.append(EventNews(scope, after.told_at, event_id, news, incarnation))
        elif news is not None and after.ended_at is not None:
            batch.news.append(
                EventNews(scope, after.ended_at, event_id, gap=news.gap, rebooted=news.rebooted)
            )
            batch.ended.append(key)

    async def forget_agent(self, agent: Agent) -> None:
        """Remove an agent that is gone for good. With the last of a scope, its events end.

        One that is heard of while others are merged stays.
        """
        scope, relay = agent.scope, agent.relay
        async with self._lock:
            await self._load_missing(())
            known = self._roster.agent(scope, relay)
            if known is not None and known.last_heard > agent.last_heard:
                return
            _log.info("agent %s of scope %s is forgotten", relay, scope)
            self._roster.forget(agent)
            is_last = not self._roster.agents_of_scope(scope)
            self._must_load = True
            now, batch = self._clock.now(), _Batch()
            for event_id, history in list(self._by_scope.get(scope, {}).items()):
                result = forget_agent(history, relay, now, is_last=is_last)
                self._take((scope, event_id), result, batch)
            await self._write(batch, forgotten=(scope, relay))

    # --- ends

    def restart_end_waits(self) -> None:
        """Let the agents that disagree about an end have their time again: nobody heard them."""
        now = self._clock.now()
        for scope, histories in self._by_scope.items():
            for event_id, history in list(histories.items()):
                if history.ended_at is None:
                    self._put((scope, event_id), wait_again(history, now))
        self._unasked |= {scope for scope, _ in self._ending}

    async def end_events_when_due(self) -> NoReturn:
        """Ask about events that may have ended, and end them when nobody has shown them in time.

        None ends while nobody can be heard: agents could not say that it is still there. That can
        also wait in the queue behind much else.
        """
        while True:
            await self._clock.sleep(END_INTERVAL)
            scopes, self._unasked = self._unasked, set()
            for scope in scopes:
                await self._ask(scope)
            now = self._clock.now()
            ending = (self._by_scope[scope][event_id] for scope, event_id in self._ending)
            is_any_due = any(each.end_due_at and each.end_due_at <= now for each in ending)
            if is_any_due and self._roster.has_listened(now) and await self._link.has_read_all():
                async with self._lock:
                    await self._end_due_events(now)

    async def _ask(self, scope: str) -> None:
        if event_ids := sorted(name for of, name in self._ending if of == scope):
            request = PulseRequest(event_ids=tuple(event_ids[:MAX_ASKED]))
            event = request.to_event(self._origin, self._clock.now())
            try:
                await self._link.send(scope_key(scope), event)
            except DeliveryError as error:
                _log.debug("fleet: scope %s could not be asked: %s", scope, error.reason)

    async def _end_due_events(self, now: datetime) -> None:
        """End what was due before the broker was asked: what came later is read later."""
        await self._load_missing(())
        self._must_load = True
        batch = _Batch()
        for name in list(self._ending):
            scope, event_id = name
            fresh = partial(self._roster.may_speak, scope, now)
            unheard = partial(self._roster.may_yet_connect, scope, now)
            history = self._by_scope[scope][event_id]
            self._take(name, end_if_still_gone(history, now, fresh, unheard), batch)
        await self._write(batch)

    # --- memory and state file

    def _put(self, name: EventName, history: EventHistory) -> None:
        scope, event_id = name
        self._over.pop(name, None)
        self._by_scope.setdefault(scope, {})[event_id] = history
        if history.end_due_at is None:
            self._ending.discard(name)
        elif name not in self._ending:
            self._ending.add(name)
            self._unasked.add(scope)
        if history.ended_at is not None:
            self._over[name] = None

    async def _load_missing(self, names: Collection[EventName]) -> None:
        while True:
            try:
                if self._must_load:
                    await self.load()
                missing = {name for name in names if self.history(*name) is None}
                if missing:
                    found = await self._store.read(partial(self._read_histories, names=missing))
                    for name, history in found.items():
                        self._put(name, history)
            except StoreUnavailable:
                await self._clock.sleep(RETRY_DELAY)
            else:
                return

    def _read_histories(
        self, tx: Transaction, names: Collection[EventName]
    ) -> dict[EventName, EventHistory]:
        keys = {KEYS.make_key(scope, event_id): (scope, event_id) for scope, event_id in names}
        words: dict[str, dict[str, LastWord]] = {}
        for row in tx.fleet.sightings(list(keys)):
            agent = self._roster.agent(keys[row.event_key][0], row.relay)
            words.setdefault(row.event_key, {})[row.relay] = last_word(row, agent)
        found = {
            name: restore_history(_recorded_changes(tx, key), words.get(key, {}))
            for key, name in keys.items()
        }
        return {name: history for name, history in found.items() if history is not None}

    async def _write(
        self,
        batch: _Batch,
        relay_events: Sequence[CloudEvent] = (),
        forgotten: EventName | None = None,
    ) -> None:
        """Store the result. Sinks are told even if the file cannot be written (``fail_open``)."""
        now = self._clock.now()

        def work(tx: Transaction) -> list[TrackedEvent | None]:
            self._recorder.record_observations(tx, batch.news, now)
            for event in relay_events:
                attributes = {**event.attributes, "journalhead": str(tx.head())}
                tx.record(CloudEvent.build(attributes, event.data), now)
            tx.fleet.save_sightings(batch.words.values())
            if forgotten is not None:
                tx.fleet.forget_agent(*forgotten)
            return [tx.occurrences.find_newest_occurrence(key) for key in batch.ended]

        if batch.words or batch.news or relay_events or forgotten:
            while True:
                try:
                    ended = await self._store.transact(work, fail_open=True)
                    self.completed += [it for it in ended if it and it.outcome == "completed"]
                    break
                except StoreUnavailable:
                    await self._clock.sleep(RETRY_DELAY)
        self._must_load = False
        while len(self._over) > MAX_ENDED:  # not before: the batch named them
            scope, event_id = name = next(iter(self._over))
            del self._over[name], self._by_scope[scope][event_id]
            if not self._by_scope[scope]:
                del self._by_scope[scope]


def _live_events(tx: Transaction) -> list[EventName]:
    return [
        (occurrence.scope, occurrence.event.lowercase_event_id)
        for occurrence in tx.occurrences.live_occurrences()
    ]


def _recorded_changes(
    tx: Transaction, event_key: str
) -> Iterator[tuple[ScheduledEvent, datetime] | datetime]:
    limit = PageLimit(1_000, 64 * 1024 * 1024)  # Azure makes a handful of changes
    for event in tx.journal.newest_changes(event_key, limit):
        at = parse_timestamp(event.attributes["time"])
        if at is None:
            raise ValueError(f"expected a time in the event {event.id} of the journal")
        is_end = event.name == "event.ended"
        yield at if is_end else (ScheduledEvent.from_cloudevent_data(event.data), at)


def last_word(row: SightingRow, agent: AgentRow | None) -> LastWord:
    seen = row.seen
    if row.state is not None and agent is not None and agent.document_at is not None:
        # A pulse repeats what the agent sees, and that is not stored.
        seen = max(seen, agent.document_at)
    return LastWord(
        state=row.state, seen=seen, earlier=row.earlier, rebooted=row.rebooted, gap=row.gap
    )
