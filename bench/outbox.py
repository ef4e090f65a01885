"""Sends events through the relay's store and dispatcher, which record each event and delivery."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relay import sinks
from relay.clock import SystemClock
from relay.config import sink_modules
from relay.delivery.dispatcher import Dispatcher
from relay.events.cloudevent import CloudEvent
from relay.outbox import StateFileOwner, StoreSettings
from relay.outbox.deliveries import Delivery
from relay.outbox.sqlite import Store, open_store

MAX_BACKLOG = 200
"""The maximum number of waiting events."""
BATCH = 10
"""Events that are recorded together, as those of one poll are."""


@dataclass(frozen=True, slots=True)
class Outbox:
    """A store, and a dispatcher that delivers its events."""

    store: Store
    dispatcher: Dispatcher

    def record(self, events: Sequence[CloudEvent]) -> asyncio.Future[None]:
        """Record events in one transaction, as the recorder does with those of a poll."""
        now = datetime.now(UTC)
        return self.store.submit(lambda tx: tx.record_all([(event, None) for event in events], now))

    async def send_all(self, events: Sequence[CloudEvent]) -> None:
        """Record every event, and return once every delivery is recorded."""
        for first in range(0, len(events), BATCH):
            recorded = self.record(events[first : first + BATCH])
            if first % MAX_BACKLOG == 0:
                await recorded
                await until(lambda: self._max_waiting() < MAX_BACKLOG)
        await self.store.read(lambda _: None)  # waits for the transactions before it
        await self.wait_until_delivered()
        # The store still records the last deliveries.
        while await self.store.read(lambda tx: tx.deliveries.waiting()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def wait_until_delivered(self, sink: str | None = None) -> None:
        """Wait until nothing waits for a sink, or for any sink."""
        await until(lambda: self._max_waiting(sink) == 0)

    def _max_waiting(self, sink: str | None = None) -> int:
        return max(
            status.waiting for status in self.dispatcher.status() if sink in {None, status.name}
        )

    async def delivery_times(self, sink: str | None = None) -> list[float]:
        """Return the seconds from recorded to delivered."""
        return [
            (_parse(delivery.settled) - _parse(delivery.recorded)).total_seconds()
            for delivery in await self._deliveries(sink)
        ]

    async def recorded_at(self) -> dict[str | None, float]:
        """Return when each event was recorded, by its EventId."""
        return {
            delivery.event_id: _parse(delivery.recorded).timestamp()
            for delivery in await self._deliveries(None)
        }

    async def _deliveries(self, sink: str | None) -> list[Delivery]:
        return await self.store.read(
            lambda tx: tx.deliveries.page(states=("delivered",), sink=sink, limit=1_000_000)
        )


@asynccontextmanager
async def open_outbox(sections: Sequence[dict[str, Any]]) -> AsyncIterator[Outbox]:
    """Yield an outbox with these sinks."""
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        settings = [
            sink_modules()[section["kind"]].Settings.model_validate(section) for section in sections
        ]
        names = [sink.name for sink in settings]
        store = await stack.enter_async_context(
            open_store(
                StoreSettings(path=Path(directory) / "bench.db"),
                StateFileOwner("bench", None),
                clock,
                lambda _: names,
            )
        )
        connected: dict[str, tuple[sinks.SinkSettings, sinks.Sink]] = {}
        for sink in settings:
            context = sink_modules()[sink.kind].connect(sink, clock)
            connected[sink.name] = (sink, await stack.enter_async_context(context))
        dispatcher = Dispatcher(connected, store, clock, lambda *_, **__: None)
        await dispatcher.start()
        running = asyncio.create_task(dispatcher.run())
        await asyncio.sleep(1)  # the sinks connect
        yield Outbox(store, dispatcher)
        running.cancel()
        await asyncio.wait({running})


async def until(condition: Callable[[], bool]) -> None:
    """Poll until a condition holds."""
    while not condition():  # noqa: ASYNC110  # nothing signals it
        await asyncio.sleep(0.002)


def _parse(text: str | None) -> datetime:
    return datetime.fromisoformat(text or "")
