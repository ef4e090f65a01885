"""A relay that runs in the test's own event loop, with a simulated Azure behind it and a receiver before it."""

from __future__ import annotations

import os
import pwd
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from relay.app import started
from relay.clock import SystemClock
from relay.config import load
from relay.simulator import VM, Event, Plan, Setup, Simulator
from tests.cli.command import called
from tests.journey.relay_process import SECRET, Inbox, eventually, inbox, name_of

ME = f"local:{pwd.getpwuid(os.geteuid()).pw_name}"
"""Who types, to the relay."""
KEY = "imdsr_of-alice"
READER = "imdsr_of-the-reader"


@dataclass(frozen=True, slots=True)
class Alive:
    """The parts. ``config`` is the file whose socket the commands use; ``url`` is where they need a key."""

    azure: Simulator
    receiver: Inbox
    config: str
    url: str
    store: Path

    async def announced(self, plan: Plan | None = None) -> Event:
        """Let Azure announce an event, and wait until the receiver was told."""
        event = self.azure.schedule(
            plan or Plan(type="Reboot", resources=("db-0", "db-1"), notice=900.0)
        )
        await self.told("event.scheduled", event.event_id)
        return event

    async def told(self, name: str, subject: str) -> None:
        """Wait until the receiver has an event."""
        await eventually(
            lambda: any(
                (name_of(one), one.get("subject")) == (name, subject)
                for one in self.receiver.events
            ),
            what=name,
        )

    async def shown(self, event: Event) -> dict[str, Any]:
        """The event as the API gives it."""
        shown: dict[str, Any] = (
            await called("show", event.event_id, "--config", self.config, "--json")
        ).json
        return shown


@asynccontextmanager
async def alive(folder: Path, **approvals: Any) -> AsyncIterator[Alive]:
    """A relay with a rule of two votes; ``approvals`` is put into that section."""
    async with Simulator(Setup(vms=(VM("db-0"), VM("db-1")))) as azure, inbox() as receiver:
        file = folder / "relay.yaml"
        document = {
            "scope": "west",
            "source": {"url": azure.url, "interval": "500ms"},
            "store": {"path": str(folder / "relay.db")},
            "sinks": [
                {
                    "kind": "webhook",
                    "name": "drain",
                    "url": receiver.url,
                    "secrets": [SECRET],
                    "allow_http": True,
                }
            ],
            "approvals": {
                "rules": [{"name": "two", "approve": {"votes": 2, "from": [ME, "client:alice"]}}],
                **approvals,
            },
            "api": {
                "listen": "127.0.0.1:0",
                "socket": str(folder / "relay.sock"),
                "clients": [
                    {"name": "alice", "key": KEY, "can": ["read", "approve"]},
                    {"name": "reader", "key": READER, "can": ["read"]},
                ],
            },
        }
        file.write_bytes(orjson.dumps(document))  # JSON is YAML
        async with started(load(file, {}).config, SystemClock()) as running:
            yield Alive(
                azure,
                receiver,
                str(file),
                f"http://127.0.0.1:{running.api_port}",
                folder / "relay.db",
            )
