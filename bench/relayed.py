"""The same through a store and a dispatcher: every event on disk before it is sent, and every delivery written down."""

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
from relay.outbox import Identity, StoreSettings
from relay.outbox.deliveries import Delivery
from relay.outbox.sqlite import Store, open_store

BACKLOG = 200
"""Events that wait before more are recorded."""
AT_ONCE = 10
"""Changes that one poll brings."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """A store, and a dispatcher that delivers what is recorded in it."""

    store: Store
    dispatcher: Dispatcher

    def record(self, events: Sequence[CloudEvent]) -> asyncio.Future[None]:
        """As the recorder does with what one poll has brought: one transaction."""
        now = datetime.now(UTC)
        return self.store.submit(lambda tx: tx.record_all([(event, None) for event in events], now))

    async def carry(self, events: Sequence[CloudEvent]) -> None:
        """Record every event, and return once every delivery has been written down."""
        for first in range(0, len(events), AT_ONCE):
            recorded = self.record(events[first : first + AT_ONCE])
            if first % BACKLOG == 0:
                await recorded
                await until(
                    lambda: max(status.waiting for status in self.dispatcher.status()) < BACKLOG
                )
        await self.store.read(lambda _: None)  # behind the last that was recorded
        await self.delivered()
        while await self.store.read(lambda tx: tx.deliveries.waiting()):  # noqa: ASYNC110  # the last are being written down
            await asyncio.sleep(0.001)

    async def delivered(self, sink: str | None = None) -> None:
        """Wait until nothing waits, for that sink or for any."""
        await until(
            lambda: (
                not any(one.waiting for one in self.dispatcher.status() if sink in {None, one.name})
            )
        )

    async def spans(self, sink: str | None = None) -> list[float]:
        """Seconds from recorded to delivered."""
        shown = await self._shown(sink)
        return [(moment(one.settled) - moment(one.recorded)).total_seconds() for one in shown]

    async def recorded(self) -> dict[str | None, float]:
        """When every event was recorded, by its EventId."""
        return {one.event_id: moment(one.recorded).timestamp() for one in await self._shown(None)}

    async def _shown(self, sink: str | None) -> list[Delivery]:
        return await self.store.read(
            lambda tx: tx.deliveries.page(states=("delivered",), sink=sink, limit=1_000_000)
        )


@asynccontextmanager
async def relaying(sections: Sequence[dict[str, Any]]) -> AsyncIterator[Relayed]:
    """A relay's way out with these sinks."""
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        settings = [
            sink_modules()[section["kind"]].Settings.model_validate(section) for section in sections
        ]
        names = [one.name for one in settings]
        store = await stack.enter_async_context(
            open_store(
                StoreSettings(path=Path(directory) / "bench.db"),
                Identity("bench", None),
                clock,
                lambda _: names,
            )
        )
        opened: dict[str, tuple[sinks.SinkSettings, sinks.Sink]] = {
            one.name: (
                one,
                await stack.enter_async_context(sink_modules()[one.kind].connect(one, clock)),
            )
            for one in settings
        }
        dispatcher = Dispatcher(opened, store, clock, lambda *_: None)
        await dispatcher.start()
        running = asyncio.create_task(dispatcher.run())
        await asyncio.sleep(1)  # connected
        yield Relayed(store, dispatcher)
        running.cancel()
        await asyncio.wait({running})


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what has no event of its own."""
    while not condition():  # noqa: ASYNC110  # as said
        await asyncio.sleep(0.002)


def moment(text: str | None) -> datetime:
    """A moment as the store has it."""
    return datetime.fromisoformat(text or "")
