"""Runs one worker for each sink and hands them the recorded events.

It also carries out what operators ask of a sink: pause, resume, redeliver.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from relay.clock import Clock
from relay.delivery.circuit_breaker import CircuitState
from relay.delivery.result_recorder import ResultRecorder
from relay.delivery.routing import wants
from relay.delivery.worker import Worker
from relay.events.build import ReportRelayEvent
from relay.events.tracing import RecordSpan
from relay.histogram import Histogram
from relay.outbox import AttemptOutcome, Entry, EntryState, RecordedEvent, SinkState
from relay.outbox.deliveries import DeadLetterFilter
from relay.outbox.sqlite import Store
from relay.outbox.transaction import Transaction
from relay.sinks import Sink, SinkSettings

DRAIN_POLL_INTERVAL = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkStatus:
    """The status of a sink, for health, metrics and people.

    ``waiting`` counts its entries. ``tries`` counts tries since the start, by their outcome and the
    status of the receiver.
    """

    name: str
    kind: str
    state: SinkState
    failing: bool
    reason: str | None
    waiting: int
    tries: Mapping[tuple[AttemptOutcome, int | None], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkMeasurements:
    """What is measured of a sink beside its status, for the metrics.

    ``ends`` counts how entries ended since the start. ``oldest_age`` is that of the oldest waiting
    entry, in seconds; None if none waits.
    """

    circuit: CircuitState
    is_skewed: bool
    ends: Mapping[EntryState, int]
    try_seconds: Histogram
    oldest_age: float | None


class Dispatcher:
    """The workers of all sinks."""

    def __init__(
        self,
        sinks: Mapping[str, tuple[SinkSettings, Sink]],
        store: Store,
        clock: Clock,
        report: ReportRelayEvent,
        record_span: RecordSpan | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._results = ResultRecorder(store)
        self._workers = {
            name: Worker(settings, sink, store, self._results, clock, report, record_span)
            for name, (settings, sink) in sinks.items()
        }
        # Entries that arrive before `start` has read what waits; None after that.
        self._early_entries: list[Entry] | None = []

    async def start(self) -> None:
        """Read what waits in the store, and listen for new entries.

        A new sink gets an entry for every live event. The entries of a sink that is no longer
        configured become dead letters.
        """
        settings = [worker.settings for worker in self._workers.values()]
        now = self._clock.now()
        # Listen first: sinks are connected already, and a chat can request a redelivery.
        self._store.listeners.recorded.append(self._on_recorded)
        self._store.listeners.redelivered.append(self._on_redelivered)
        states = await self._store.transact(
            lambda tx: _reconcile_sinks(tx, settings, now), fail_open=True
        )
        for name, (state, reason) in states.items():
            self._workers[name].set_state(state, reason)
        waiting = await self._store.read(lambda tx: tx.deliveries.waiting())
        early_entries, self._early_entries = self._early_entries or [], None
        waiting_ids = {entry.id for entry in waiting}
        new = [entry for entry in early_entries if entry.id not in waiting_ids]
        self._add_entries([*waiting, *new])

    async def run(self) -> None:
        """Deliver until canceled."""
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers.values():
                    group.create_task(worker.run(), name=f"sink {worker.settings.name}")
        finally:
            self.flush_results()

    async def drain(self) -> None:
        """Return when everything that can be sent now was sent."""
        while not all(worker.is_idle for worker in self._workers.values()):
            await self._clock.sleep(DRAIN_POLL_INTERVAL)

    def flush_results(self) -> None:
        """Submit to the store what was delivered and waits for others to be recorded with."""
        self._results.flush()

    def status(self) -> list[SinkStatus]:
        """Return the status of every sink, in the order of the configuration."""
        return [
            SinkStatus(
                name=name,
                kind=worker.settings.kind,
                state=worker.health.state,
                failing=worker.health.circuit.is_failing,
                reason=worker.health.reason,
                waiting=worker.waiting,
                tries=worker.tries,
            )
            for name, worker in self._workers.items()
        ]

    def measure(self, name: str) -> SinkMeasurements:
        """Return what is measured of a sink. It reads every waiting entry.

        Raises KeyError if there is no such sink.
        """
        worker = self._workers[name]
        oldest = worker.oldest_waiting()
        age = None if oldest is None else (self._clock.now() - oldest).total_seconds()
        return SinkMeasurements(
            circuit=worker.health.circuit.state(self._clock.monotonic()),
            is_skewed=worker.health.is_skewed,
            ends=worker.ends,
            try_seconds=worker.try_seconds,
            oldest_age=None if age is None else max(0.0, age),
        )

    def worker(self, name: str) -> Worker:
        """Return the worker of a sink. Raises KeyError if there is no such sink."""
        return self._workers[name]

    async def set_state(self, name: str, state: SinkState, reason: str | None) -> None:
        """Pause or resume a sink, and store that.

        Raises KeyError if there is no such sink, StoreUnavailable if it cannot be stored.
        """
        worker = self._workers[name]
        await self._store.transact(lambda tx: tx.deliveries.set_sink_state(name, state, reason))
        worker.set_state(state, reason)

    def _on_recorded(self, events: Sequence[RecordedEvent]) -> None:
        entries = [entry for event in events for entry in event.entries]
        if self._early_entries is not None:
            self._early_entries += entries
        else:
            self._add_entries(entries)

    def _on_redelivered(self, entries: Sequence[Entry]) -> None:
        if self._early_entries is not None:
            self._early_entries += entries
            return
        for entry in entries:
            if entry.sink in self._workers:
                # Earlier attempts do not count against a redelivery.
                self._workers[entry.sink].redeliver(replace(entry, attempts=0))

    def _add_entries(self, entries: Iterable[Entry]) -> None:
        entries_by_sink: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            entries_by_sink[entry.sink].append(entry)
        for name, sink_entries in entries_by_sink.items():
            if name in self._workers:
                self._workers[name].add_entries(sink_entries)


def redeliver(entry_id: int, at: datetime) -> Callable[[Transaction], bool]:
    """Work for the store: redeliver a dead letter.

    The work returns False if there is no such dead letter or its sink no longer exists.
    """

    def work(tx: Transaction) -> bool:
        entry = tx.deliveries.redeliver(entry_id, at)
        if entry is not None:
            tx.redelivered.append(entry)
        return entry is not None

    return work


def redeliver_matching(
    dead_letters: DeadLetterFilter, at: datetime, *, after: int, until: datetime, limit: int
) -> Callable[[Transaction], tuple[list[int], int]]:
    """Work for the store: redeliver the oldest matching dead letters, at most ``limit``.

    The work returns their ids and how many are left. For ``after`` and ``until`` see
    `relay.outbox.deliveries.Deliveries.redeliver_matching`.
    """

    def work(tx: Transaction) -> tuple[list[int], int]:
        entries = tx.deliveries.redeliver_matching(
            dead_letters, at, after=after, until=until, limit=limit
        )
        tx.redelivered.extend(entries)
        ids = [entry.id for entry in entries]
        remaining = tx.deliveries.count_dead_letters(
            dead_letters, after=max(ids, default=after), until=until
        )
        return ids, remaining

    return work


def _reconcile_sinks(
    tx: Transaction, settings: Sequence[SinkSettings], now: datetime
) -> dict[str, tuple[SinkState, str | None]]:
    """Compare the configured sinks with those of the last start; return their states."""
    known = tx.deliveries.sink_states()
    configured = {sink.name for sink in settings}
    for name in (known.keys() | tx.deliveries.waiting_sinks()) - configured:
        reason = f"the sink {name} is not in the configuration any more"
        tx.deliveries.remove_sink(name, reason, now)
    for sink in settings:
        if sink.name not in known:
            _add_sink(tx, sink, now)
    return {sink.name: known.get(sink.name, ("on", None)) for sink in settings}


def _add_sink(tx: Transaction, sink: SinkSettings, now: datetime) -> None:
    tx.deliveries.set_sink_state(sink.name, "on")
    for occurrence in tx.snapshot.live():
        position = tx.journal.last_change_position(occurrence.key)
        if position is not None and wants(sink, tx.journal.event(position)):
            tx.add_entry(position, sink.name, now)
