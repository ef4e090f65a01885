"""A relay in the test's event loop whose configuration a test changes and reloads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from relay.app import RunningRelay, start_relay
from relay.clock import SystemClock
from relay.config import Config, LoadedConfig
from relay.errors import ReloadRefused
from relay.roles.reload import Reloader
from relay.simulator import VM, Event, Plan, Setup, Simulator
from tests.journey.relay_process import KEY, client

OTHER_KEYS = {name: f"bearer-test-key-of-{name}-for-tests" for name in ("alice", "bob", "carol")}


def voter(name: str, **more: Any) -> dict[str, Any]:
    """Return the section of a client who may read and vote."""
    return {"name": name, "key": OTHER_KEYS[name], "can": ["read", "approve", "hold"], **more}


@dataclass(slots=True)
class ReloadableRelay:
    """The relay, its simulated Azure, and the document that the next reload reads."""

    azure: Simulator
    running: RunningRelay
    reloader: Reloader
    document: dict[str, Any]
    session: aiohttp.ClientSession
    loads: list[Mapping[str, Any]] = field(default_factory=list)
    """The documents that were read."""

    async def reload(self, **sections: Any) -> list[tuple[str, str]]:
        """Change sections of the document and reload it; return what has changed."""
        self.document |= sections
        return [(change.key, change.kind) for change in await self.reloader.reload("a test")]

    async def refuse(self, **sections: Any) -> str:
        """Check that a reload is refused; return why. The document is then as it was."""
        before = dict(self.document)
        with pytest.raises(ReloadRefused) as refused:
            await self.reload(**sections)
        self.document.clear()
        self.document.update(before)
        assert self.reloader.problem == refused.value.reason
        return refused.value.reason

    def schedule(self, **plan: Any) -> Event:
        """Schedule a reboot that lasts until the test ends it."""
        return self.azure.schedule(
            Plan(**{"type": "Reboot", "resources": ("vm-0",), "lasts": None, **plan})
        )

    async def call(
        self, method: str, path: str, body: object = None, *, key: str = KEY
    ) -> tuple[int, Any]:
        """Call the API; return status and body."""
        async with self.session.request(
            method,
            f"http://127.0.0.1:{self.running.server.port}{path}",
            json=body,
            headers={"Authorization": f"Bearer {key}"},
        ) as response:
            return response.status, orjson.loads(await response.read())

    async def event(self, event: Event) -> dict[str, Any]:
        """Return an event as the API shows it."""
        _, body = await self.call("GET", f"/v1/events/{event.event_id}")
        return dict(body)

    async def state(self, event: Event) -> str:
        """Return the state of the approval of an event; unknown before the relay has seen it."""
        return str((await self.event(event)).get("approval", {}).get("state", "unknown"))

    async def vote(self, event: Event, name: str) -> tuple[int, Any]:
        body = {
            "eventId": event.event_id,
            "decision": "approve",
            "revision": (await self.event(event))["revision"],
        }
        return await self.call("POST", "/v1/approvals", body, key=OTHER_KEYS[name])

    def starts(self, event: Event) -> int:
        return sum(event.event_id in call.event_ids for call in self.azure.start_requests)

    async def told(self, name: str) -> list[dict[str, Any]]:
        """Return the data of the CloudEvents of this name in the journal."""
        events = await self.running.relay.store.read(lambda tx: tx.journal.events_after(0, 10_000))
        return [orjson.loads(event.body)["data"] for _, event in events if event.name == name]


@asynccontextmanager
async def reloadable_relay(folder: Path, **sections: Any) -> AsyncIterator[ReloadableRelay]:
    """Run a relay with these sections. An operator has the test key."""
    async with AsyncExitStack() as stack:
        azure = await stack.enter_async_context(Simulator(Setup(vms=(VM("vm-0"),))))
        document = {
            "scope": "west",
            "relay": "vm-0",
            "source": {"url": azure.url, "interval": "500ms"},
            "store": {"path": str(folder / "relay.db")},
            "api": {"listen": "127.0.0.1:0", "clients": [client("operator")]},
            **sections,
        }
        loaded = LoadedConfig(Config.model_validate(document), None)
        running = await stack.enter_async_context(start_relay(loaded.config, SystemClock()))
        loads: list[Mapping[str, Any]] = []

        def load() -> LoadedConfig:
            loads.append(dict(document))
            return LoadedConfig(Config.model_validate(document), None)

        reloader = Reloader(running, loaded, load, SystemClock(), nullcontext)
        stack.push_async_callback(reloader.cancel_all_reloads)
        running.server.state.reloader = reloader
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield ReloadableRelay(azure, running, reloader, document, session, loads)
