"""One sink's worker: takes its entries in order, lets the sink deliver, and does what the retry plan says.

While a sink fails it is probed with one entry at a time; when one gets through, everything that waited goes out at once,
in order per event (docs/protocol.md#a-backlog-goes-out-at-once).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from relay.clock import Clock
from relay.delivery.circuit_breaker import CircuitBreaker
from relay.delivery.ordered_queue import OrderedQueue
from relay.delivery.retry import (
    MAX_INTERNAL_ERRORS,
    DeadLetter,
    DisableSink,
    RetryAfter,
    retry_time,
)
from relay.delivery.retry_policy import RetryPolicy
from relay.delivery.settlement import SettlementBatcher
from relay.delivery.sink_reports import ReportRelayEvent, SinkHealthReporter
from relay.errors import Deferred, Rejected, StoreUnavailable
from relay.events.cloudevent import CloudEvent
from relay.outbox import Attempt, Entry, EntryState, AttemptOutcome, SinkState
from relay.outbox.sqlite import Store
from relay.sinks import Sink, SinkSettings

READ_RETRY_DELAY = 1.0
"""Seconds until another try where the store could not be read."""

MAX_BATCH = 8
"""Entries that a task delivers before another goes on: a sink that never waits for anything leaves others their turn."""
MAX_OPEN_DELIVERIES = 64
"""Entries that are under way, or have got through and are not written down as such: a crash repeats no more than these."""


class Worker:
    """Carries entries to one sink. ``state``, ``failing`` and ``reason`` are for whoever asks how the sink is."""

    def __init__(
        self,
        settings: SinkSettings,
        sink: Sink,
        store: Store,
        books: SettlementBatcher,
        clock: Clock,
        say: ReportRelayEvent,
    ) -> None:
        self.settings = settings
        self.state: SinkState = "on"
        self.tries: Counter[tuple[AttemptOutcome, int | None]] = Counter()
        """How often a try came to which outcome, with which status of the far side, since the start."""
        self.prospects = RetryPolicy(sink, clock)
        self._sink = sink
        self._store = store
        self._books = books
        self._clock = clock
        self._news = SinkHealthReporter(settings.name, say)
        self._lanes = OrderedQueue()
        self._under_way = 0
        self._unwritten = 0
        self._circuit = CircuitBreaker()
        self._stopped: str | None = None
        self._trouble: str | None = None
        self._slot = float(
            "-inf"
        )  # before that moment nothing more is begun, of a sink with a rate
        self._wake = asyncio.Event()
        self._ending = False

    @property
    def is_failing(self) -> bool:
        """Whether it failed several times in a row or for a minute, or asked us to stop, and has not delivered since."""
        return self._circuit.is_failing

    @property
    def reason(self) -> str | None:
        """Why it is paused or disabled, or what the last try failed with."""
        return self._trouble if self.state == "on" else self._stopped

    @property
    def waiting(self) -> int:
        """How many entries wait or are being sent."""
        return len(self._lanes)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being sent and nothing could be sent now: a good moment to stop."""
        stopped = self.state != "on" or self._clock.monotonic() < self._circuit.allowed_at
        return self._under_way == 0 and (stopped or not self._lanes.has_ready)

    @property
    def _opens(self) -> float:
        """Before that moment nothing may be begun (monotonic seconds)."""
        return max(self._circuit.allowed_at, self._slot)

    def add_entries(self, entries: Iterable[Entry]) -> None:
        """Take in entries, in the order in which they were recorded."""
        for entry in entries:
            if self._replaces(entry):
                for old in self._lanes.remove_superseded(entry):
                    self._settle(old, "superseded", f"replaced by a newer {entry.type}")
            self._lanes.push(entry)
        self._circuit.probe_now()
        self._wake.set()

    def redeliver(self, entries: Iterable[Entry]) -> None:
        """Take in entries that an operator wants sent once more, whatever came after them."""
        for entry in entries:
            self._lanes.push(entry)
        self._circuit.probe_now()
        self._wake.set()

    def set_state(self, state: SinkState, reason: str | None) -> None:
        """Pause, disable or resume; what waits is kept, and goes out at once when the sink is on again."""
        self.state, self._stopped = state, reason
        if state == "disabled":
            self._circuit.is_failing = True
        if state == "on":
            self._circuit.resume(self._clock.monotonic())
            self._lanes.release_all(alone=True)
        self._wake.set()

    async def run(self) -> None:
        """Deliver until cancelled."""
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    self._wake.clear()
                    self._look_at_clock()
                    self._begin(group)
                    pause = self._pause()
                    alarm = group.create_task(self._ring(pause)) if pause is not None else None
                    await self._wake.wait()
                    if alarm is not None:
                        alarm.cancel()
            except asyncio.CancelledError:
                self._ending = True
                raise

    def _look_at_clock(self) -> None:
        """Tell that the sink is failing once nothing has got through for a minute."""
        if not len(self._lanes):
            self._circuit.record_idle()
        if self.state == "on" and self._circuit.check_stalled(self._clock.monotonic()):
            self._trouble = self._trouble or "no try has ended for a minute"
            self._news.report_failing(self._trouble, len(self._lanes))

    async def _ring(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._wake.set()

    def _begin(self, group: asyncio.TaskGroup) -> None:
        while (entry := self._take()) is not None:
            group.create_task(self._carry(entry), name=f"sink {self.settings.name}")

    def _take(self) -> Entry | None:
        """The next entry that may be begun now, which is then under way; None where there is none."""
        now = self._clock.monotonic()
        if self.state != "on" or now < self._opens or self._is_full:
            return None
        if self._circuit.is_probing:
            self._lanes.release_all(alone=False)
        self._lanes.release_due(now)
        entry = self._lanes.take_next(least_tried=self._circuit.prefers_least_tried)
        if entry is not None:
            self._circuit.record_start(now)
            self._under_way += 1
            if self.settings.rate is not None:
                self._slot = now + 1 / self.settings.rate
        return entry

    @property
    def _is_full(self) -> bool:
        most = 1 if self._circuit.is_probing else self._sink.concurrency
        return self._under_way >= most or self._under_way + self._unwritten >= MAX_OPEN_DELIVERIES

    def _pause(self) -> float | None:
        """Seconds until something may be begun, or the sink counts as failing; None: only when something happens."""
        if self.state != "on" or not len(self._lanes):
            return None
        now, opens = self._clock.monotonic(), self._opens
        moments = [self._circuit.stalls_at]
        if not self._is_full:
            moments.append(opens if now < opens else self._lanes.next_release_at())
        due = min((moment for moment in moments if moment is not None), default=None)
        return max(0.0, due - now) if due is not None else None

    async def _carry(self, entry: Entry | None) -> None:
        """Deliver an entry, and then the next ones in the same task, for as long as they get through."""
        left = MAX_BATCH
        try:
            while entry is not None:
                left -= 1
                try:
                    through = await self._deliver(entry)
                finally:
                    self._under_way -= 1
                entry = self._take() if through and left else None
        finally:
            self._wake.set()

    async def _deliver(self, entry: Entry) -> bool:
        """Returns whether it got through."""
        try:
            event = entry.event
            if event is None:
                event = await self._store.read(lambda tx: tx.journal.event(entry.position))
        except StoreUnavailable:
            self._circuit.record_idle()  # the sink has no part in it
            self._lanes.delay_head(entry, self._clock.monotonic() + READ_RETRY_DELAY, alone=True)
        except Exception as error:  # whatever is wrong with this row, the next ones can be sent
            self._parked(
                entry, f"its event could not be read from the journal: {_named(error)}", None
            )
        else:
            return await self._try(entry, event)
        return False

    async def _try(self, entry: Entry, event: CloudEvent) -> bool:
        began, at = self._clock.monotonic(), self._clock.now()

        def attempt(
            outcome: AttemptOutcome,
            status: int | None = None,
            reason: str | None = None,
            answer: str | None = None,
        ) -> Attempt:
            self.tries[outcome, status] += 1
            return Attempt(at, self._clock.monotonic() - began, outcome, status, reason, answer)

        try:
            receipt = await self._sink.deliver(event)
            self._news.report_clock_skew(receipt.skew)
            arrived = attempt("delivered", receipt.status, None, receipt.response)
        except Rejected as error:
            self._news.report_clock_skew(error.skew)
            self._trouble = error.reason
            if self._circuit.record_rejection(self._clock.monotonic()):
                self._news.report_failing(error.reason, len(self._lanes))
            self._parked(
                entry, error.reason, attempt("parked", error.status, error.reason, error.response)
            )
        except Deferred as error:
            self._news.report_clock_skew(error.skew)
            self._failed(
                entry, error, attempt("deferred", error.status, error.reason, error.response), began
            )
        except asyncio.CancelledError:
            if self._ending:
                raise
            # Nobody cancelled this task: see docs/protocol.md#a-library-cancels-publishers.
            lost = Deferred("the connection was lost")
            self._failed(entry, lost, attempt("deferred", None, lost.reason), began)
        except Exception as error:  # noqa: BLE001  # a sink's own code may fail in any way, and must not take others along
            self._failed_by_itself(entry, error, attempt("error", None, _named(error)), began)
        else:
            self._delivered(entry, arrived)
            return True
        return False

    def _delivered(self, entry: Entry, attempt: Attempt) -> None:
        self._unwritten += 1
        self._books.record_delivery(entry.id, attempt, self._written)
        self._news.forget_entry(entry)
        self._news.record_success()
        self._lanes.remove_head(entry)
        self._trouble = None
        if self.state != "disabled" and self._circuit.record_success():
            self._news.report_recovered(len(self._lanes))
            self._lanes.release_all(alone=True)
            self._wake.set()

    def _written(self) -> None:
        self._unwritten -= 1
        self._wake.set()

    def _parked(self, entry: Entry, reason: str, attempt: Attempt | None) -> None:
        self._lanes.remove_head(entry)
        if entry.type.startswith("relay."):
            # What the relay says of itself never becomes a dead letter, or one failure would tell of itself for ever.
            self._settle(entry, "superseded", f"dropped: {reason}", attempt)
            return
        self._settle(entry, "parked", reason, attempt)
        self._news.report_dead_letter(entry, reason)

    def _failed_by_itself(
        self, entry: Entry, error: Exception, attempt: Attempt, began: float
    ) -> None:
        count = self._news.report_internal_error(entry, error)
        failure = Deferred(f"the sink's own code failed: {_named(error)}")
        spent = (
            DeadLetter(f"the sink's own code failed {count} times")
            if count >= MAX_INTERNAL_ERRORS
            else None
        )
        self._failed(entry, failure, attempt, began, spent)

    def _failed(
        self,
        entry: Entry,
        error: Deferred,
        attempt: Attempt,
        began: float,
        spent: DeadLetter | None = None,
    ) -> None:
        now, monotonic = self._clock.now(), self._clock.monotonic()
        self._trouble = error.reason
        if self._circuit.record_failure(began, monotonic):
            self._news.report_failing(error.reason, len(self._lanes))
        verdict = spent or self.prospects.of(entry, error, now)
        if isinstance(verdict, DisableSink):
            self._disable(error.reason)
            verdict = RetryAfter(0.0)
        if isinstance(verdict, RetryAfter):
            self._circuit.pause_until(monotonic + verdict.sink_pause)
        if self.is_failing:
            # Who refuses one event (slow) answers, and may take the others.
            transient = error.failure == "transient"
            probe = (
                self.prospects.next_probe(entry, self._lanes, self._circuit.failures, now)
                if transient
                else 0.0
            )
            self._circuit.schedule_probe(monotonic + probe if transient else None)
        if isinstance(verdict, DeadLetter):
            self._parked(entry, f"{verdict.reason}; last: {error.reason}", attempt)
        elif self._replaces(entry) and self._lanes.is_superseded(entry):
            self._lanes.remove_head(entry)
            self._settle(
                entry, "superseded", "replaced by a newer one while it was being sent", attempt
            )
        else:
            until = retry_time(verdict, now)
            tried = replace(entry, attempts=entry.attempts + 1, next_at=until)
            self._lanes.delay_head(tried, monotonic + verdict.delay, alone=error.failure == "slow")
            self._books.record_deferral(entry.id, attempt, until)

    def _disable(self, reason: str) -> None:
        if self.state == "disabled":
            return
        self.set_state("disabled", reason)
        self._books.record_sink_state(self.settings.name, "disabled", reason)
        self._news.report_disabled(reason, len(self._lanes))

    def _replaces(self, entry: Entry) -> bool:
        """Whether a newer entry of the same lane and family takes the place of this one, and this one that of older ones."""
        return entry.type.startswith("relay.") or (
            self.settings.stale == "drop" and entry.type.startswith("event.")
        )

    def _settle(
        self, entry: Entry, state: EntryState, reason: str, attempt: Attempt | None = None
    ) -> None:
        self._news.forget_entry(entry)
        self._books.record_settlement(entry.id, state, reason, self._clock.now(), attempt)


def _named(error: Exception) -> str:
    # The text of a stranger's error may hold anything, a URL's password too: its type must do.
    return type(error).__name__
