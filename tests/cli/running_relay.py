"""A relay in the test's own event loop, with a webhook receiver, for the command line."""

from __future__ import annotations

import os
import pwd
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from relay.config import load
from relay.imds.poller import Poller
from relay.simulator import Event, Plan
from tests.cli.command import CommandResult, run_async
from tests.eventually import eventually
from tests.journey.relay_process import Inbox, inbox, name_of, webhook
from tests.relay_in_process import RelayInProcess, document_of, relay_in_process, simulated

LOCAL_PRINCIPAL = f"local:{pwd.getpwuid(os.geteuid()).pw_name}"
"""The principal of the user who runs the tests."""
ALICE_KEY = "imdsr_bearer-test-key-of-alice"


@dataclass(slots=True, kw_only=True)
class RunningRelay(RelayInProcess):
    """``config`` is a file that names the socket; calls of ``url`` need a key."""

    poller: Poller
    receiver: Inbox
    config: str
    store: Path

    async def run(self, *arguments: str) -> CommandResult:
        """Run the command against this relay, by its socket."""
        return await run_async(*arguments, "-c", self.config)

    async def announce(self, plan: Plan | None = None) -> Event:
        """Schedule an event, and wait until the receiver has it."""
        event = self.azure.schedule(
            plan or Plan(type="Reboot", resources=("db-0", "db-1"), notice=900.0)
        )
        await self.poll()
        await self.wait_for_webhook("event.scheduled", event.event_id)
        return event

    async def poll(self) -> None:
        await self.poller.read_with_imds_time()

    async def wait_for_webhook(self, name: str, subject: str) -> None:
        """Wait until the receiver has a CloudEvent."""

        def came() -> bool:
            events = self.receiver.events
            return (name, subject) in [(name_of(each), each.get("subject")) for each in events]

        await eventually(came, what=name)

    async def get_event(self, event: Event) -> dict[str, Any]:
        details: dict[str, Any] = (await self.run("show", event.event_id, "--json")).json
        return details


@asynccontextmanager
async def running_relay(
    folder: Path, *, api: Mapping[str, Any] | None = None, **approvals: Any
) -> AsyncIterator[RunningRelay]:
    """Run a relay with a rule of two votes; the mappings add to their sections."""
    async with simulated("db-0", "db-1") as azure, inbox() as receiver:
        file = folder / "relay.yaml"
        quorum = {"votes": 2, "from": [LOCAL_PRINCIPAL, "client:alice"]}
        alice = {"name": "alice", "key": ALICE_KEY, "can": ["read", "approve"]}
        place = {"listen": "127.0.0.1:0", "socket": str(folder / "relay.sock")}
        document = document_of(
            folder,
            azure,
            relay="auto",
            sinks=[webhook(receiver.url)],
            approvals={"rules": [{"name": "two", "approve": quorum}], **approvals},
            api={**place, "clients": [alice], **(api or {})},
        )
        file.write_bytes(orjson.dumps(document))  # JSON is YAML
        async with relay_in_process(azure, load(file, {}).config) as relay:
            poller = relay.running.relay.source
            assert isinstance(poller, Poller)
            yield RunningRelay(
                azure=azure,
                running=relay.running,
                poller=poller,
                receiver=receiver,
                config=str(file),
                store=folder / "relay.db",
            )
