"""The agents of a simulated fleet, and the simulated Azure of each of their scopes.

Towards the broker and the hub each agent is a real one: the same connection, reports, pulses,
orders and votes. Only what is behind it is light: a `SimulatedScope` in place of the metadata
service, without HTTP, and a `LightRecorder` and an `_AgentOutbox` in place of the state file. So a
change that was recorded is lost if the process ends. `bench.simulated_fleet` runs them.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any
from uuid import uuid4

import orjson
from typing_extensions import override  # in typing from Python 3.12

from relay.approvals.request import Caller, DecisionRequest, Rights
from relay.clock import Clock
from relay.errors import DeliveryError, SourceCallNotSentInTime, SourceRefused, Superseded
from relay.events.build import (
    FactsAboutEndedEvent,
    Origin,
    change_event,
    common_event_data,
    determine_outcome,
    transition_digest,
)
from relay.events.cloudevent import CloudEvent
from relay.events.model import Change, Document, ScheduledEvent, diff_events_with_document
from relay.fleet.agent.agent import Agent, VmIdentity
from relay.fleet.agent.report_sink import ReportSink
from relay.fleet.messages import HubScopeState, Pulse, StartOrder, StartResult, VoteAnswer
from relay.fleet.settings import AgentSettings
from relay.imds.document import parse_document
from relay.imds.poller import FreshReadResult
from relay.ingest.recorder import names_this_vm
from relay.simulator import VM, Event, Plan, Setup, UnknownEvent
from relay.simulator.scope import PastTransition, Scope

MIN_STAY = 2.5
"""Seconds that an event stays Scheduled, and stays Started. Every agent sees each state."""
CONNECT_TIMEOUT = 60.0
"""Seconds that an agent may take to connect and to make its queue."""
RETRY_DELAY = 1.0
"""Seconds, up to twice as many, until an agent tries again to publish a report."""
MAX_KNOWN_STATES = 1000
"""States of which a scope remembers what was computed about them."""
_CHANGES = ("scheduled", "updated", "started", "completed", "canceled")

OnRecorded = Callable[[Origin, CloudEvent, bool], None]
"""Gets an event that an agent recorded, and whether the event names the VM of the agent."""


@dataclass(slots=True)
class Counters:
    """What the simulated fleet has done so far."""

    changes: int = 0
    """Changes of the documents."""
    recorded: int = 0
    """Events that agents recorded: each agent of a scope records each change."""
    published: int = 0
    """Of these, the reports that the broker has confirmed."""
    superseded: int = 0
    """Of these, the copies that were left out because the hub had the event from another agent."""
    deferred: int = 0
    """Tries to publish that failed, and were or will be repeated."""
    pulses: int = 0
    states: int = 0
    """States of the hub that agents received."""
    orders: int = 0
    start_requests: int = 0
    """Orders that were carried out: the simulated Azure got a StartRequest."""
    results: int = 0
    """Results of orders that the broker has confirmed."""
    votes: int = 0
    """Votes of machines that were asked for."""
    accepted_votes: int = 0
    """Of these, those that the hub accepted."""

    @property
    def unpublished_reports(self) -> int:
        """Events that agents have recorded, and neither published nor left out yet."""
        return self.recorded - self.published - self.superseded

    def duplicate_reports_per_change(self) -> float:
        """Return how many reports reached the hub for each change, beside the first."""
        return (self.published - self.changes) / self.changes if self.changes else 0.0


class LightRecorder:
    """Records changes of a document as `relay.ingest.recorder` does, in memory.

    The ids are the same, because a simulated EventId never comes back. ``known`` may be shared by
    the agents of a scope, who record the same.
    """

    def __init__(self, origin: Origin, known: EventStateCache) -> None:
        self._origin = origin
        self._known = known
        self._events: dict[str, ScheduledEvent] = {}
        self._data: dict[str, Mapping[str, Any]] = {}

    def make_change_events(self, document: Document, at: datetime) -> list[CloudEvent]:
        """Return an event for each change since the last document."""
        changes = diff_events_with_document(self._events.values(), document)
        recorded = []
        for change in changes:
            outcome = None
            key = change.event.lowercase_event_id
            if change.kind == "ended":
                data = self._data.pop(key)
                evidence = FactsAboutEndedEvent(start_sent=False, gap=False, rebooted=False)
                outcome = determine_outcome(change.event, evidence, at)
            else:
                data = self._data[key] = self._known.data(change.event, document.incarnation)
            recorded.append(
                change_event(
                    change,
                    self._origin,
                    at,
                    data=data,
                    transition=self._known.transition_digest(change, self._origin),
                    previous_count=0,
                    approved_by_relay=False,
                    outcome=outcome,
                )
            )
        if changes:
            self._events = {event.lowercase_event_id: event for event in document.events}
        return recorded


class EventStateCache:
    """What has been computed about the states of the events of one scope."""

    def __init__(self) -> None:
        self.data = lru_cache(MAX_KNOWN_STATES)(common_event_data)
        self._transitions: dict[tuple[str, ScheduledEvent], str] = {}

    def transition_digest(self, change: Change, origin: Origin) -> str:
        """Return `transition_digest` of a change, for any agent of the scope."""
        key = (change.kind, change.event)
        if key not in self._transitions:
            self._transitions[key] = transition_digest(change, origin)
            if len(self._transitions) > MAX_KNOWN_STATES:
                del self._transitions[next(iter(self._transitions))]
        return self._transitions[key]


class _AgentOutbox:
    """The outbox of one agent, in memory: in order per event, and again after a failure."""

    def __init__(self, sink: ReportSink, clock: Clock, counters: Counters) -> None:
        self._sink = sink
        self._clock = clock
        self._counters = counters
        self._waiting: dict[str, deque[CloudEvent]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(sink.concurrency)

    def add(self, event: CloudEvent) -> None:
        """Publish an event after those about the same EventId."""
        key = event.data["eventId"]
        self._counters.recorded += 1
        if key in self._waiting:
            self._waiting[key].append(event)
            return
        self._waiting[key] = deque([event])
        task = asyncio.create_task(self._publish_in_order(key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drop_unpublished(self) -> None:
        """Drop what was not published."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _publish_in_order(self, key: str) -> None:
        waiting = self._waiting[key]
        while waiting:
            try:
                async with self._slots:
                    await self._sink.deliver(waiting[0])
            except Superseded:
                self._counters.superseded += 1
            except DeliveryError:
                self._counters.deferred += 1
                await self._clock.sleep(RETRY_DELAY * (1 + random.random()))  # noqa: S311  # no secret
                continue
            else:
                self._counters.published += 1
            waiting.popleft()
        del self._waiting[key]


