"""A hub with a real gate and store, and the far side of its orders: agents, RabbitMQ and Azure.

Azure's clock is the monotonic clock of the test, so the hub's wall clock can be wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, cast

import orjson

from relay.approvals import ApprovalsSettings
from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import Gate
from relay.errors import Deferred
from relay.events.build import Origin, common_event_data
from relay.events.cloudevent import CloudEvent
from relay.events.model import ScheduledEvent
from relay.fleet.hub.link import HubLink
from relay.fleet.hub.merger import EventMerger, Heard
from relay.fleet.hub.roster import Roster
from relay.fleet.hub.start_orders import OrderPort
from relay.fleet.messages import (
    ChangeData,
    Pulse,
    StartOrder,
    StartOutcome,
    StartResult,
    read_message,
)
from relay.fleet.routing import AuthorizedSender
from relay.store import StateFileScopeAndVm, StoreSettings
from relay.store.journal import JournalRow
from relay.store.sqlite import Store, open_store
from tests.approvals.builders import build_event
from tests.clocks import NOON, ManualClock
from tests.store.open_store import read_journal

HUB = Origin("hub", "hub-1")
SETTINGS = ApprovalsSettings.model_validate(
    {"rules": [{"name": "users", "match": {"event_source": ["User"]}, "approve": "automatic"}]}
)
Mode = Literal["prompt", "frozen", "mute", "twice", "liar", "stale", "blind"]
"""What an agent does with an order.

