"""A poller on a real store, which reads a server of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

from relay.clock import Clock
from relay.imds import SourceSettings
from relay.imds.client import ImdsClient
from relay.imds.poller import Poller
from relay.ingest import Recorder
from relay.store import StateFileScopeAndVm, StoreSettings
from relay.store.sqlite import Store, open_store
from tests.approvals.builders import BOOT_ID, ORIGIN
from tests.background_tasks import BackgroundTasks


@asynccontextmanager
async def running_poller(
    folder: Path,
    source: SourceSettings,
    clock: Clock,
    *,
    last_read: datetime | None = None,
    report: Callable[..., None] = lambda *_, **__: None,
) -> AsyncIterator[tuple[Store, ImdsClient, Poller]]:
    """Run it on the state file in a folder. ``report`` takes what it says of the source."""
    owner = StateFileScopeAndVm(ORIGIN.scope, "vm")
    async with (
        open_store(StoreSettings(path=folder / "relay.db"), owner, clock, lambda _: ()) as store,
        ImdsClient(source, clock) as client,
    ):
        poller = Poller(
            source,
            client,
            Recorder(ORIGIN, BOOT_ID, frozenset({"vm-0"})),
            store,
            clock,
            report=report,
            last_read_at=last_read,
            jitter=lambda: 0.0,
        )
        async with BackgroundTasks(poller.run()):
            yield store, client, poller