class _MessageCountingAgent(Agent):
    """A real agent whose messages are counted."""

    def __init__(
        self,
        settings: AgentSettings,
        origin: Origin,
        machine: VmIdentity,
        clock: Clock,
        counters: Counters,
    ) -> None:
        names = machine.names or frozenset()
        super().__init__(
            settings, origin, machine, lambda resources: names_this_vm(resources, names), clock
        )
        self._counters = counters
        self.listens = asyncio.Event()

    @override
    def on_agent_listening_to_hub(self) -> None:
        super().on_agent_listening_to_hub()
        self.listens.set()

    @override
    def handle_order(self, order: StartOrder) -> None:
        self._counters.orders += 1
        super().handle_order(order)

    @override
    def handle_events_known_to_hub(self, state: HubScopeState) -> None:
        self._counters.states += 1
        super().handle_events_known_to_hub(state)

    @override
    def handle_vote_answer(self, answer: VoteAnswer) -> None:
        self._counters.accepted_votes += answer.status == 202
        super().handle_vote_answer(answer)

    @override
    def _send_pulse(self, pulse: Pulse) -> None:
        self._counters.pulses += 1
        super()._send_pulse(pulse)

    @override
    async def _publish_result(self, result: StartResult) -> None:
        await super()._publish_result(result)
        self._counters.results += 1


