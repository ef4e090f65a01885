"""Decides which sinks get an event, and runs one worker for each sink.

The roles make `matching_sinks` the route of the store, so it decides which entries an event gets.
The store hands the entries to the `Dispatcher`, which hands them to the workers. A role makes it,
calls `begin`, and then `run` until it stops or a reload makes another one. The API asks for the
workers about their sinks, and pauses or resumes one.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from relay.clock import Clock
from relay.delivery.result_recording import ResultRecorder
from relay.delivery.worker import Worker
from relay.events.build import RecordRelayEvent
from relay.events.cloudevent import CloudEvent, is_about_event
from relay.events.match import matches, matches_any_pattern
from relay.sinks import Sink, SinkSettings
from relay.store import Entry, RecordedEvent, SinkState
from relay.store.sqlite import Store
from relay.store.transaction import Transaction

DRAIN_POLL_INTERVAL = 0.02


def matching_sinks(event: CloudEvent, sinks: Iterable[SinkSettings]) -> tuple[str, ...]:
    """Return the names of the sinks that want an event. Pure."""
    return tuple(sink.name for sink in sinks if wants(sink, event))


def wants(sink: SinkSettings, event: CloudEvent) -> bool:
    """Whether a sink wants an event. Pure.

    Its ``events`` must name the type and its ``match`` must apply. ``match`` concerns neither
    ``standing-hold.*`` nor ``relay.*``, which never goes to the sink that it is about. No sink
    wants ``relay.ping``: it is sent to one sink by name.
    """
    name = event.name
    if name == "relay.ping" or not matches_any_pattern(sink.events, name):
        return False
    if name.startswith("relay."):
        return event.subject != sink.name
    if not is_about_event(name):
        return True
    return matches(sink.match, event.data, event.scope, every_resource=False)


class Dispatcher:
    def __init__(
        self,
        sinks: Mapping[str, tuple[SinkSettings, Sink]],
        store: Store,
        clock: Clock,
        report: RecordRelayEvent,
    ) -> None:
        self._store = store
        self._clock = clock
        self._results = ResultRecorder(store)
        self._workers = {
            name: Worker(settings, sink, store, self._results, clock, report)
            for name, (settings, sink) in sinks.items()
        }
        self._early_entries: dict[str, list[Entry]] = {name: [] for name in sinks}
        """New entries, by sink, that came before the worker of the sink got what waits for it."""

    async def begin(self) -> None:
        """Read what waits in the store, and listen for new entries.

        A new sink gets an entry for every live event. The entries of a sink that is no longer
        configured become dead letters.
        """
        # Listen first: sinks are connected already, and a chat can request a redelivery.
        self._store.listeners.recorded.append(self._on_recorded)
        self._store.listeners.redelivered.append(self._on_redelivered)
        try:
            states, entries = await self._store.transact(self._reconcile, fail_open=True)
        except BaseException:
            self._stop_listening()
            raise
        waiting = _by_sink(entries)
        for name, worker in self._workers.items():
            worker.set_sink_state(*states.get(name, ("on", None)))
            # What waits by the store, and what came since that was read.
            ids = {entry.id for entry in waiting[name]}
            early = [entry for entry in self._early_entries.pop(name) if entry.id not in ids]
            worker.add_entries([*waiting[name], *early])

    def _reconcile(
        self, tx: Transaction
    ) -> tuple[Mapping[str, tuple[SinkState, str | None]], list[Entry]]:
        """Return the stored state of each sink, with the reason if it is not on, and what waits."""
        now = self._clock.now()
        sinks = {name: worker.settings for name, worker in self._workers.items()}
        known = tx.deliveries.sink_states()
        for name in (known.keys() | tx.deliveries.count_by_sink("waiting").keys()) - sinks.keys():
            reason = f"the sink {name} is not in the configuration any more"
            tx.deliveries.remove_sink(name, reason, now)
        for sink in (sinks[name] for name in sinks if name not in known):
            tx.deliveries.set_sink_state(sink.name, "on")
            for live in tx.occurrences.live_occurrences():
                at = tx.journal.last_change_of(live.key)
                if at is not None and wants(sink, tx.journal.require_event_at_position(at)):
                    tx.deliver_again(at, sink.name, now)
        return known, tx.deliveries.waiting_entries()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers.values():
                    group.create_task(worker.run(), name=f"sink {worker.name}")
                try:
                    await asyncio.Event().wait()
                finally:
                    self._stop_listening()
        finally:
            self.submit()

    def _stop_listening(self) -> None:
        self._store.listeners.recorded.remove(self._on_recorded)
        self._store.listeners.redelivered.remove(self._on_redelivered)

    # --- what operators and the API ask

    async def drain(self) -> None:
        """Return when everything that can be sent now was sent. From then on, no try begins.

        One that began before the workers end would be cut off, and sent again.
        """
        while not all(worker.is_idle for worker in self._workers.values()):
            await self._clock.sleep(DRAIN_POLL_INTERVAL)
        for worker in self._workers.values():
            worker.begin_no_more()

    def submit(self) -> None:
        """Submit to the store what was delivered and waits for others to be recorded with."""
        self._results.submit()

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def get_worker(self, name: str) -> Worker:
        return self._workers[name]

    async def set_state(self, name: str, state: SinkState, reason: str | None) -> None:
        """Pause or resume a sink, and store that. Raises KeyError, StoreUnavailable."""
        worker = self._workers[name]
        await self._store.transact(lambda tx: tx.deliveries.set_sink_state(name, state, reason))
        worker.set_sink_state(state, reason)

    # --- new entries

    def _on_recorded(self, events: Sequence[RecordedEvent]) -> None:
        entries = _by_sink(entry for event in events for entry in event.entries)
        for name, sink_entries in entries.items():
            if name in self._early_entries:
                self._early_entries[name] += sink_entries
            elif name in self._workers:
                self._workers[name].add_entries(sink_entries)

    def _on_redelivered(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.sink in self._early_entries:
                self._early_entries[entry.sink].append(entry)
            elif entry.sink in self._workers:
                # Earlier attempts do not count against a redelivery.
                self._workers[entry.sink].add_entries([replace(entry, attempts=0)], again=True)


def _by_sink(entries: Iterable[Entry]) -> defaultdict[str, list[Entry]]:
    entries_by_sink: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        entries_by_sink[entry.sink].append(entry)
    return entries_by_sink
