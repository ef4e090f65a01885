"""A gate that runs on a real store with a manual clock, and a stub in place of IMDS.

`MachineOnFile` is what the state machines of Hypothesis share.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from hypothesis.stateful import RuleBasedStateMachine
from typing_extensions import override  # in typing from Python 3.12

from relay.approvals import ApprovalsSettings, ClaimedGrant
from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import Gate
from relay.approvals.limits import CountMachines
from relay.approvals.request import DecisionAnswer
from relay.errors import SourceError, SourceRefused, SourceUnavailable, StartRequestNotDelivered
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.events.model import Document, ScheduledEvent
from relay.ingest import EventNews, Recorder, SuccessfulPoll
from relay.store import Grant, StateFileScopeAndVm, StoreSettings
from relay.store.journal import JournalRow
from relay.store.sqlite import Store, Work, open_store
from relay.store.transaction import Transaction
from tests.approvals.builders import (
    BOOT_ID,
    CLIENT_RESOURCES,
    ORIGIN,
    SETTINGS,
    build_creation,
    build_end,
    build_request,
    events_in,
)
from tests.clocks import NOON, ManualClock
from tests.eventually import eventually
from tests.store.open_store import read_journal

REFUSED = SourceRefused("expected 200, got 400", status=400)
UNAVAILABLE = SourceUnavailable("expected 200, got 503", status=503)
TIMEOUT = SourceUnavailable("expected an answer within 10s, none came whole")
ANSWERS: dict[str, SourceError | None] = {
    "200": None,
    "400": REFUSED,
    "503": UNAVAILABLE,
    "timeout": TIMEOUT,
}
NOBODY = SourceUnavailable("no agent of the scope answers")
RETURNED = StartRequestNotDelivered("the broker returned the StartRequest: no queue takes it")

_MEMORY = Path("/dev/shm")  # noqa: S108  # in memory, because no test cuts the power


class Azure:
    """IMDS as the gate sees it: a document to read, and answers to StartRequests."""

    def __init__(
        self,
        clock: ManualClock,
        *events: ScheduledEvent,
        answers: Sequence[SourceError | None] = (),
        agents: Sequence[str] | None = None,
    ) -> None:
        """``agents`` can execute a StartRequest; None: IMDS itself does."""
        self.document: tuple[ScheduledEvent, ...] = events
        self.answers = deque(answers)
        """The next answers to StartRequests; None, or nothing left: 200."""
        self.read_errors: deque[SourceError] = deque()
        self.agents = list(agents) if agents is not None else None
        self.claims: list[ClaimedGrant] = []
        """The claims of all StartRequests that were sent."""
        self.sent: list[str] = []
        self.reads = 0
        self.in_flight_count = 0
        self.after_read: Callable[[], object] = lambda: None
        self.may_read, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_read.set()
        self.may_answer.set()
        self.store: Store
        self.clock = clock
        self._recorder = Recorder(ORIGIN, BOOT_ID, frozenset({"db-1"}))

    async def refresh_event(self, _scope: str, _grant: Grant) -> None:
        """Read and record the document, once the test allows it."""
        self.reads += 1
        await self.may_read.wait()
        if self.read_errors:
            raise self.read_errors.popleft()
        await self.poll()
        self.after_read()

    async def poll(self) -> None:
        """Record the document as a poll does."""
        result = SuccessfulPoll(Document(1, self.document), self.clock.now(), gap=False)
        await self.store.transact(lambda tx: self._recorder.record(tx, result), fail_open=True)

    def choose_agent(self, _scope: str, _grant: Grant) -> str | None:
        if self.agents is None:
            return None
        if not self.agents:
            raise NOBODY
        return self.agents[0]

    async def send_start_request(self, _scope: str, claim: ClaimedGrant) -> None:
        """Answer a StartRequest, once the test allows it."""
        assert self.in_flight_count == 0, "two StartRequests in flight"
        self.in_flight_count += 1
        try:
            self.claims.append(claim)
            self.sent.append(claim.event_id)
            await self.may_answer.wait()
        finally:
            self.in_flight_count -= 1
        answer = self.answers.popleft() if self.answers else None
        if isinstance(answer, StartRequestNotDelivered) and self.agents and self.agents[1:]:
            del self.agents[0]  # it is not chosen again, unless there is nobody else
        if answer is not None:
            raise answer


class ScopeOfFleet(Azure):
    """One scope as the hub of a fleet sees it. Its agents execute one StartRequest at a time."""

    def __init__(
        self,
        clock: ManualClock,
        scope: str,
        *events: ScheduledEvent,
        answers: Sequence[SourceError | None] = (),
        agents: Sequence[str] = ("vm-0",),
    ) -> None:
        super().__init__(clock, *events, answers=answers, agents=agents)
        self.scope = scope
        self._live_keys: set[str] = set()

    @override
    async def poll(self) -> None:
        """Record the document as the hub does from the reports of its agents."""
        keys, now = {event.lowercase_event_id for event in self.document}, self.clock.now()
        news: list[EventNews] = [
            *(EventNews(self.scope, now, event.event_id, event, 1) for event in self.document),
            *(EventNews(self.scope, now, key) for key in sorted(self._live_keys - keys)),
        ]
        self._live_keys = keys
        await self.store.transact(
            lambda tx: self._recorder.record_observations(tx, news, now), fail_open=True
        )


class Fleet:
    """The port of a hub: each scope is asked by itself."""

    def __init__(self, scopes: Sequence[ScopeOfFleet]) -> None:
        self.scopes = {scope.scope: scope for scope in scopes}

    async def refresh_event(self, scope: str, grant: Grant) -> None:
        await self.scopes[scope].refresh_event(scope, grant)

    def choose_agent(self, scope: str, grant: Grant) -> str | None:
        return self.scopes[scope].choose_agent(scope, grant)

    async def send_start_request(self, scope: str, claim: ClaimedGrant) -> None:
        await self.scopes[scope].send_start_request(scope, claim)


class GateHarness:
    def __init__(
        self, path: Path, azure: Azure, store: Store, gate: Gate, task: asyncio.Task[None]
    ) -> None:
        self.path, self.azure, self.store, self.gate, self._task = path, azure, store, gate, task
        self.clock = azure.clock

    def check_running(self) -> None:
        if self._task.done():
            self._task.result()
            raise AssertionError("the gate has ended")

    async def record_document(self, *events: ScheduledEvent) -> None:
        self.azure.document = events
        await self.azure.poll()

    async def submit(self, *given: Any, **changes: Any) -> DecisionAnswer:
        return await self.gate.submit(build_request(*given, at=self.clock.now(), **changes))

    async def hold_ahead(self, *given: Any, **changes: Any) -> DecisionAnswer:
        return await self.gate.submit(build_creation(*given, at=self.clock.now(), **changes))

    async def end_ahead(self, hold_id: str) -> DecisionAnswer:
        return await self.gate.submit(build_end(hold_id, at=self.clock.now()))

    def journal(self) -> list[JournalRow]:
        return read_journal(self.path)

    def events(self, *names: str) -> list[CloudEvent]:
        return events_in(self.journal(), *names)

    def kinds(self) -> list[str]:
        return [row.kind for row in self.journal()]

    def claim_notes(self) -> list[dict[str, Any]]:
        return [orjson.loads(row.body) for row in self.journal() if row.kind == "claim"]

    async def wait_for_events(self, name: str, count: int = 1) -> list[CloudEvent]:
        await eventually(lambda: len(self.events(name)) >= count)
        # Otherwise the test could advance the clock before the gate sleeps.
        await self.settle()
        return self.events(name)

    async def wait_for_start_requests(self, count: int) -> None:
        """Wait until so many StartRequests were sent, and the gate waits for what comes next."""
        await eventually(lambda: len(self.azure.sent) == count)
        await self.settle()

    async def block_store(self, until: threading.Event) -> asyncio.Event:
        """Let the thread of the store wait. Return what is set when an answer waits for it."""
        begun, answered, submit = threading.Event(), asyncio.Event(), self.store.submit

        def wait(_: Transaction) -> None:
            begun.set()
            until.wait(30)

        def watch(work: Work[Any], *, fail_open: bool = False) -> asyncio.Future[Any]:
            job = submit(work, fail_open=fail_open)
            if fail_open:
                answered.set()
            return job

        self.store.submit(wait)
        await eventually(begun.is_set)
        self.store.read = partial(submit, fail_open=True)  # type: ignore[method-assign,assignment]  # no answer
        self.store.submit = watch  # type: ignore[method-assign]
        return answered

    async def deliver_everything(self) -> None:
        def settle_entries(tx: Any) -> None:
            for entry in tx.deliveries.waiting_entries():
                tx.deliveries.store_final_state(entry.id, "delivered", None, NOON)

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
    answers: Sequence[SourceError | None] = (),
    agents: Sequence[str] | None = None,
    count_machines: CountMachines = lambda _: 0,
) -> AsyncIterator[GateHarness]:
    """Run a gate on the store in a folder. Leaving the context kills it.

    The gate has not begun to run yet.
    """
    azure = Azure(clock or ManualClock(), *events, answers=answers, agents=agents)
    engine = ApprovalEngine(
        settings, ORIGIN, client_resources=CLIENT_RESOURCES, count_machines=count_machines
    )
    owner = StateFileScopeAndVm(ORIGIN.scope, "vm")
    async with _running(
        folder, owner, engine, azure, azure, sinks=sinks, names_us=names_us
    ) as harness:
        yield harness


@asynccontextmanager
async def running_hub(
    folder: Path, *scopes: ScopeOfFleet, settings: ApprovalsSettings = SETTINGS
) -> AsyncIterator[GateHarness]:
    """Run the gate of a hub on the store in a folder. Leaving the context kills it."""
    engine = ApprovalEngine(settings, Origin("hub", "hub-0"), client_resources=CLIENT_RESOURCES)
    owner = StateFileScopeAndVm("hub", "vm", is_hub=True)
    async with _running(folder, owner, engine, Fleet(scopes), *scopes) as harness:
        yield harness


@asynccontextmanager
async def _running(
    folder: Path,
    owner: StateFileScopeAndVm,
    engine: ApprovalEngine,
    port: Azure | Fleet,
    *scopes: Azure,
    sinks: Sequence[str] = (),
    names_us: bool = False,
) -> AsyncIterator[GateHarness]:
    path, clock = folder / "relay.db", scopes[0].clock
    async with open_store(StoreSettings(path=path), owner, clock, lambda _: sinks) as store:
        for scope in scopes:
            scope.store = store
            await scope.poll()
        gate = Gate(engine, store, port, clock, lambda _: names_us)
        with gate.in_force():
            task = asyncio.create_task(gate.run())
            try:
                yield GateHarness(path, scopes[0], store, gate, task)
                assert not task.done(), task.exception()
            finally:
                task.cancel()
                await asyncio.wait({task})


def start_request_tasks() -> list[str]:
    return [
        task.get_name() for task in asyncio.all_tasks() if "StartRequests in" in task.get_name()
    ]


class MachineOnFile(RuleBasedStateMachine):
    """A machine with a folder that is gone afterwards, as is all that `closing` was given."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = ExitStack()
        folder = tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)
        self.folder = Path(self.closing.enter_context(folder))

    @override
    def teardown(self) -> None:
        self.closing.close()
