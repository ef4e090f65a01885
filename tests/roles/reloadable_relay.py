"""A relay in the test's event loop whose configuration a test changes and reloads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from relay.clock import SystemClock
from relay.config import Config, LoadedConfig
from relay.errors import ReloadRefused
from relay.roles.reload import Reloader
from relay.simulator import Event
from relay.sinks import SinkSettings
from tests.journey.relay_process import client
from tests.relay_in_process import RelayInProcess, document_of, relay_in_process, simulated

OTHER_KEYS = {name: f"bearer-test-key-of-{name}-for-tests" for name in ("alice", "bob", "carol")}


def voter(name: str, **more: Any) -> dict[str, Any]:
    """Return the section of a client who may read and vote."""
    return {"name": name, "key": OTHER_KEYS[name], "can": ["read", "approve", "hold"], **more}


@dataclass(slots=True, kw_only=True)
class ReloadableRelay(RelayInProcess):
    """The relay, and the document that the next reload reads."""

    reloader: Reloader
    document: dict[str, Any]
    loads: list[Mapping[str, Any]] = field(default_factory=list)
    """The documents that were read."""

    async def reload(self, **sections: Any) -> list[tuple[str, str]]:
        """Change sections of the document and reload it; return what has changed."""
        self.document |= sections
        return list((await self.reloader.reload("a test")).items())

    async def refuse(self, **sections: Any) -> str:
        """Check that a reload is refused; return why. The document is then as it was."""
        before = dict(self.document)
        with pytest.raises(ReloadRefused) as refused:
            await self.reload(**sections)
        self.document.clear()
        self.document.update(before)
        assert self.reloader.problem == refused.value.reason
        return refused.value.reason

    def with_sinks(self, *sinks: SinkSettings) -> Config:
        """Return the configuration that is in force with these sinks instead."""
        return self.running.config.model_copy(update={"sinks": sinks})

    async def state(self, event: Event) -> str:
        return str((await self.event(event)).get("approval", {}).get("state", "unknown"))

    async def vote(self, event: Event, name: str) -> tuple[int, Any]:
        return await self.decide(event, key=OTHER_KEYS[name])


@asynccontextmanager
async def reloadable_relay(folder: Path, **sections: Any) -> AsyncIterator[ReloadableRelay]:
    """Run a relay with these sections. An operator has the test key."""
    async with AsyncExitStack() as stack:
        azure = await stack.enter_async_context(simulated())
        api = {"listen": "127.0.0.1:0", "clients": [client("operator")]}
        document = document_of(folder, azure, **{"api": api, **sections})
        loaded = LoadedConfig(Config.model_validate(document), None)
        relay = await stack.enter_async_context(relay_in_process(azure, loaded.config))
        loads: list[Mapping[str, Any]] = []

        def load() -> LoadedConfig:
            loads.append(dict(document))
            return LoadedConfig(Config.model_validate(document), None)

        reloader = Reloader(relay.running, loaded, load, SystemClock(), nullcontext)
        stack.push_async_callback(reloader.cancel_all_reloads)
        relay.running.server.state.reloader = reloader
        yield ReloadableRelay(
            azure=azure, running=relay.running, reloader=reloader, document=document, loads=loads
        )
