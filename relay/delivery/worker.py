"""The worker of one sink: takes entries from its queue and lets the sink deliver them.

The dispatcher makes it, and hands it entries. The worker decides how many tries run and which entry
is next. Its `SinkHealth` decides what follows from a failure, and the `ResultRecorder` writes what
became of an entry. While a sink is failing, one entry at a time is tried. When one is delivered,
everything that waited is sent at once, in order per event
(docs/protocol.md#a-backlog-goes-out-at-once).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

from relay.clock import Clock, Histogram
from relay.delivery.ordered_queue import EventReadAhead, OrderedQueue
from relay.delivery.result_recording import (
    ResultRecorder,
    checked_result,
    error_type_name,
    make_attempt,
)
from relay.delivery.retry import DeadLetter, RetryDecision
from relay.delivery.sink_health import SinkHealth
from relay.errors import Deferred, Rejected, StoreUnavailable, Superseded
from relay.events.build import RecordRelayEvent
from relay.events.cloudevent import CloudEvent
from relay.logs import log_extra
from relay.sinks import Receipt, Sink, SinkSettings
from relay.store import Attempt, AttemptOutcome, Entry, EntryState, SinkState
from relay.store.sqlite import Store
from relay.store.transaction import Transaction

READ_RETRY_DELAY = 1.0
"""Seconds until the next try to read an event if the store could not be read."""
MAX_BATCH = 8
"""Entries that a task delivers before another task runs, even if the sink never waits."""
MAX_OPEN_DELIVERIES = 64
"""The most entries that a crash can repeat, apart from the probes of a sink that is failing.