class SimulatedAgent:
    """An agent and its VM. It polls the document of its scope at its own moments.

    It is what the agent reads, and where the agent sends StartRequests.
    """

    def __init__(
        self,
        settings: AgentSettings,
        scope: SimulatedScope,
        vm: str,
        clock: Clock,
        counters: Counters,
        on_recorded: OnRecorded,
    ) -> None:
        self.origin = Origin(scope.name, vm)
        self.last_document: Document | None = None
        self.clock_offset: float | None = 0.0
        self._scope = scope
        self._vm = vm
        self._clock = clock
        self._counters = counters
        self._on_recorded = on_recorded
        self._names = frozenset({vm.lower()})
        self._first_poll = clock.monotonic() + random.random() * scope.poll_interval  # noqa: S311  # no secret
        self._timer: asyncio.TimerHandle | None = None
        self._recorder = LightRecorder(self.origin, scope.known)
        machine = VmIdentity(vm_id=str(uuid4()), boot_id=str(uuid4()), zone="1", names=self._names)
        self._agent = _MessageCountingAgent(settings, self.origin, machine, clock, counters)
        self._agent.attach_source(self, self)
        self._reports = _AgentOutbox(self._agent.report_sink, clock, counters)

    async def connect(self, group: asyncio.TaskGroup) -> None:
        """Start the agent; return once it hears the hub. Raises TimeoutError."""
        group.create_task(self._agent.run(), name=f"agent {self._vm}")
        async with asyncio.timeout(CONNECT_TIMEOUT):
            await self._agent.listens.wait()
        self._poll_document()

    async def stop_and_drop_unpublished(self) -> None:
        """Poll no more, and drop what was not published."""
        if self._timer is not None:
            self._timer.cancel()
        await self._reports.drop_unpublished()

    def schedule_poll_at_next_interval(self) -> None:
        """The document has changed: read it with the next poll."""
        if self._timer is None and self.last_document is not None:
            since = self._clock.monotonic() - self._first_poll
            seconds = self._scope.poll_interval - since % self._scope.poll_interval
            self._timer = asyncio.get_running_loop().call_later(seconds, self._poll_document)

    def _poll_document(self) -> None:
        self._timer = None
        self.last_document = document = self._scope.document
        for event in self._recorder.make_change_events(document, self._clock.now()):
            is_named = names_this_vm(event.data["resources"], self._names)
            self._on_recorded(self.origin, event, is_named)
            self._reports.add(event)

    @property
    def read_age(self) -> float | None:
        """The seconds since the last poll; None: there was none.

        Polls of a document that has not changed count, although they are left out.
        """
        if self.last_document is None:
            return None
        return (self._clock.monotonic() - self._first_poll) % self._scope.poll_interval

    async def read_with_imds_time(self) -> FreshReadResult:
        """Read the document now."""
        now = self._clock.now()
        date = now.replace(microsecond=0)
        return FreshReadResult(self._scope.document, date, now, self._clock.monotonic())

    async def send_start_request(
        self, event_ids: Sequence[str], *, seconds_left: Callable[[], float]
    ) -> None:
        """Approve events at the simulated Azure.

        Raises SourceCallNotSentInTime or SourceRefused.
        """
        if seconds_left() <= 0:
            raise SourceCallNotSentInTime("the deadline has passed")
        try:
            self._scope.azure.accept_start_request(event_ids, self._vm)
        except UnknownEvent as error:
            raise SourceRefused(str(error), status=400) from None
        self._counters.start_requests += 1

    async def vote(self, event: ScheduledEvent) -> None:
        """Approve an event, as a program on the VM does."""
        self._counters.votes += 1
        caller = Caller("local:simulated", "local", Rights(can=frozenset({"approve"})))
        await self._agent.votes.submit(
            DecisionRequest(
                caller=caller,
                event_id=event.event_id,
                decision="approve",
                revision=event.revision,
                at=self._clock.now(),
                request_id=uuid4().hex,
            )
        )


class SimulatedScope:
    """The simulated Azure of one scope, and its agents. It makes one change after the other."""

    def __init__(
        self,
        name: str,
        vms: Sequence[str],
        clock: Clock,
        counters: Counters,
        poll_interval: float,
        new_id: Callable[[], str],
    ) -> None:
        self.name = name
        self.agents: list[SimulatedAgent] = []
        self.poll_interval = poll_interval
        self.known = EventStateCache()
        self._clock = clock
        self._counters = counters
        self._document: Document | None = None
        self._changed_at: dict[str, float] = {}  # of each live event, in the order of changes
        self._next_vm = 0
        self._vms = vms
        self.azure = Scope(
            Setup(vms=tuple(map(VM, vms))),
            clock=clock,
            new_id=new_id,
            on_transition=self._on_transition,
        )

    @property
    def document(self) -> Document:
        """The document as it is now."""
        if self._document is None:
            self._document = parse_document(orjson.dumps(self.azure.document()))
        return self._document

    def advance_oldest_or_schedule_event(self) -> ScheduledEvent | None:
        """Make one change. Return the event if it is a new one."""
        oldest = next(iter(self._changed_at), None)
        stay = max(MIN_STAY, 2 * self.poll_interval)
        if oldest is not None and self._clock.monotonic() - self._changed_at[oldest] >= stay:
            event = self.azure.event(oldest)
            if event.status == "Scheduled":
                self.azure.start(event)
            else:
                self.azure.end(event)
            return None
        vm = self._vms[self._next_vm % len(self._vms)]
        self._next_vm += 1
        made = self.azure.schedule(Plan(resources=(vm,), lasts=None))
        return next(event for event in self.document.events if event.event_id == made.event_id)

    def find_agent_of_affected_vm(self, event: ScheduledEvent) -> SimulatedAgent | None:
        """Return the agent of the VM that an event names."""
        return next((agent for agent in self.agents if agent.origin.relay in event.resources), None)

    def _on_transition(self, transition: PastTransition) -> None:
        event: Event | None = transition.event
        if event is None or transition.kind not in _CHANGES:
            return
        self._counters.changes += 1
        self._document = None
        self._changed_at.pop(event.event_id, None)
        if event.is_live:
            self._changed_at[event.event_id] = self._clock.monotonic()
        for agent in self.agents:
            agent.schedule_poll_at_next_interval()
