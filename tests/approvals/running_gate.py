"""A gate that runs on a real store with a manual clock, and a stub in place of IMDS."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from relay.approvals import ApprovalsSettings, ClaimedGrant
from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import Gate
from relay.approvals.request import DecisionAnswer
from relay.errors import SourceError, SourceRefused, SourceUnavailable
from relay.events.cloudevent import CloudEvent
from relay.events.model import Document, ScheduledEvent
from relay.ingest.recorder import PollResult, Recorder
from relay.outbox import Grant, StateFileOwner, StoreSettings
from relay.outbox.file import open_for_reading
from relay.outbox.journal import read_rows, verify_journal
from relay.outbox.sqlite import Store, open_store
from tests.approvals.builders import (
    BOOT_ID,
    CLIENT_RESOURCES,
    ORIGIN,
    SETTINGS,
    build_request,
)
from tests.approvals.manual_clock import NOON, ManualClock, wait_until

REFUSED = SourceRefused("expected 200, got 400", status=400)
UNAVAILABLE = SourceUnavailable("expected 200, got 503", status=503)
TIMEOUT = SourceUnavailable("expected an answer within 10s, none came whole")


class Azure:
    """IMDS as the gate sees it: a document to read, and answers to StartRequests."""

    def __init__(
        self,
        clock: ManualClock,
        *events: ScheduledEvent,
        answers: Sequence[SourceError | None] = (),
    ) -> None:
        self.document: tuple[ScheduledEvent, ...] = events
        self.answers = deque(answers)
        """The next answers to StartRequests; None, or nothing left: 200."""
        self.read_errors: deque[SourceError] = deque()
        self.sent: list[tuple[str, ...]] = []
        self.reads = 0
        self.in_flight_count = 0
        self.after_read: Callable[[], object] = lambda: None
        self.may_read, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_read.set()
        self.may_answer.set()
        self.store: Store
        self._clock = clock
        self._recorder = Recorder(ORIGIN, BOOT_ID, frozenset({"db-1"}))

    max_shared = 100

    async def read_fresh(self, _scope: str, _grants: Sequence[Grant]) -> None:
        """Read and record the document, once the test allows it."""
        self.reads += 1
        await self.may_read.wait()
        if self.read_errors:
            raise self.read_errors.popleft()
        await self.poll()
        self.after_read()

    async def poll(self) -> None:
        """Record the document as a poll does."""
        result = PollResult(Document(1, self.document), self._clock.now(), gap=False)
        await self.store.transact(lambda tx: self._recorder.record(tx, result), fail_open=True)

    def choose(self, _scope: str, _grants: Sequence[Grant]) -> None:
        """IMDS itself executes each StartRequest."""

    async def start(self, _scope: str, claims: Sequence[ClaimedGrant]) -> None:
        """Answer a StartRequest, once the test allows it."""
        assert self.in_flight_count == 0, "two StartRequests in flight"
        self.in_flight_count += 1
        try:
            self.sent.append(tuple(claim.event_id for claim in claims))
            await self.may_answer.wait()
        finally:
            self.in_flight_count -= 1
        answer = self.answers.popleft() if self.answers else None
        if answer is not None:
            raise answer


class GateHarness:
    """A running gate with its clock, its store and its Azure."""

    def __init__(
        self, path: Path, clock: ManualClock, azure: Azure, store: Store, gate: Gate
    ) -> None:
        self.path, self.clock, self.azure, self.store, self.gate = path, clock, azure, store, gate

    async def record_document(self, *events: ScheduledEvent) -> None:
        """Change Azure's document, and poll it."""
        self.azure.document = events
        await self.azure.poll()

    async def submit(self, *given: Any, **changes: Any) -> DecisionAnswer:
        """Submit a request about an event."""
        return await self.gate.submit(build_request(*given, at=self.clock.now(), **changes))

    def events(self, *names: str) -> list[CloudEvent]:
        """The events in the file, read by a second connection; the hash chain is checked too."""
        with contextlib.closing(open_for_reading(self.path)) as reader:
            verify_journal(reader)
            recorded_events = [
                CloudEvent.parse(row.body)
                for row in read_rows(reader)
                if row.kind not in ("claim", "mode")
            ]
        return [recorded for recorded in recorded_events if not names or recorded.name in names]

    def kinds(self) -> list[str]:
        """The kinds of the journal's rows."""
        with contextlib.closing(open_for_reading(self.path)) as reader:
            return [row.kind for row in read_rows(reader)]

    async def wait_for_events(self, name: str, count: int = 1) -> list[CloudEvent]:
        """Wait until the journal has ``count`` events with this name; return them."""
        await wait_until(lambda: len(self.events(name)) >= count)
        # Otherwise the test could advance the clock before the gate sleeps.
        await self.settle()
        return self.events(name)

    async def wait_for_start_requests(self, count: int) -> None:
        """Wait until so many StartRequests were sent, and the gate waits for what comes next."""
        await wait_until(lambda: len(self.azure.sent) == count)
        await self.settle()

    async def deliver_everything(self) -> None:
        """Settle every entry of every sink."""

        def settle_entries(tx: Any) -> None:
            for entry in tx.deliveries.waiting():
                tx.deliveries.settle(entry.id, "delivered", None, NOON)

        await self.store.transact(settle_entries)

    async def settle(self) -> None:
        """Wait until the gate waits: longer than all its steps through the store take."""
        for _ in range(8):
            await self.store.read(lambda _: None)
            for _ in range(10):
                await asyncio.sleep(0)


@asynccontextmanager
async def running_gate(
    folder: Path,
    *events: ScheduledEvent,
    settings: ApprovalsSettings = SETTINGS,
    clock: ManualClock | None = None,
    sinks: Sequence[str] = (),
    names_us: bool = True,
    azure: Azure | None = None,
) -> AsyncIterator[GateHarness]:
    """Run a gate on the store in a folder. Leaving the context kills it."""
    clock = clock or ManualClock()
    path = folder / "relay.db"
    azure = azure or Azure(clock, *events)
    async with open_store(
        StoreSettings(path=path), StateFileOwner(ORIGIN.scope, "vm"), clock, lambda _: sinks
    ) as store:
        azure.store = store
        await azure.poll()
        gate = Gate(
            ApprovalEngine(settings, ORIGIN, client_resources=CLIENT_RESOURCES),
            store,
            azure,
            clock,
            lambda _: names_us,
        )
        task = asyncio.create_task(gate.run())
        try:
            yield GateHarness(path, clock, azure, store, gate)
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            await asyncio.wait({task})
