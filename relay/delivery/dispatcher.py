"""One worker per sink: hands them what was recorded, and carries out what operators ask of a sink."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from relay.clock import Clock
from relay.delivery.routing import wants
from relay.delivery.settlement import SettlementBatcher
from relay.delivery.sink_reports import ReportRelayEvent
from relay.delivery.worker import Worker
from relay.outbox import Entry, AttemptOutcome, RecordedEvent, SinkState
from relay.outbox.deliveries import DeadLetterFilter
from relay.outbox.sqlite import Store
from relay.outbox.transaction import Transaction
from relay.sinks import Sink, SinkSettings


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """How a sink is, for health, metrics and people."""

    name: str
    kind: str
    state: SinkState
    failing: bool
    reason: str | None
    waiting: int
    tries: Mapping[tuple[AttemptOutcome, int | None], int]
    """By outcome and status of the far side, since the start."""


class Dispatcher:
    """The workers. What is written to the store while ``start`` looks into it is handed over once, too."""

    def __init__(
        self,
        sinks: Mapping[str, tuple[SinkSettings, Sink]],
        store: Store,
        clock: Clock,
        say: ReportRelayEvent,
    ) -> None:
        self._store = store
        self._clock = clock
        self._books = SettlementBatcher(store)
        self._workers = {
            name: Worker(settings, sink, store, self._books, clock, say)
            for name, (settings, sink) in sinks.items()
        }
        self._early: list[Entry] | None = []  # recorded before it is known what waited

    async def start(self) -> None:
        """Take up what waits in the store, and listen for more.

        A sink that was not there before is told every live event; what waits for one that is gone is parked.
        """
        settings = [worker.settings for worker in self._workers.values()]
        now = self._clock.now()
        # Sinks are connected already, and a chat has messages looked at again by itself.
        self._store.listeners.recorded.append(self._on_recorded)
        self._store.listeners.redelivered.append(self._on_revived)
        states = await self._store.transact(
            lambda tx: _reconcile(tx, settings, now), fail_open=True
        )
        for name, (state, reason) in states.items():
            self._workers[name].set_state(state, reason)
        waiting = await self._store.read(lambda tx: tx.deliveries.waiting())
        early, self._early = self._early or [], None
        known = {entry.id for entry in waiting}
        self._hand_over([*waiting, *(entry for entry in early if entry.id not in known)])

    async def run(self) -> None:
        """Deliver until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers.values():
                    group.create_task(worker.run(), name=f"sink {worker.settings.name}")
        finally:
            self._books.close()

    async def drain(self) -> None:
        """Return when everything that can be sent now was sent."""
        while not all(worker.is_idle for worker in self._workers.values()):
            await self._clock.sleep(0.02)

    def status(self) -> list[SinkStatus]:
        """Every sink, in the order of the configuration."""
        return [
            SinkStatus(
                name,
                worker.settings.kind,
                worker.state,
                worker.is_failing,
                worker.reason,
                worker.waiting,
                worker.tries,
            )
            for name, worker in self._workers.items()
        ]

    def worker(self, name: str) -> Worker:
        """The worker of a sink. Raises KeyError for an unknown one."""
        return self._workers[name]

    async def set_state(self, name: str, state: SinkState, reason: str | None) -> None:
        """Pause, or resume, a sink; remembered. Raises KeyError for an unknown one, StoreUnavailable."""
        worker = self._workers[name]
        await self._store.transact(lambda tx: tx.deliveries.set_sink_state(name, state, reason))
        worker.set_state(state, reason)

    def _on_recorded(self, recorded: Sequence[RecordedEvent]) -> None:
        entries = [entry for one in recorded for entry in one.entries]
        if self._early is not None:
            self._early += entries
        else:
            self._hand_over(entries)

    def _on_revived(self, entries: Sequence[Entry]) -> None:
        if self._early is not None:
            self._early += entries
            return
        for entry in entries:
            if entry.sink in self._workers:
                # A redelivery starts afresh: old tries do not count against it.
                self._workers[entry.sink].redeliver([replace(entry, attempts=0)])

    def _hand_over(self, entries: Iterable[Entry]) -> None:
        by_sink: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            by_sink[entry.sink].append(entry)
        for name, mine in by_sink.items():
            if name in self._workers:
                self._workers[name].add_entries(mine)


def redeliver(entry: int, at: datetime) -> Callable[[Transaction], bool]:
    """Work for the store: a dead letter goes out again. False where there is none for a sink that is still there."""

    def work(tx: Transaction) -> bool:
        revived = tx.deliveries.redeliver(entry, at)
        if revived is not None:
            tx.redelivered.append(revived)
        return revived is not None

    return work


def redeliver_matching(
    which: DeadLetterFilter, at: datetime, *, after: int, until: datetime, limit: int
) -> Callable[[Transaction], tuple[list[int], int]]:
    """Work for the store: so many dead letters go out again, the oldest first; returns their ids, and how many are left."""

    def work(tx: Transaction) -> tuple[list[int], int]:
        revived = tx.deliveries.redeliver_matching(which, at, after=after, until=until, limit=limit)
        tx.redelivered.extend(revived)
        ids = [entry.id for entry in revived]
        return ids, tx.deliveries.count_dead_letters(
            which, after=max(ids, default=after), until=until
        )

    return work


def _reconcile(
    tx: Transaction, settings: Sequence[SinkSettings], now: datetime
) -> dict[str, tuple[SinkState, str | None]]:
    """Compare the sinks of the configuration with those of the last start; returns the states of the former."""
    known = tx.deliveries.sink_states()
    names = {sink.name for sink in settings}
    for gone in (known.keys() | {entry.sink for entry in tx.deliveries.waiting()}) - names:
        tx.deliveries.remove_sink(
            gone, f"the sink {gone} is not in the configuration any more", now
        )
    for sink in settings:
        if sink.name in known:
            continue
        tx.deliveries.set_sink_state(sink.name, "on")
        for occurrence in tx.snapshot.live():
            position = tx.journal.last_change_position(occurrence.key)
            if position is not None and wants(sink, tx.journal.event(position)):
                tx.add_entry(position, sink.name, now)
    return {sink.name: known.get(sink.name, ("on", None)) for sink in settings}