- ``prompt``: it obeys and answers at once. ``twice``: it answers twice, and not the same.
- ``frozen``: it does nothing until it wakes up.
- ``mute``: it obeys at once, and its answer waits.
- ``liar``: it sends nothing, and says that IMDS has accepted.
- ``stale``: it sends nothing, and says that the order is stale.
- ``blind``: the event is not in its document.
"""


def user_event(event_id: str = "E-1", **changes: Any) -> ScheduledEvent:
    fields: dict[str, Any] = {"event_source": "User", "resources": ("vm-9",), "due": None}
    return build_event(event_id, **fields | changes)


@dataclass(eq=False)
class PublishedOrder:
    scope: str
    agent: str
    order: StartOrder
    sent_at: float
    done: bool = False
    """Whether the agent will not carry it out any more, by its own word."""


@dataclass(eq=False)
class FakeAgent:
    scope: str
    relay: str
    user: str
    mode: Mode = "prompt"
    is_bound: bool = True
    is_silent: bool = False
    """Whether it sends no pulse."""
    clock_offset: float = 0.0
    pending: list[PublishedOrder] = field(default_factory=list)
    unsent: list[StartResult] = field(default_factory=list)
    """Answers that wait."""

    @property
    def sender(self) -> AuthorizedSender:
        """The agent as RabbitMQ vouches for it."""
        return AuthorizedSender(self.scope, self.relay, self.user)

    def pulse(self, document: Iterable[ScheduledEvent]) -> Pulse:
        return Pulse(
            vm_id=f"id-of-{self.relay}",
            version="1.0.0",
            names=(self.relay,),
            live=tuple(ChangeData(**common_event_data(event, 1)) for event in document),
            poll_age=0.5,
            clock_offset=self.clock_offset,
        )


@dataclass(frozen=True)
class SentPulse:
    pulse: Pulse
    sent_at: datetime


@dataclass(frozen=True)
class Post:
    scope: str
    agent: str
    event_id: str


class Fleet:
    """The agents, RabbitMQ between them and the hub, and Azure. It checks every order."""

    def __init__(self, clock: ManualClock, agents: Iterable[str]) -> None:
        """``agents`` are written as ``<scope>/<relay>``."""
        self.clock = clock
        self._began = clock.monotonic()
        self.agents: dict[tuple[str, str], FakeAgent] = {}
        for name in agents:
            scope, relay = name.split("/")
            self.agents[scope, relay] = FakeAgent(scope, relay, user=f"user-{scope}")
        self.documents: dict[str, dict[str, ScheduledEvent]] = {
            scope: {} for scope, _ in self.agents
        }
        self.orders: list[PublishedOrder] = []
        self.posts: list[Post] = []
        self.status = 200
        """The answer of IMDS to a StartRequest."""
        self.starts_events = True
        """Whether an accepted event is Started at once."""
        self.publish: Literal["works", "down", "unconfirmed", "lost"] = "works"
        """down: nothing is sent. unconfirmed, lost: the connection is lost before the confirm."""
        self.connected_at: float
        """When the hub has connected, by the monotonic clock."""
        self.inbox: asyncio.Queue[tuple[FakeAgent, StartResult | SentPulse]] = asyncio.Queue()
        self.may_hear = asyncio.Event()
        self.may_hear.set()
        self.hub: Hub
        self._sent_at = self.azure_now()

    def agent(self, name: str) -> FakeAgent:
        scope, relay = name.split("/")
        return self.agents[scope, relay]

    def azure_now(self) -> datetime:
        return NOON + timedelta(seconds=self.clock.monotonic() - self._began)

    def azure_says(self, scope: str, *events: ScheduledEvent) -> None:
        self.documents[scope].update({event.lowercase_event_id: event for event in events})

    # --- the hub's side of RabbitMQ

    @property
    def connected_since(self) -> float | None:
        return None if self.publish == "down" else self.connected_at

    async def send(self, key: str, event: CloudEvent) -> bool:
        await asyncio.sleep(0)
        if self.publish == "down":
            raise Deferred("no connection")
        order = read_message(event.body).content
        assert isinstance(order, StartOrder)
        to, scope, relay = key.split(".")
        assert to == "to"
        sent = PublishedOrder(scope, relay, order, self.clock.monotonic())
        self._check(sent)
        agent = self.agents[scope, relay]
        if not agent.is_bound:
            return False
        self.orders.append(sent)
        if self.publish != "lost":
            self._receive(agent, sent)
        if self.publish != "works":
            raise Deferred("the connection was lost")
        return True

    def is_executable(self, sent: PublishedOrder) -> bool:
        return not sent.done and self.azure_now() < sent.order.deadline

    def _others(self, sent: PublishedOrder) -> list[PublishedOrder]:
        about = sent.scope, sent.order.event_id
        return [
            other
            for other in self.orders
            if other is not sent and (other.scope, other.order.event_id) == about
        ]

    def _check(self, sent: PublishedOrder) -> None:
        order, hub_now = sent.order, self.clock.now()
        granted = self.hub.granted(order.grant)
        assert (sent.scope, order.event_id.lower(), order.revision) == granted, "misrouted"
        assert order.deadline <= hub_now + timedelta(seconds=5)
        event = self.documents[sent.scope].get(order.event_id.lower())
        if event is not None and event.revision == order.revision and event.not_before_time:
            assert order.deadline <= event.not_before_time
        for other in self._others(sent):
            assert not self.is_executable(other), "two orders at the same time"
        known = self.hub.roster.agent(sent.scope, sent.agent)
        assert known is not None
        assert known.clock_offset is not None, "nobody knows whether its clock is right"
        # A pulse that comes while the claim is written is too late for this order.
        is_new = known.last_pulse is not None and hub_now - known.last_pulse <= timedelta(seconds=1)
        assert abs(known.clock_offset) <= 2 or is_new, "its clock is wrong"
        assert order.vm_id == known.vm_id
        claims = {(note["granted"], note["attempt"]): note for note in self.hub.claim_notes()}
        assert claims[order.grant, order.attempt]["agent"] == sent.agent

    # --- agents

    def _receive(self, agent: FakeAgent, sent: PublishedOrder) -> None:
        if agent.mode == "frozen":
            agent.pending.append(sent)
            return
        result = self._execute(agent, sent)
        if agent.mode == "mute":
            agent.unsent.append(result)
            return
        self.answer(agent, result)
        if agent.mode == "twice":
            other: StartOutcome = "stale" if result.result == "accepted" else "accepted"
            self.answer(agent, result_of(sent.order, other))

    def _execute(self, agent: FakeAgent, sent: PublishedOrder) -> StartResult:
        """Do what an agent does, which never sends a StartRequest after the deadline."""
        order = sent.order
        sent.done = True
        if agent.mode == "liar":
            return result_of(order, "accepted")
        if agent.mode == "stale" or self.azure_now() >= order.deadline:
            return result_of(order, "stale")
        event = self.documents[agent.scope].get(order.event_id.lower())
        if (
            agent.mode == "blind"
            or event is None
            or event.revision != order.revision
            or event.is_started
        ):
            return result_of(order, "changed")
        for other in self._others(sent):
            assert not self.is_executable(other), "two orders at the same time"
        self.posts.append(Post(agent.scope, agent.relay, event.event_id))
        if self.status == 200 and self.starts_events:
            self.start_event(agent.scope, event.event_id)
        outcomes: dict[int, StartOutcome] = {200: "accepted", 400: "refused"}
        return result_of(order, outcomes.get(self.status, "failed"), self.status or None)

    def start_event(self, scope: str, event_id: str) -> None:
        key = event_id.lower()
        event = self.documents[scope][key]
        self.documents[scope][key] = replace(event, event_status="Started")

    def wake_up(self, agent: FakeAgent, mode: Mode = "prompt") -> None:
        agent.mode = mode
        pending, agent.pending = agent.pending, []
        for sent in pending:
            self._receive(agent, sent)

    def answer(self, agent: FakeAgent, result: StartResult) -> None:
        self.inbox.put_nowait((agent, result))

    def send_late_answers(self, agent: FakeAgent) -> None:
        unsent, agent.unsent = agent.unsent, []
        for result in unsent:
            self.answer(agent, result)

    def send_pulse(self, agent: FakeAgent) -> None:
        if not agent.is_silent:
            pulse = agent.pulse(self.documents[agent.scope].values())
            # An agent never gives one time twice.
            self._sent_at = max(self.azure_now(), self._sent_at + timedelta.resolution)
            self.inbox.put_nowait((agent, SentPulse(pulse, self._sent_at)))

    def send_pulses(self) -> None:
        for agent in self.agents.values():
            self.send_pulse(agent)


def result_of(order: StartOrder, outcome: StartOutcome, status: int | None = None) -> StartResult:
    return StartResult(
        grant=order.grant,
        attempt=order.attempt,
        result=outcome,
        status=status,
        reason=None if outcome == "accepted" else f"it is {outcome}",
    )


class Hub:
    """One process of the hub: a gate with its port on a store, and a small intake."""

    def __init__(self, path: Path, fleet: Fleet, store: Store, earlier: Hub | None) -> None:
        self.path, self.fleet, self.store = path, fleet, store
        clock = fleet.clock
        self.roster: Roster = Roster(earlier.roster if earlier is not None else ())
        self.roster.note_listening(clock.now())
        link = cast("HubLink", fleet)
        self.merger = EventMerger(HUB, store, clock, Roster(), link)
        self.port = OrderPort(store, self.roster, self.merger, link, HUB, clock)
        self.gate = Gate(ApprovalEngine(SETTINGS, HUB), store, self.port, clock, lambda _: False)
        fleet.hub, fleet.connected_at = self, clock.monotonic()

    task: asyncio.Task[None]

    async def run(self) -> None:
        with self.gate.in_force():
            async with asyncio.TaskGroup() as group:
                group.create_task(self.gate.run())
                group.create_task(self._take_in())

    async def _take_in(self) -> None:
        while True:
            agent, message = await self.fleet.inbox.get()
            await self.fleet.may_hear.wait()
            if isinstance(message, StartResult):
                self.port.on_result(agent.sender, message)
            else:
                await self._record(agent, message)

    async def _record(self, agent: FakeAgent, sent: SentPulse) -> None:
        self.roster.note_message(agent.sender, agent.relay, self.fleet.clock.now(), sent.pulse)
        events = [event.to_scheduled_event() for event in sent.pulse.live or ()]
        words = {event.lowercase_event_id: event for event in events}
        document = Heard(
            scope=agent.scope, relay=agent.relay, seen=sent.sent_at, words=words, is_document=True
        )
        await self.merger.merge([document])

    # --- what is on disk

    def journal(self) -> list[JournalRow]:
        return read_journal(self.path)

    def claim_notes(self) -> list[dict[str, Any]]:
        return [orjson.loads(row.body) for row in self.journal() if row.kind == "claim"]

    def event_names(self, prefix: str = "startrequest.") -> list[str]:
        return [row.kind for row in self.journal() if row.kind.startswith(prefix)]

    def granted(self, grant_id: int) -> tuple[str, str, str]:
        """Return the scope, the EventId in lower case and the revision of a grant."""
        row = next(row for row in self.journal() if row.position == grant_id)
        event = CloudEvent.parse(row.body)
        assert row.event_key is not None
        return event.scope, row.event_key.rpartition("@")[0], event.data["revision"]

    async def settle(self) -> None:
        """Wait until the gate and the intake wait for the clock or for a message."""
        ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]  # noqa: SLF001
        quiet = 0
        while quiet < 6:  # one piece of work in the store can follow from another
            await self.store.read(lambda _: None)  # the work that they gave the store is done
            quiet += 1
            while ready:
                quiet = 0
                await asyncio.sleep(0)

    async def advance(self, seconds: float, *, step: float = 0.25) -> None:
        left = seconds
        while left > 1e-9:
            self.fleet.clock.advance(min(step, left))
            left -= step
            await self.settle()


@asynccontextmanager
async def running_hub(path: Path, fleet: Fleet, earlier: Hub | None = None) -> AsyncIterator[Hub]:
    """Run a hub. Leaving the context kills it; another one can begin with its file."""
    owner, settings = StateFileScopeAndVm(HUB.scope, None, is_hub=True), StoreSettings(path=path)
    async with open_store(settings, owner, fleet.clock, lambda _: ()) as store:
        hub = Hub(path, fleet, store, earlier)
        await hub.merger.load()
        hub.task = task = asyncio.create_task(hub.run())
        try:
            yield hub
            if task.done() and not task.cancelled():
                await task
        finally:
            task.cancel()
            await asyncio.wait({task})
