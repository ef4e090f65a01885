"""Merges what agents say about events, and records what is new.

A `AgentWordAboutEvent` is what one agent says about one event. `relay.fleet.hub.merge` makes the
history of the event and at most one `News` of it. Each `News` becomes an
`EventSighting` or `EventDeparture`, from which `Recorder` records an ``event.*``, as it does for
what a poller sees.

One batch is merged and recorded after the other. A batch changes the memory only after the state
file has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NoReturn

from relay.clock import Clock, wait_for_event
from relay.errors import StoreUnavailable
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.hub.histories import (
    EventHistoryCache,
    EventName,
    changed_last_words_by_agent,
    read_histories,
    read_stored_live_event_names,
    sighting_row_from_last_word,
)
from relay.fleet.hub.merge import (
    EventEnded,
    EventHistory,
    GoneFromDocument,
    IsFresh,
    News,
    Word,
    apply_word_to_history,
    end_check_due_at,
    end_if_still_gone,
    forget_agent,
    wait_again_for_agents,
)
from relay.ingest import EventDeparture, EventSighting, Recorder
from relay.store import EventKeyFormat
from relay.store.fleet import SightingRow
from relay.store.sqlite import Store
from relay.store.transaction import Transaction

MAX_WORDS = 1_000
"""Words that are merged together. Their events must fit into the memory at the same time."""
RETRY_DELAY = 1.0
"""Seconds until work is tried again that the state file refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWordAboutEvent:
    """A word of an agent about an event. ``incarnation`` is that of the agent's document.

    ``observed_at`` and ``seen`` are as in `relay.fleet.hub.merge`.
    """

    name: EventName
    relay: str
    word: Word
    observed_at: datetime
    seen: datetime
    incarnation: int | None = None
    is_report: bool = False
    """Whether a report said so, not a pulse."""


@dataclass(slots=True)
class _UnsavedMerges:
    """New histories, and what is to be recorded because of them."""

    histories: dict[EventName, EventHistory] = field(default_factory=dict)
    news: list[EventSighting | EventDeparture] = field(default_factory=list)
    relay_events: Sequence[CloudEvent] = ()
    forgotten: tuple[str, str] | None = None
    """The scope and relay word of an agent that is gone for good."""

    def add_merge_result(
        self,
        name: EventName,
        history: EventHistory,
        news: News | None,
        incarnation: int | None = None,
    ) -> None:
        """Add the result of one merge."""
        self.histories[name] = history
        scope, event_id = name
        match news:
            case None:
                pass
            case EventEnded():
                self.news.append(
                    EventDeparture(scope, news.seen, event_id, news.gap, news.rebooted)
                )
            case _:
                self.news.append(EventSighting(scope, news.seen, news.event, incarnation))


