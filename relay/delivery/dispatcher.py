"""Decides which sinks get an event, and runs one worker for each sink.

The roles make `matching_sinks` the route of the store, so it decides which entries an event gets.
The store hands the entries to the `Dispatcher`, which hands them to the workers. A role, which is a
relay of one VM or the hub of a fleet (`relay.roles`), makes it and calls `begin`,
and then `run` until it stops. A reload that changes sinks calls
`begin_change_of_configured_sinks`, lets the store do the work of
`reconcile_work`, and calls `end_change_of_configured_sinks`. The API asks for
the workers about their sinks, and pauses or resumes one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from relay.clock import Clock
from relay.delivery.result_recording import ResultRecorder
from relay.delivery.worker import Worker
from relay.events.build import RecordRelayEvent
from relay.events.cloudevent import CloudEvent, is_about_event
from relay.events.match import matches, matches_any_pattern
from relay.sinks import Sink, SinkSettings
from relay.store import Entry, RecordedEvent, SinkState
from relay.store.sqlite import Store, Work
from relay.store.transaction import Transaction

SinkStates = Mapping[str, tuple[SinkState, str | None]]
"""The state of each sink by name, with the reason if it is not on."""

DRAIN_POLL_INTERVAL = 0.02
RETIRE_TIMEOUT = 5.0
"""Seconds for the tries of a sink that a reload replaces or removes, and again to cancel them."""
_log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class NewAndRetiredWorkers:
    """A change of the sinks that has begun: see `Dispatcher.begin_change_of_configured_sinks`."""

    new: tuple[Worker, ...]
    """The workers that do not run yet."""
    retired: tuple[Worker, ...]
    """Those of sinks that were replaced or removed. They still run."""


class Dispatcher:
    """The workers of all sinks."""

    def __init__(
        self,
        sinks: Mapping[str, tuple[SinkSettings, Sink]],
        store: Store,
        clock: Clock,
        report: RecordRelayEvent,
    ) -> None:
        self._store = store
        self._clock = clock
        self._report = report
        self._results = ResultRecorder(store)
        self._workers = {
            name: self._make_worker(settings, sink) for name, (settings, sink) in sinks.items()
        }
        self._early_entries: dict[str, list[Entry]] = {name: [] for name in sinks}
        """New entries, by sink, that came before the worker of the sink got what waits for it."""
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._runs = asyncio.Event()

    async def begin(self) -> None:
        """Read what waits in the store, and listen for new entries.

        A new sink gets an entry for every live event. The entries of a sink that is no longer
        configured become dead letters.
        """
        now = self._clock.now()
        reconcile = self.reconcile_work(now, removing=True)
        # Listen first: sinks are connected already, and a chat can request a redelivery.
        self._store.listeners.recorded.append(self._on_recorded)
        self._store.listeners.redelivered.append(self._on_redelivered)
        states = await self._store.transact(reconcile, fail_open=True)
        for name, worker in self._workers.items():
            worker.set_sink_state(*states[name])
        waiting = await self._store.read(lambda tx: tx.deliveries.waiting_entries())
        entries_by_sink = _by_sink(waiting)
        for name in self._workers:
            self._hand_over(name, entries_by_sink[name])

    async def run(self) -> None:
        """Deliver until canceled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for worker in self._workers.values():
                    self._start_worker(worker)
                self._runs.set()
                await asyncio.Event().wait()
        finally:
            self.submit()

    # --- other sinks

    def begin_change_of_configured_sinks(
        self, sinks: Mapping[str, tuple[SinkSettings, Sink]]
    ) -> NewAndRetiredWorkers:
        """Have these sinks from now on. A sink that is the same object keeps its worker.

        The others take no entry before `end_change_of_configured_sinks`. Between the two, the
        caller lets the store do the work of `reconcile_work`, together with
        the change of the route.
        """
        before = self._workers
        self._workers = {
            name: before[name]
            if name in before and before[name].sink is sink
            else self._make_worker(settings, sink)
            for name, (settings, sink) in sinks.items()
        }
        workers = self._workers.values()
        new = tuple(worker for worker in workers if worker not in before.values())
        retired = tuple(worker for worker in before.values() if worker not in workers)
        for worker in new:
            self._early_entries[worker.name] = []
        for worker in retired:
            if worker.name in self._workers:
                worker.stop_beginning_tries()
        return NewAndRetiredWorkers(new, retired)

    def reconcile_work(self, now: datetime, *, removing: bool = False) -> Work[SinkStates]:
        """Work for the store: add the sinks that are new; return the state of each sink.

        A new sink gets an entry for every live event that it wants. With ``removing``, the entries
        of all others become dead letters.
        """
        sinks = {name: worker.settings for name, worker in self._workers.items()}

        def work(tx: Transaction) -> SinkStates:
            known = tx.deliveries.sink_states()
            if removing:
                for name in (
                    known.keys() | tx.deliveries.count_by_sink("waiting").keys()
                ) - sinks.keys():
                    tx.deliveries.remove_sink(name, _unconfigured_sink_reason(name), now)
            for sink in (sinks[name] for name in sinks if name not in known):
                tx.deliveries.set_sink_state(sink.name, "on")
                for live in tx.occurrences.live_occurrences():
                    at = tx.journal.last_change_of(live.key)
                    if at is not None and wants(sink, tx.journal.require_event_at_position(at)):
                        tx.deliver_again(at, sink.name, now)
            return {name: known.get(name, ("on", None)) for name in sinks}

        return work

    async def end_change_of_configured_sinks(
        self, replacement: NewAndRetiredWorkers, states: SinkStates
    ) -> None:
        """End the workers that are retired, then begin the new ones. Raises StoreUnavailable.

        What a retired sink has in flight may end; what waits for a removed sink and can be sent now
        is sent. The rest goes to the sink of that name, or becomes a dead letter if there is none.
        """
        await self._runs.wait()
        retired = {worker.name: worker for worker in replacement.retired}
        async with asyncio.TaskGroup() as group:
            for name in retired.keys() - self._workers.keys():
                group.create_task(self._remove_sink(retired[name]), name=f"remove sink {name}")
            for worker in replacement.new:
                name = worker.name
                worker.set_sink_state(*states[name])
                group.create_task(
                    self._replace_worker(retired.get(name), worker), name=f"add sink {name}"
                )

    async def _remove_sink(self, worker: Worker) -> None:
        name = worker.name
        await self._retire(worker, lambda: worker.is_idle)
        now, reason = self._clock.now(), _unconfigured_sink_reason(name)
        await self._store.transact(
            lambda tx: tx.deliveries.remove_sink(name, reason, now), fail_open=True
        )

    async def _replace_worker(self, old: Worker | None, new: Worker) -> None:
        name = new.name
        if old is not None:
            await self._retire(old, lambda: not old.is_trying)
        # The results of the old worker are submitted: the store reads after them. Its last try can
        # have disabled the sink.
        states, waiting = await self._store.read(
            lambda tx: (
                tx.deliveries.sink_states(),
                tx.deliveries.waiting_entries(name),
            )
        )
        new.set_sink_state(*states[name])
        self._hand_over(name, waiting)
        self._start_worker(new)

    async def _retire(self, worker: Worker, is_done: Callable[[], bool]) -> None:
        """End a worker when it is done, or after `RETIRE_TIMEOUT`.

        The code of an installed sink can refuse to be canceled. Then nobody waits for it any more:
        the next reload and the sink's new settings must not wait for ever.
        """
        deadline = self._clock.monotonic() + RETIRE_TIMEOUT
        while not is_done() and self._clock.monotonic() < deadline:
            await self._clock.sleep(DRAIN_POLL_INTERVAL)
        task = self._tasks.pop(worker)
        task.cancel()
        _, unfinished = await asyncio.wait({task}, timeout=RETIRE_TIMEOUT)
        if unfinished:
            _log.error("sink %s: its tries do not end, and go on", worker.name)
        self.submit()

    def _start_worker(self, worker: Worker) -> None:
        assert self._group is not None  # noqa: S101  # `run` sets it first
        self._tasks[worker] = self._group.create_task(worker.run(), name=f"sink {worker.name}")

    def _make_worker(self, settings: SinkSettings, sink: Sink) -> Worker:
        return Worker(settings, sink, self._store, self._results, self._clock, self._report)

    # --- what operators and the API ask

    async def drain(self) -> None:
        """Return when everything that can be sent now was sent."""
        while not all(worker.is_idle for worker in self._workers.values()):
            await self._clock.sleep(DRAIN_POLL_INTERVAL)

    def submit(self) -> None:
        """Submit to the store what was delivered and waits for others to be recorded with."""
        self._results.submit()

    @property
    def workers(self) -> list[Worker]:
        """The workers of all sinks, in the order of the configuration."""
        return list(self._workers.values())

    def get_worker(self, name: str) -> Worker:
        """Return the worker of a sink. Raises KeyError if there is no such sink."""
        return self._workers[name]

    async def set_state(self, name: str, state: SinkState, reason: str | None) -> None:
        """Pause or resume a sink, and store that.

        Raises KeyError if there is no such sink, StoreUnavailable if it cannot be stored.
        """
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
                self._workers[entry.sink].redeliver(replace(entry, attempts=0))

    def _hand_over(self, name: str, waiting: Sequence[Entry]) -> None:
        """Give a worker what waits by the store, and what came since that was read."""
        ids = {entry.id for entry in waiting}
        early = [entry for entry in self._early_entries.pop(name) if entry.id not in ids]
        self._workers[name].add_entries([*waiting, *early])


def _by_sink(entries: Iterable[Entry]) -> defaultdict[str, list[Entry]]:
    entries_by_sink: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        entries_by_sink[entry.sink].append(entry)
    return entries_by_sink


def _unconfigured_sink_reason(name: str) -> str:
    return f"the sink {name} is not in the configuration any more"
