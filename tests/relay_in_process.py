"""A whole relay in the test's event loop, with a simulated Azure, and calls of its API.

Tests of the command line, of chats and of reloads extend it with what only they need.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from relay.app import RunningRelay, start_relay
from relay.clock import SystemClock
from relay.config import Config
from relay.simulator import VM, Event, Plan, Setup, Simulator
from tests.eventually import eventually
from tests.journey.relay_process import KEY, call_api


@dataclass(slots=True, kw_only=True)
class RelayInProcess:
    azure: Simulator
    running: RunningRelay

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.running.server.port}"

    def reboot(self, *machines: str, **plan: Any) -> Event:
        """Announce a reboot. It lasts until the test ends it, unless ``plan`` says otherwise."""
        return self.azure.schedule(
            Plan(**{"type": "Reboot", "resources": machines or ("vm-0",), "lasts": None, **plan})
        )

    async def call(
        self, method: str, path: str, body: object = None, *, key: str = KEY
    ) -> tuple[int, Any]:
        """Call the API; return status and body."""
        return await call_api(method, self.url + path, body, {"Authorization": f"Bearer {key}"})

    async def event(self, event: Event, *, key: str = KEY) -> dict[str, Any]:
        """Return an event as the API shows it."""
        _, body = await self.call("GET", f"/v1/events/{event.event_id}", key=key)
        return dict(body)

    async def decide(
        self, event: Event, decision: str = "approve", *, key: str = KEY
    ) -> tuple[int, Any]:
        """Decide about the current revision; return status and body."""
        revision = (await self.event(event, key=key))["revision"]
        body = {"eventId": event.event_id, "decision": decision, "revision": revision}
        return await self.call("POST", "/v1/approvals", body, key=key)

    def starts(self, event: Event) -> int:
        return sum(event.event_id in call.event_ids for call in self.azure.start_requests)

    async def told(self, name: str) -> list[dict[str, Any]]:
        """Return the data of the CloudEvents of this name in the journal."""
        events = await self.running.relay.store.read(lambda tx: tx.journal.events_after(0, 10_000))
        return [orjson.loads(event.body)["data"] for _, event in events if event.name == name]

    async def settle(self) -> None:
        """Return when no delivery is waiting."""

        async def is_idle() -> bool:
            return not await self.running.relay.store.read(
                lambda tx: tx.deliveries.waiting_entries()
            )

        await eventually(is_idle)


def document_of(folder: Path, azure: Simulator, **sections: Any) -> dict[str, Any]:
    """Return a configuration whose sections replace the usual ones."""
    return {
        "scope": "west",
        "relay": "vm-0",
        "source": {"url": azure.url, "interval": "500ms"},
        "store": {"path": str(folder / "relay.db")},
        **sections,
    }


def simulated(*vms: str) -> Simulator:
    return Simulator(Setup(vms=tuple(map(VM, vms or ("vm-0",)))))


@asynccontextmanager
async def relay_in_process(
    azure: Simulator, document: Mapping[str, Any] | Config
) -> AsyncIterator[RelayInProcess]:
    """Run a relay. Over the same state file it is the same relay, started again."""
    config = document if isinstance(document, Config) else Config.model_validate(document)
    async with start_relay(config, SystemClock()) as running:
        yield RelayInProcess(azure=azure, running=running)
