"""The parts of a relay that the API uses, and what the server remembers between calls.

The roles of the relay attach their parts once they run, and detach them before they stop. Until
then a call that needs the relay is answered 503.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol
from weakref import WeakValueDictionary

from relay.api.callers import Callers, CallRates
from relay.api.connections import ServerLimits
from relay.api.responses import too_many
from relay.approvals.gate import DecisionHandler
from relay.chat import ChatSink
from relay.clock import Clock, Histogram
from relay.delivery.dispatcher import Dispatcher
from relay.events.build import Origin
from relay.store import RecordedEvent
from relay.store.sqlite import Store
from relay.telemetry.lines import EventCounts

if TYPE_CHECKING:  # a relay without them saves the memory of the AMQP and token libraries
    from relay.amqp.approval_consumer import ApprovalConsumer
    from relay.fleet.hub.hub import Hub
    from relay.fleet.hub.roster import Roster


class SourceHealth(Protocol):
    """What the API reports about the source of events: the poller, or on a hub the agents."""

    lost: bool
    """Whether the source has given no usable response for too long."""
    lost_reason: str
    """What it means that the source is lost."""
    polls: int
    """Polls so far; on a hub messages of agents."""
    failures: int
    """Polls in a row without a usable response; on a hub failed connections in a row."""

    @property
    def poll_seconds(self) -> Histogram | None:
        """How long polls took; None on a hub, which does not poll."""

    @property
    def read_age(self) -> float | None:
        """The seconds since the document was last read; None: this process read none yet."""

    @property
    def clock_offset(self) -> float | None:
        """The seconds that our clock is certainly ahead of the service's; None: not known."""


KeyChange = Literal["added", "changed", "removed", "moved"]
"""moved: the entries of a list are the same, in another order."""


class ConfigurationReloader(Protocol):
    """Reads the configuration again, and takes it over."""

    problem: str | None
    """Why the last reload was refused; None if it was not."""

    async def reload(self, by: str, /) -> Mapping[str, KeyChange]:
        """Take over the configuration as it is now, and return what changed: ``sinks.bus``.

        Raises ReloadRefused.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """The parts of a running relay that the API uses."""

    store: Store
    gate: DecisionHandler
    """Takes approvals, holds and releases. An agent forwards them to the gate of its hub."""
    dispatcher: Dispatcher
    source: SourceHealth
    origin: Origin
    clock: Clock
    chats: Mapping[str, ChatSink] = field(default_factory=dict)
    roster: Roster | None = None
    hub: Hub | None = None
    approvals_link: ApprovalConsumer | None = None
    """None without approvals over RabbitMQ."""


@dataclass(slots=True, kw_only=True)
class ServerState:
    clock: Clock
    limits: ServerLimits
    callers: Callers
    """Says who calls. A reload replaces it."""
    relay: Relay | None = None
    """None while the relay starts or stops."""
    reloader: ConfigurationReloader | None = None
    """None if this process was not started to reload."""
    rates: CallRates = field(init=False)
    responses_by_status: Counter[int] = field(default_factory=Counter)
    event_counts: EventCounts = field(default_factory=EventCounts)
    stream_wakeups: dict[asyncio.Event, str] = field(default_factory=dict)
    """The principal of each open stream, by the event that wakes the stream.

    A stream that wakes sends what is new. It ends if it has no entry here any more, if no relay is
    attached, or if its session has ended (`relay.api.routes.stream`).
    """
    long_reads: asyncio.Semaphore = field(init=False)
    """Bounds the reads of the state file that can take long, such as pages of a long history."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Not set while a reload enters another inner half: calls that change something wait for it."""
    _large_answers: WeakValueDictionary[str, asyncio.Semaphore] = field(
        default_factory=WeakValueDictionary
    )

    def __post_init__(self) -> None:
        self.settled.set()
        self.rates = CallRates(clock=self.clock)
        self.long_reads = asyncio.Semaphore(self.limits.max_long_reads)

    @asynccontextmanager
    async def large_answer(self, caller: str) -> AsyncIterator[None]:
        """Let a caller have a page while the context lasts. Raises Problem 429 if it has many."""
        free = self._large_answers.get(caller) or asyncio.Semaphore(self.limits.max_large_answers)
        self._large_answers[caller] = free
        try:
            async with asyncio.timeout(self.limits.send_timeout):
                await free.acquire()
        except TimeoutError:
            text = "too many answers are being read at once; read them faster, or one by one"
            raise too_many(text, 1) from None
        try:
            yield
        finally:
            free.release()

    def attach_relay(self, relay: Relay) -> None:
        self.relay = relay
        listeners = relay.store.listeners.recorded
        listeners += [self.wake_streams, self.event_counts.count_recorded_events]

    def detach_relay(self) -> None:
        """Answer calls with 503 and end the streams."""
        if self.relay is not None:
            self.relay.store.listeners.recorded.remove(self.wake_streams)
            self.relay.store.listeners.recorded.remove(self.event_counts.count_recorded_events)
        self.relay = None
        self.wake_streams()

    def replace_relay(self, relay: Relay) -> None:
        """Let calls reach what a reload has made, if a relay is attached."""
        if self.relay is not None:
            # Counted by the engine that is gone: the counter of the metrics must not go back.
            self.event_counts.refusals.update(self.relay.gate.engine.unrecorded_refusals)
            self.relay = relay

    def replace_callers(self, callers: Callers) -> None:
        """End the streams of those whose settings have changed. They can connect again."""
        before, self.callers = self.callers, callers
        for wakeup, principal in list(self.stream_wakeups.items()):
            if callers.what_makes(principal) != before.what_makes(principal):
                del self.stream_wakeups[wakeup]
                wakeup.set()

    def wake_streams(self, _recorded: Sequence[RecordedEvent] = ()) -> None:
        for wakeup in self.stream_wakeups:
            wakeup.set()