An entry is open while it is in flight, and while it is delivered but not recorded.
"""

_TRY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0)
"""Seconds: the buckets of tries."""
_log = logging.getLogger(__name__)


class Worker:
    def __init__(
        self,
        settings: SinkSettings,
        sink: Sink,
        store: Store,
        results: ResultRecorder,
        clock: Clock,
        report: RecordRelayEvent,
    ) -> None:
        self.settings = settings
        self.name, self.kind = settings.name, settings.kind
        self.tries: Counter[tuple[AttemptOutcome, int | None]] = Counter()
        """Tries since the start, by their outcome and the status of the receiver."""
        self.try_seconds = Histogram(_TRY_BOUNDS)
        self.ends: Counter[EntryState] = Counter()
        self.sink = sink
        self._results = results
        self._clock = clock
        self._queue = OrderedQueue()
        self._read_ahead = EventReadAhead(store, self._queue)
        self.health = SinkHealth(settings.name, sink, self._queue, clock, report)
        self._in_flight = 0
        self._unrecorded = 0  # delivered, but not recorded yet
        self._rate_allows_at = float("-inf")  # monotonic seconds
        self._wake = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None  # None: the worker does not run, or stops
        self._timer_at = math.inf  # see `_set_timer`
        self._timer: asyncio.Task[None] | None = None

    @property
    def state(self) -> SinkState:
        return self.health.state

    @property
    def failing(self) -> bool:
        return self.health.is_failing

    @property
    def reason(self) -> str | None:
        return self.health.reason

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def oldest_age(self) -> float | None:
        """Return the age of the oldest entry that is waiting or in flight, in seconds."""
        oldest = min((entry.recorded for entry in self._queue), default=None)
        return None if oldest is None else max(0.0, (self._clock.now() - oldest).total_seconds())

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight and nothing could be sent now."""
        if self._in_flight:
            return False
        is_stopped = self.health.state != "on" or self._clock.monotonic() < self.health.allowed_at
        return is_stopped or not self._queue.has_ready

    def add_entries(self, entries: Iterable[Entry], *, again: bool = False) -> None:
        """Add new entries, or redeliver them ``again``: those supersede no other entry."""
        for entry in entries:
            if not again and self._is_entry_replaceable_by_newer(entry):
                for old in self._queue.remove_superseded(entry):
                    self._record_end_without_delivery(
                        old, "superseded", f"replaced by a newer {entry.type}"
                    )
            self._queue.push(entry)
        self.health.probe_now()
        self._begin_tries()  # the task of `run` would begin them two turns of the loop later
        self._wake.set()

    def set_sink_state(self, state: SinkState, reason: str | None) -> None:
        """Pause, disable or resume. Entries are kept, and are sent when the sink is on again."""
        self.health.set_state(state, reason)
        if state == "on":
            self._queue.release_all_delayed(include_individual=True)
        self._wake.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                while True:
                    self._wake.clear()
                    self.health.report_if_no_recent_success()
                    self._begin_tries()
                    self._set_timer(group)
                    await self._wake.wait()
            finally:
                self._group = None

    def begin_no_more(self) -> None:
        """Leave what comes from now on to the worker after this one."""
        self._group = None

    def _begin_tries(self) -> None:
        while self._group is not None and (entry := self._take_next_allowed_entry()) is not None:
            self._group.create_task(self._deliver_in_turn(entry), name=f"sink {self.name}")

    # --- which entry is next, and when

    @property
    def _allowed_at(self) -> float:
        return max(self.health.allowed_at, self._rate_allows_at)

    @property
    def _is_at_try_limit(self) -> bool:
        """Whether no try may begin. A probe may, however slow the disk is."""
        if self.health.probes_only:
            return self._in_flight >= 1
        is_full = self._in_flight + self._unrecorded >= MAX_OPEN_DELIVERIES
        return is_full or self._in_flight >= self.sink.concurrency

    def _take_next_allowed_entry(self) -> Entry | None:
        now = self._clock.monotonic()
        if self.health.state != "on" or now < self._allowed_at or self._is_at_try_limit:
            return None
        if self.health.probes_only:
            self._queue.release_all_delayed(include_individual=False)
        self._queue.release_due(now)
        entry = self._queue.mark_next_entry_in_flight(self.health.next_probe)
        if entry is not None:
            self.health.record_try_start(entry)
            self._in_flight += 1
            if self.settings.rate is not None:
                self._rate_allows_at = now + 1 / self.settings.rate
        return entry

    def _set_timer(self, group: asyncio.TaskGroup) -> None:
        """Wake the worker when a try may begin or the sink counts as stalled.

        An earlier timer stays, because the moment moves on with each delivery: it wakes the worker
        once for nothing, and saves a task for each delivery. A later one is replaced.
        """
        at = self._next_moment()
        if at is not None and at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = at
            self._timer = group.create_task(self._wake_at(at), name=f"timer {self.name}")

    async def _wake_at(self, moment: float) -> None:
        await self._clock.sleep(max(0.0, moment - self._clock.monotonic()))
        self._timer_at = math.inf
        self._wake.set()

    def _next_moment(self) -> float | None:
        """Return when a try may begin or the sink stalls (monotonic); None: by an event."""
        if self.health.state != "on" or not len(self._queue):
            return None
        now, allowed_at = self._clock.monotonic(), self._allowed_at
        moments = [self.health.becomes_failing_at]
        if not self._is_at_try_limit:
            moments.append(allowed_at if now < allowed_at else self._queue.next_release_at())
        return min((moment for moment in moments if moment is not None), default=None)

    # --- one try

    async def _deliver_in_turn(self, entry: Entry | None) -> None:
        """Deliver an entry, then the next ones in the same task while they succeed."""
        remaining = MAX_BATCH
        try:
            while entry is not None:
                remaining -= 1
                try:
                    is_delivered = await self._deliver_entry(entry)
                finally:
                    self._in_flight -= 1
                entry = self._take_next_allowed_entry() if is_delivered and remaining else None
        finally:
            self._wake.set()

    async def _deliver_entry(self, entry: Entry) -> bool:
        """Deliver one entry; return whether it needs no other try, and the next one may begin."""
        try:
            event = entry.event or await self._read_ahead.event(entry)
        except StoreUnavailable:
            self.health.restart_time_without_success()  # the sink is not at fault
            retry_at = self._clock.monotonic() + READ_RETRY_DELAY
            self._queue.delay_head(entry, retry_at, is_individual=True)
        except Exception as error:  # noqa: BLE001  # a broken row must not stop the next ones
            reason = f"its event could not be read from the journal: {error_type_name(error)}"
            self._move_entry_to_dead_letters(entry, reason, attempt=None)
        else:
            return await self._attempt_delivery(entry, event)
        return False

    async def _attempt_delivery(self, entry: Entry, event: CloudEvent) -> bool:
        at, began = self._clock.now(), self._clock.monotonic()
        result = await self._call_sink(event)
        if isinstance(result, Superseded):
            self._queue.remove_head(entry)
            self._record_end_without_delivery(entry, "superseded", result.reason)
            self._note_success(entry)
            return True
        attempt = make_attempt(result, at, self._clock.monotonic() - began)
        self.tries[attempt.outcome, attempt.status] += 1
        self.try_seconds.observe(attempt.elapsed)
        self._log_attempt(entry, attempt)
        if isinstance(result, Receipt | Rejected | Deferred):
            self.health.record_clock_skew(result.skew)
        if isinstance(result, Receipt):
            self._unrecorded += 1
            self.ends["delivered"] += 1
            self._results.record_delivery(entry.id, attempt, self._on_recorded)
            self._queue.remove_head(entry)
            self._note_success(entry)
            return True
        if isinstance(result, Rejected):
            self.health.record_rejection(entry, result)
            self._move_entry_to_dead_letters(entry, result.reason, attempt)
            return False
        if not isinstance(result, Deferred):
            result = self.health.record_internal_error(entry, result)
        decision = self.health.plan_after_failure(entry, result, began)
        self._apply_retry_decision(decision, entry, result, attempt)
        return False

    def _log_attempt(self, entry: Entry, attempt: Attempt) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "sink %s: %s %s",
                self.name,
                entry.type,
                attempt.outcome,
                extra=log_extra(
                    sink=self.name,
                    type=entry.type,
                    entry=entry.id,
                    position=entry.position,
                    attempts=entry.attempts + 1,
                    status=attempt.status,
                    reason=attempt.reason,
                    seconds=round(attempt.elapsed, 6),
                ),
            )

    async def _call_sink(self, event: CloudEvent) -> Receipt | Exception:
        """Return the receipt, or why there is none. CancelledError only if the worker stops."""
        try:
            return checked_result(await self.sink.deliver(event))
        except asyncio.CancelledError:
            if self._group is None:  # the worker stops
                raise
            # Nobody canceled this task: docs/protocol.md#a-library-cancels-publishers
            return Deferred("the connection was lost")
        except Exception as error:  # noqa: BLE001  # a bug in one sink must not stop the others
            return checked_result(error)

    # --- what follows from a try

    def _note_success(self, entry: Entry) -> None:
        """The sink works. If it failed until now, send everything that waited."""
        if self.health.record_success(entry):
            self._queue.release_all_delayed(include_individual=True)
            self._wake.set()

    def _on_recorded(self) -> None:
        self._unrecorded -= 1
        self._wake.set()

    def _apply_retry_decision(
        self, decision: RetryDecision, entry: Entry, error: Deferred, attempt: Attempt
    ) -> None:
        if error.failure == "disabled" and self.health.state != "disabled":
            self._results.record(
                lambda tx: tx.deliveries.set_sink_state(self.name, "disabled", error.reason)
            )
            self.health.disable(error.reason)
            self._wake.set()
        if isinstance(decision, DeadLetter):
            self._move_entry_to_dead_letters(
                entry, f"{decision.reason}; last: {error.reason}", attempt
            )
        elif self._is_entry_replaceable_by_newer(entry) and self._queue.is_superseded(entry):
            self._queue.remove_head(entry)
            reason = "replaced by a newer one while it was being sent"
            self._record_end_without_delivery(entry, "superseded", reason, attempt)
        else:
            until = self._clock.now() + timedelta(seconds=decision.delay)
            self._queue.delay_head(
                replace(entry, attempts=entry.attempts + 1, next_at=until),
                self._clock.monotonic() + decision.delay,
                is_individual=error.failure == "slow",
            )
            self._results.record(lambda tx: tx.deliveries.defer(entry.id, attempt, until))

    def _move_entry_to_dead_letters(
        self, entry: Entry, reason: str, attempt: Attempt | None
    ) -> None:
        self._queue.remove_head(entry)
        if entry.type_family == "relay":
            # A dead letter is reported as relay.*, so one of relay.* would report itself forever.
            self._record_end_without_delivery(entry, "superseded", f"dropped: {reason}", attempt)
            return
        self._record_end_without_delivery(entry, "parked", reason, attempt)
        self.health.record_dead_letter(entry, reason)

    def _record_end_without_delivery(
        self, entry: Entry, state: EntryState, reason: str, attempt: Attempt | None = None
    ) -> None:
        self.ends[state] += 1
        self.health.forget_entry(entry)
        now = self._clock.now()

        def work(tx: Transaction) -> None:
            if attempt is not None:
                tx.deliveries.log_attempts([(entry.id, attempt)])
            tx.deliveries.store_final_state(entry.id, state, reason, now)

        self._results.record(work)

    def _is_entry_replaceable_by_newer(self, entry: Entry) -> bool:
        """Whether a newer entry of the same ordering key and family replaces this one."""
        if entry.type_family == "event":
            return self.settings.stale == "drop"
        return entry.type_family == "relay"
