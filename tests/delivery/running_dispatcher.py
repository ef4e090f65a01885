"""Runs a dispatcher on a real store, with test sinks that note events and answer by script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from relay.clock import Clock, SystemClock
from relay.delivery.dispatcher import Dispatcher, matching_sinks
from relay.errors import Deferred
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import format_rfc3339
from relay.roles.parts import make_relay_event_recorder
from relay.sinks import Receipt, Sink, SinkSettings
from relay.store import StoreSettings
from relay.store.deliveries import DeliverySummary
from relay.store.sqlite import Store, open_store
from tests.builders import cloudevent
from tests.clocks import ManualClock
from tests.store.open_store import IDENTITY

ORIGIN = Origin(IDENTITY.scope, "westno-0")

Answer = Callable[[CloudEvent], Awaitable[Receipt]]


async def accepts(_: CloudEvent) -> Receipt:
    return Receipt(204)


def gives(
    *results: Receipt | BaseException, to: Callable[[CloudEvent], bool] = lambda _: True
) -> Answer:
    """Give these results one after the other, the last again and again, ``to`` some events.

    Others are accepted.
    """
    left = list(results)

    async def answer(event: CloudEvent) -> Receipt:
        if not to(event):
            return await accepts(event)
        result = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(result, BaseException):
            raise result
        return result

    return answer


refuses = gives(Deferred("it refused the connection"))


async def hangs(_: CloudEvent) -> Receipt:
    """Never answers."""
    await asyncio.Event().wait()
    raise AssertionError


@dataclass(slots=True)
class ScriptedSink:
    """A sink whose receiver is this test. ``answer`` can be exchanged at any time."""

    answer: Answer = accepts
    concurrency: int = 16
    longest_pause: float = 0.05
    give_up_after: float = 3600.0
    clock: Clock = field(default_factory=SystemClock)
    attempts: list[tuple[float, CloudEvent]] = field(default_factory=list)
    """When every try began (monotonic), in order."""
    delivered: list[CloudEvent] = field(default_factory=list)
    """What was taken, in order."""
    in_flight: int = 0
    max_in_flight: int = 0

    async def deliver(self, event: CloudEvent) -> Receipt:
        self.attempts.append((self.clock.monotonic(), event))
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            receipt = await self.answer(event)
        finally:
            self.in_flight -= 1
        self.delivered.append(event)
        return receipt

    def names(self) -> list[str]:
        """``<family>.<change>`` of what was taken."""
        return [event.name for event in self.delivered]

    def ids(self, subject: str | None = None) -> list[str]:
        """The ids of what was taken, of one event or of all."""
        return [event.id for event in self.delivered if subject is None or event.subject == subject]

    def subjects(self, name: str) -> list[str]:
        """What the events of a name were about that were taken."""
        return [str(event.subject) for event in self.delivered if event.name == name]

    def times(self, subject: str) -> list[float]:
        return [moment for moment, event in self.attempts if event.subject == subject]


@dataclass(slots=True)
class RunningDispatcher:
    store: Store
    dispatcher: Dispatcher
    clock: Clock
    task: asyncio.Task[None]
    made: int = 0

    async def record_event(
        self,
        subject: str,
        name: str = "event.scheduled",
        *,
        not_before: float | None = None,
        **data: Any,
    ) -> str:
        """Record an event, with its NotBefore so many seconds ahead; returns its id."""
        self.made += 1
        now = self.clock.now()
        due = None if not_before is None else format_rfc3339(now + timedelta(seconds=not_before))
        data = {"eventId": subject, "notBefore": due, "resources": [], **data}
        event = cloudevent(name, subject, data, id=f"{self.made:032x}")
        await self.store.transact(lambda tx: tx.record(event, now), fail_open=True)
        return event.id

    async def record_events(self, count: int, *names: str, **given: Any) -> dict[str, list[str]]:
        """Record ``event.scheduled``, or these, about E-0, E-1 and so on; return ids by subject."""
        ids: dict[str, list[str]] = {f"E-{number}": [] for number in range(count)}
        for name in names or ("event.scheduled",):
            for subject, of_subject in ids.items():
                of_subject.append(await self.record_event(subject, name, **given))
        return ids

    async def deliveries(self, sink: str, state: str | None = None) -> list[DeliverySummary]:
        """What the store has of a sink, the oldest first."""
        page = await self.store.read(lambda tx: tx.deliveries.page(sink=sink, limit=100_000))
        return [
            delivery for delivery in reversed(page) if state is None or delivery["state"] == state
        ]

    async def redeliver(self, entry_id: int, at: datetime) -> bool:
        sent = await self.store.transact(lambda tx: tx.deliveries.redeliver(at, entry_id=entry_id))
        return sent == 1

    async def attempts(self, sink: str) -> list[tuple[Any, ...]]:
        """Entry, outcome, status and reason of a sink's attempts, in order."""
        query = (
            "SELECT entry, outcome, attempt.status, attempt.reason "
            "FROM attempt JOIN entry ON entry.id = attempt.entry "
            "WHERE sink = ? ORDER BY entry, number"
        )
        return await self.store.read(lambda tx: tx.connection.execute(query, (sink,)).fetchall())

    async def settle(self) -> None:
        """Wait until everything that happens by itself has happened."""
        for _ in range(4):
            self.dispatcher.submit()
            await self.store.read(lambda _: None)
            # A store that is fast answers in fewer turns of the loop than a worker needs.
            for _ in range(20):
                await asyncio.sleep(0)

    async def forward(self, seconds: float) -> None:
        assert isinstance(self.clock, ManualClock)
        await self.clock.forward(seconds, self.settle)


@asynccontextmanager
async def running_dispatcher(
    folder: Path,
    sinks: Mapping[str, Sink],
    *,
    clock: Clock | None = None,
    run: bool = True,
    **sections: Mapping[str, Any],
) -> AsyncIterator[RunningDispatcher]:
    """Sinks by name, each with its section of the YAML document, if it needs one."""
    clock = clock or SystemClock()
    settings = {
        name: SinkSettings.model_validate({"kind": "test", "name": name, **sections.get(name, {})})
        for name in sinks
    }
    async with open_store(
        StoreSettings(path=folder / "relay.db"),
        IDENTITY,
        clock,
        lambda event: matching_sinks(event, settings.values()),
    ) as store:
        dispatcher = Dispatcher(
            {name: (settings[name], sink) for name, sink in sinks.items()},
            store,
            clock,
            make_relay_event_recorder(store, ORIGIN, clock),
        )
        await dispatcher.begin()
        work = dispatcher.run() if run else asyncio.sleep(3600)
        task = asyncio.create_task(work, name="dispatcher")
        made = await store.read(lambda tx: tx.head().position)
        yield RunningDispatcher(store, dispatcher, clock, task, made)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=30)
        assert done, "a dispatcher that was cancelled has to end"
        assert task.cancelled()
