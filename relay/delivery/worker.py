"""One sink's worker: takes its entries in order, lets the sink deliver, and does what the retry plan says.

While a sink fails, one entry at a time, the oldest, is tried; when it gets through, everything that waited goes out at
once, in order per event (FIELD 3.5).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime

from relay.clock import Clock
from relay.delivery.lanes import Lanes
from relay.delivery.retry import OWN_ERRORS, Again, Disable, Park, Verdict, moment_of, plan
from relay.errors import Deferred, Rejected, RelayError
from relay.outbox import Attempt, Entry, EntryState, SinkState
from relay.outbox.sqlite import Store, Work
from relay.outbox.transaction import Transaction
from relay.sinks import Sink, SinkSettings

FAILING = 3
"""So many failed tries in a row, and a sink is said to be failing."""

_log = logging.getLogger(__name__)

Say = Callable[[str, str | None, str, int], None]
"""Tells a ``relay.*`` event: its name, the sink it is about, the reason, how many it stands for."""


class Worker:
    """Carries entries to one sink. ``state`` and ``failing`` are for whoever asks how the sink is."""

    def __init__(self, settings: SinkSettings, sink: Sink, store: Store, clock: Clock, say: Say) -> None:
        self.settings = settings
        self.state: SinkState = "on"
        self.reason: str | None = None
        """Why it is paused, disabled or failing."""
        self._sink = sink
        self._store = store
        self._clock = clock
        self._say = say
        self._lanes = Lanes()
        self._under_way = 0
        self._failures = 0
        self._probe_at: float | None = None  # set: only one try at a time, and not before that, until one gets through
        self._rest_until = 0.0  # the far side asked for rest until then
        self._own_errors: dict[int, int] = {}
        self._dead = 0
        self._wake = asyncio.Event()

    @property
    def failing(self) -> bool:
        """Whether the last tries all failed."""
        return self._failures >= FAILING

    @property
    def waiting(self) -> int:
        """How many entries wait or are being sent."""
        return len(self._lanes)

    @property
    def quiet(self) -> bool:
        """Whether nothing is being sent and nothing could be sent now: a good moment to stop."""
        return self._under_way == 0 and (self.state != "on" or self.failing or not self._lanes.any_free)

    def push(self, entries: Iterable[Entry]) -> None:
        """Take in entries, in the order in which they were recorded."""
        for entry in entries:
            about_relay = entry.type.startswith("relay.")
            if about_relay or (self.settings.stale == "drop" and entry.type.startswith("event.")):
                for old in self._lanes.replaceable(entry):
                    self._settle(old, "superseded", f"replaced by a newer {entry.type}")
            self._lanes.push(entry)
        self._wake.set()

    def set_state(self, state: SinkState, reason: str | None) -> None:
        """Pause, disable or resume; what waits is kept, and goes out at once when the sink is on again."""
        self.state, self.reason = state, reason
        if state == "on":
            self._failures, self._probe_at, self._rest_until = 0, None, 0.0
            self._lanes.wake_all()
        self._wake.set()

    async def run(self) -> None:
        """Deliver until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                self._begin(group)
                try:
                    async with asyncio.timeout(self._pause()):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    def _begin(self, group: asyncio.TaskGroup) -> None:
        now = self._clock.monotonic()
        if self.state != "on" or now < self._not_before():
            return
        if self._probe_at is not None:
            self._lanes.wake_all()  # so that the oldest of all is tried
        self._lanes.wake(now)
        while self._under_way < self._most() and (entry := self._lanes.take()) is not None:
            self._under_way += 1
            group.create_task(self._carry(entry), name=f"{self.settings.name}:{entry.id}")

    def _most(self) -> int:
        return self._sink.concurrency if self._probe_at is None else 1

    def _not_before(self) -> float:
        return max(self._rest_until, self._probe_at or 0.0)

    def _pause(self) -> float | None:
        """Seconds until something may be begun; None: only when something happens."""
        if self.state != "on" or self._under_way >= self._most() or not len(self._lanes):
            return None
        now = self._clock.monotonic()
        due = self._not_before() if now < self._not_before() else self._lanes.next_wake()
        return max(0.0, due - now) if due is not None else None

    async def _carry(self, entry: Entry) -> None:
        began, at = self._clock.monotonic(), self._clock.now()
        try:
            event = entry.event
            if event is None:
                event = await self._store.read(lambda tx: tx.journal.event(entry.position))
            receipt = await self._sink.deliver(event)
        except KeyError:
            self._parked(entry, "its event was pruned from the journal before it could be sent", None)
        except Rejected as error:
            attempt = Attempt(at, self._clock.monotonic() - began, "parked", error.status, error.reason, error.answer)
            self._parked(entry, error.reason, attempt)
        except Deferred as error:
            attempt = Attempt(at, self._clock.monotonic() - began, "deferred", error.status, error.reason, error.answer)
            self._failed(entry, error, attempt)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            # A library cancels publishers when a connection dies (FIELD 5.1): nobody cancelled us.
            attempt = Attempt(at, self._clock.monotonic() - began, "deferred", None, "the connection was lost", None)
            self._failed(entry, Deferred("the connection was lost"), attempt)
        except Exception as error:  # noqa: BLE001  # a sink's own code may fail in any way, and must not take others along
            attempt = Attempt(at, self._clock.monotonic() - began, "error", None, _named(error), None)
            self._own_error(entry, error, attempt)
        else:
            attempt = Attempt(at, self._clock.monotonic() - began, "delivered", receipt.status, None, receipt.answer)
            self._delivered(entry, attempt)
        finally:
            self._under_way -= 1
            self._wake.set()

    def _delivered(self, entry: Entry, attempt: Attempt) -> None:
        self._settle(entry, "delivered", None, attempt)
        self._lanes.done(entry)
        self._own_errors.pop(entry.id, None)
        if self.failing:
            _log.info("sink %s delivers again; %d entries waited", self.settings.name, len(self._lanes))
            self._say("relay.sink-recovered", self.settings.name, "it delivers again", len(self._lanes))
        if self._probe_at is not None:
            self._lanes.wake_all()
        self._failures, self._probe_at, self.reason = 0, None, None

    def _parked(self, entry: Entry, reason: str, attempt: Attempt | None) -> None:
        name = self.settings.name
        self._lanes.done(entry)
        self._own_errors.pop(entry.id, None)
        if entry.type.startswith("relay."):
            # What the relay says of itself never becomes a dead letter, or one failure would tell of itself for ever.
            self._settle(entry, "superseded", f"dropped: {reason}", attempt)
            return
        self._settle(entry, "parked", reason, attempt)
        _log.warning("sink %s: %s (entry %d) became a dead letter: %s", name, entry.type, entry.id, reason)
        self._dead += 1
        self._say("relay.dead-lettered", name, f"{entry.type} (entry {entry.id}): {reason}", self._dead)

    def _own_error(self, entry: Entry, error: Exception, attempt: Attempt) -> None:
        count = self._own_errors.get(entry.id, 0) + 1
        self._own_errors[entry.id] = count
        if count == 1:
            _log.error("sink %s failed in its own code on %s", self.settings.name, entry.type, exc_info=error)
        if count >= OWN_ERRORS:
            self._parked(entry, f"the sink's own code failed {count} times: {_named(error)}", attempt)
        else:
            self._failed(entry, Deferred(f"the sink's own code failed: {_named(error)}"), attempt)

    def _failed(self, entry: Entry, error: Deferred, attempt: Attempt) -> None:
        self._failures += 1
        if self._failures == FAILING:
            _log.warning("sink %s is failing: %s", self.settings.name, error.reason)
            self._say("relay.sink-failing", self.settings.name, error.reason, len(self._lanes))
        now = self._clock.now()
        verdict = self._verdict(entry, error, now)
        if isinstance(verdict, Park):
            self._parked(entry, f"{verdict.reason}; last: {error.reason}", attempt)
            return
        if isinstance(verdict, Disable):
            self._disable(error.reason)
            verdict = Again(0.0)
        until = moment_of(verdict, now)
        self._lanes.rest(replace(entry, attempts=entry.attempts + 1, next_at=until), self._clock.monotonic() + verdict.after)
        self._remember(lambda tx: tx.deliveries.defer(entry.id, attempt, until))
        self.reason = error.reason
        if verdict.rest:
            self._rest_until = max(self._rest_until, self._clock.monotonic() + verdict.after)
        if self.failing and error.failure == "transient":
            self._probe_at = self._clock.monotonic() + self._next_probe(now)

    def _verdict(self, entry: Entry, error: Deferred, now: datetime) -> Verdict:
        return plan(
            error.failure,
            tries=entry.attempts + 1,
            now=now,
            recorded=entry.recorded,
            not_before=entry.not_before,
            give_up_after=self._sink.give_up_after,
            longest_pause=self._sink.longest_pause,
            asked=error.after,
            chance=random.random(),  # noqa: S311  # jitter
        )

    def _next_probe(self, now: datetime) -> float:
        """Seconds until the sink as a whole is tried again: as the most pressing of what waits demands."""
        ahead = [entry.not_before for entry in self._lanes.heads() if entry.not_before is not None and entry.not_before > now]
        verdict = plan(
            "transient",
            tries=self._failures,
            now=now,
            recorded=now,
            not_before=min(ahead, default=None),
            give_up_after=float("inf"),
            longest_pause=self._sink.longest_pause,
            chance=random.random(),  # noqa: S311  # jitter
        )
        return verdict.after if isinstance(verdict, Again) else 0.0

    def _disable(self, reason: str) -> None:
        _log.error("sink %s asked us to stop, it is disabled and keeps its entries: %s", self.settings.name, reason)
        self.set_state("disabled", reason)
        self._remember(lambda tx: tx.deliveries.set_sink(self.settings.name, "disabled", reason))
        self._say("relay.sink-disabled", self.settings.name, reason, len(self._lanes))

    def _settle(self, entry: Entry, state: EntryState, reason: str | None, attempt: Attempt | None = None) -> None:
        at = self._clock.now()

        def work(tx: Transaction) -> None:
            if attempt is not None:
                tx.deliveries.tried(entry.id, attempt)
            tx.deliveries.settle(entry.id, state, reason, at)

        self._remember(work)

    def _remember(self, work: Work[object]) -> None:
        """Write down how a delivery went, without waiting: should it be lost, the same id is sent again."""
        self._store.submit(work, fail_open=True).add_done_callback(_unless_unavailable)


def _unless_unavailable(future: asyncio.Future[object]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, RelayError):
        _log.error("a delivery could not be written down", exc_info=error)


def _named(error: Exception) -> str:
    # The text of a stranger's error may hold anything, a URL's password too: its type must do.
    return type(error).__name__