class EventMerger:
    """The histories of all events of the fleet, and the way from them into the store."""

    def __init__(
        self,
        origin: Origin,
        store: Store,
        keys: EventKeyFormat,
        clock: Clock,
        histories: EventHistoryCache,
        *,
        freshness: Callable[[str, datetime], IsFresh],
        listens: Callable[[datetime], bool],
        ask_scope: Callable[[str], None],
        on_ended: Callable[[EventName], None],
    ) -> None:
        """``freshness`` returns for a scope and a time which agents are fresh.

        ``listens`` says whether agents can be heard now.
        ``ask_scope`` gets each scope of which an event may have ended: its agents are asked.
        ``on_ended`` gets each event that has ended, once that is recorded.
        """
        self.copies = 0
        """Reports that said nothing new."""
        self._histories = histories
        self._store = store
        self._keys = keys
        self._clock = clock
        self._freshness = freshness
        self._listens = listens
        self._ask_scope = ask_scope
        self._on_ended = on_ended
        self._recorder = Recorder(origin, None, None)
        self._lock = asyncio.Lock()
        self._timer_wake = asyncio.Event()
        self._must_wait_again = False

    async def load(self) -> None:
        """Read the histories of the events that have not ended."""
        stored = await self._store.read(
            lambda tx: read_histories(tx, read_stored_live_event_names(tx))
        )
        for name, history in stored.items():
            self._histories.put(name, history)

    async def merge_received(
        self,
        heard: Sequence[AgentWordAboutEvent],
        relay_events: Sequence[CloudEvent] = (),
        *,
        only_quiet: bool = False,
    ) -> list[AgentWordAboutEvent]:
        """Merge words, and record what is new, and what agents report about themselves.

        ``only_quiet``: leave out the words that would tell something new, or that say gone, and
        return these.
        """
        others: list[AgentWordAboutEvent] = []
        for first in range(0, max(len(heard), 1), MAX_WORDS):
            part = heard[first : first + MAX_WORDS]
            others += await self._merge_batch_of_words(
                part, () if first else relay_events, only_quiet=only_quiet
            )
        return others

    async def _merge_batch_of_words(
        self,
        heard: Sequence[AgentWordAboutEvent],
        relay_events: Sequence[CloudEvent],
        *,
        only_quiet: bool,
    ) -> list[AgentWordAboutEvent]:
        others: list[AgentWordAboutEvent] = []
        async with self._lock:
            await self._load_missing_histories({word.name for word in heard})
            now, batch = self._clock.now(), _UnsavedMerges(relay_events=relay_events)
            for word in heard:
                before = batch.histories.get(word.name) or self._histories.get(word.name)
                after, news = apply_word_to_history(
                    before,
                    word.relay,
                    word.word,
                    word.observed_at,
                    now,
                    self._freshness(word.name[0], now),
                    seen=word.seen,
                )
                if (
                    only_quiet
                    and after is not before
                    and (news or isinstance(word.word, GoneFromDocument))
                ):
                    others.append(word)
                    continue
                self.copies += word.is_report and news is None
                if after is not None:
                    batch.add_merge_result(word.name, after, news, word.incarnation)
            await self._write(batch)
        return others

    async def forget_agent(
        self, scope: str, relay: str, on_forgotten: Callable[[], None], *, is_last: bool
    ) -> None:
        """Remove an agent that is gone for good. With the last of a scope, its events end."""
        async with self._lock:
            now, batch = self._clock.now(), _UnsavedMerges(forgotten=(scope, relay))
            for event_id, history in self._histories.histories_in_memory_of_scope(scope).items():
                after, news = forget_agent(history, relay, now, is_last=is_last)
                batch.add_merge_result((scope, event_id), after, news)
            on_forgotten()
            await self._write(batch)

    def restart_end_waits(self) -> None:
        """Let the agents that disagree about an end have their time again: nobody heard them."""
        self._must_wait_again = True
        self._timer_wake.set()

    async def end_events_when_due(self) -> NoReturn:
        """End the events whose agents agree, or have had their time to disagree."""
        while True:
            self._timer_wake.clear()
            async with self._lock:
                if self._must_wait_again:
                    self._must_wait_again = False
                    self._restart_disputed_waits(self._clock.now())
                next_due = await self._end_due_events(self._clock.now())
            seconds = None
            if next_due is not None:
                seconds = max(0.0, (next_due - self._clock.now()).total_seconds())
            await wait_for_event(self._timer_wake, self._clock, seconds)

    def _restart_disputed_waits(self, now: datetime) -> None:
        batch = _UnsavedMerges()
        for name, history in self._histories.live():
            batch.add_merge_result(name, wait_again_for_agents(history, now), None)
        self._take_merge_results_into_memory(batch)
        for scope in {scope for scope, _ in self._histories.ending}:
            self._ask_scope(scope)

    async def _end_due_events(self, now: datetime) -> datetime | None:
        """Apply the timers that are due. Return when the next is due.

        None is due while nobody can be heard: agents could not say that an event is still there.
        `restart_end_waits` follows.
        """
        batch, due = _UnsavedMerges(), []
        if not self._listens(now):
            return None
        for name in self._histories.ending:
            history = self._histories.get(name)
            if history is None:
                continue
            after, news = end_if_still_gone(history, now, self._freshness(name[0], now))
            if after is not history:
                batch.add_merge_result(name, after, news)
            moment = end_check_due_at(after)
            if moment is not None:
                due.append(moment)
        if batch.histories:
            await self._write(batch)
        return min(due, default=None)

    async def _write(self, batch: _UnsavedMerges) -> None:
        """Store the result of a merge, then take it into the memory."""
        sightings = list(self._changed_sighting_rows(batch))
        if not (sightings or batch.news or batch.relay_events or batch.forgotten):
            self._take_merge_results_into_memory(batch)
            return
        now = self._clock.now()

        def work(tx: Transaction) -> None:
            self._recorder.record_observations(tx, batch.news, now)
            for event in batch.relay_events:
                attributes = {**event.attributes, "journalhead": str(tx.head())}
                tx.record(CloudEvent.build(attributes, event.data), now)
            tx.fleet.save_sightings(sightings)
            if batch.forgotten is not None:
                tx.fleet.forget_agent(*batch.forgotten)

        await self._transact_until_store_available(
            work, lambda: self._take_merge_results_into_memory(batch)
        )

    def _take_merge_results_into_memory(self, batch: _UnsavedMerges) -> None:
        """Take the result of a merge into the memory. Ask about events that may have ended now."""
        was_ending = frozenset(self._histories.ending)
        for name, history in batch.histories.items():
            self._histories.put(name, history)
        self._histories.evict_surplus_ended_events()
        for scope in {scope for scope, _ in self._histories.ending - was_ending}:
            self._ask_scope(scope)
        for news in batch.news:
            if isinstance(news, EventDeparture):
                self._on_ended((news.scope, news.lowercase_event_id))
        if self._histories.ending:
            self._timer_wake.set()

    def _changed_sighting_rows(self, batch: _UnsavedMerges) -> Iterable[SightingRow]:
        for name, after in batch.histories.items():
            for relay, word in changed_last_words_by_agent(
                self._histories.get(name), after
            ).items():
                yield sighting_row_from_last_word(self._keys.make_key(*name), relay, word)

    async def _transact_until_store_available(
        self, work: Callable[[Transaction], None], then: Callable[[], None]
    ) -> None:
        """Run work in the store, then ``then``. Repeat it while the store is unavailable.

        Sinks are told even if the state file cannot be written (``fail_open``). A cancellation
        waits for the store. Otherwise the memory would lack what the state file has, and messages
        that come again would be news.
        """
        cancellation: asyncio.CancelledError | None = None
        while cancellation is None:
            done = self._store.submit(work, fail_open=True)
            while not done.done():
                try:
                    await asyncio.wait([done])
                except asyncio.CancelledError as error:
                    cancellation = error
            if not isinstance(done.exception(), StoreUnavailable):
                done.result()
                then()
                break
            if cancellation is None:
                await self._clock.sleep(RETRY_DELAY)
        if cancellation is not None:
            raise cancellation

    async def _load_missing_histories(self, names: set[EventName]) -> None:
        missing = self._histories.event_names_to_load(names)
        while missing:
            try:
                stored = await self._store.read(lambda tx: read_histories(tx, missing))
            except StoreUnavailable:
                await self._clock.sleep(RETRY_DELAY)
                continue
            for name, history in stored.items():
                self._histories.put(name, history)
            return
