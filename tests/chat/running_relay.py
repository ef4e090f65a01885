"""Runs a whole relay in this process, with a simulated Azure and chat sinks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from relay.app import RunningRelay, start_relay
from relay.clock import Clock, SystemClock
from relay.config import Config
from relay.simulator import VM, Event, Plan, Setup, Simulator
from tests.eventually import eventually

SCOPE = "prod"
ALICE = {
    "name": "alice",
    "key": "bearer-test-key-of-alice",
    "can": ["read", "approve", "hold", "operate"],
}
BOB = {"name": "bob", "key": "bearer-test-key-of-bob", "can": ["read", "approve", "hold"]}


def rule(votes: int, *voters: str, **quorum: Any) -> dict[str, Any]:
    """Make a rule by which reboots need so many votes of these principals."""
    return {
        "name": "reboots",
        "match": {"event_type": ["Reboot"]},
        "approve": {"votes": votes, "from": list(voters), **quorum},
    }


@dataclass(frozen=True, slots=True)
class Stage:
    """Azure, the relay, and an HTTP session for calls of its API at ``url``."""

    azure: Simulator
    running: RunningRelay
    url: str
    web: aiohttp.ClientSession

    def reboot(self, *machines: str, **plan: Any) -> Event:
        """Announce a reboot, 15 minutes ahead unless ``plan`` says otherwise."""
        return self.azure.schedule(
            Plan(**{"type": "Reboot", "resources": machines or ("vm-0",), "lasts": None, **plan})
        )

    async def settle(self) -> None:
        async def is_idle() -> bool:
            return not await self.running.relay.store.read(
                lambda tx: tx.deliveries.waiting_entries()
            )

        await eventually(is_idle)

    def starts(self, event: Event) -> int:
        return sum(event.event_id in call.event_ids for call in self.azure.start_requests)

    async def event(self, event: Event) -> dict[str, Any]:
        """Return an event as the API shows it to alice."""
        async with self.web.get(
            f"{self.url}/v1/events/{event.event_id}",
            headers={"Authorization": f"Bearer {ALICE['key']}"},
        ) as response:
            fields: dict[str, Any] = await response.json()
            return fields

    async def approve(
        self, event: Event, decision: str = "approve", *, client: Mapping[str, Any] = ALICE
    ) -> int:
        """Submit a client's decision about the current revision; return the HTTP status."""
        body = {
            "eventId": event.event_id,
            "decision": decision,
            "revision": (await self.event(event))["revision"],
        }
        headers = {"Authorization": f"Bearer {client['key']}"}
        async with self.web.post(
            f"{self.url}/v1/approvals", json=body, headers=headers
        ) as response:
            return response.status


@asynccontextmanager
async def stage(
    directory: Path,
    sinks: Sequence[Mapping[str, Any]],
    *,
    approvals: Mapping[str, Any],
    public_url: str | None = "https://relay.example.com",
    clock: Clock | None = None,
    azure: Simulator | None = None,
    **api: Any,
) -> AsyncIterator[Stage]:
    """Run a relay with these sinks. Over the same directory it is the same relay, started again.

    ``azure`` is a simulator that outlives the relay; by default each relay has its own. ``api``
    holds further fields of the section ``api``.
    """
    async with AsyncExitStack() as stack:
        if azure is None:
            azure = await stack.enter_async_context(Simulator(Setup(vms=(VM("vm-0"),))))
        document = {
            "scope": SCOPE,
            "relay": "vm-0",
            "source": {"url": azure.url, "interval": "500ms"},
            "store": {"path": str(directory / "relay.db")},
            "sinks": list(sinks),
            "approvals": {"tell_first": "0s", **approvals},
            "api": {
                "listen": "127.0.0.1:0",
                "clients": [ALICE, BOB],
                "public_url": public_url,
                **api,
            },
        }
        running = await stack.enter_async_context(
            start_relay(Config.model_validate(document), clock or SystemClock())
        )
        web = await stack.enter_async_context(aiohttp.ClientSession())
        yield Stage(azure, running, f"http://127.0.0.1:{running.server.port}", web)
