"""Azure reboots the relay's own VM: what the receiver knows before, and the relay afterwards.

The relay ends with its VM: by SIGKILL if a host fails, by SIGTERM if the VM shuts down in order.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relay.simulator import VM, Event, Fault, Plan, Setup, Simulator
from tests.eventually import eventually
from tests.journey.relay_process import Inbox, RelayProcess, client, inbox, relay, webhook

BEFORE = ["event.scheduled", "approval.recorded", "approval.granted"]
"""The notices that the receiver must have before the StartRequest."""


@dataclass(slots=True)
class Machine:
    """A VM with a relay, a simulated Azure and a receiver elsewhere."""

    azure: Simulator
    receiver: Inbox
    relay: RelayProcess
    folder: Path
    known_at_approval: list[list[str]]
    """The notices that the receiver had each time Azure took a StartRequest for the event."""

    async def boot(self, number: int) -> None:
        (self.folder / "boot-id").write_text(f"boot-{number}\n")
        await self.relay.start()

    async def approve_reboot(self) -> Event:
        event = self.azure.schedule(
            Plan(type="Reboot", resources=("vm-0",), lasts=None, starts_after=600.0)
        )
        await self.relay.shown(event, "pending")
        status, answer = await self.relay.approve(event)
        assert (status, answer["state"]) == (202, "granted")
        return event

    async def wait_for_notice(self, event: Event, name: str) -> None:
        """Wait until the receiver has this notice about the event."""
        await eventually(
            lambda: name in self.receiver.types_of(event.event_id), within=30, what=name
        )

    def outcome(self, event: Event) -> tuple[str, str, bool]:
        """Return outcome, evidence and approvedByRelay of the receiver's only event.ended."""
        (ended,) = (
            notice["data"]
            for notice in self.receiver.by_subject()[event.event_id]
            if notice["type"].endswith(".event.ended.v1")
        )
        return ended["outcome"], ended["evidence"], ended["approvedByRelay"]


@asynccontextmanager
async def machine(folder: Path, **approvals: Any) -> AsyncIterator[Machine]:
    """Boot a VM for the first time. ``approvals``: more settings of this section."""
    known_at_approval: list[list[str]] = []

    def read_log_line(line: str) -> None:
        _, action, _, event_id, *_ = (*line.split(), "", "", "", "")
        if action == "approved":
            known_at_approval.append(receiver.types_of(event_id))

    async with (
        inbox() as receiver,
        Simulator(Setup(vms=(VM("vm-0"),)), report=read_log_line) as azure,
    ):
        rule = {"name": "all", "approve": {"votes": 1, "from": ["client:drain"]}}
        document = {
            "source": {"url": azure.url},
            "sinks": [webhook(receiver.url)],
            "approvals": {"rules": [rule], **approvals},
            "api": {"clients": [client()]},
        }
        prefix = (sys.executable, "-m", "tests.journey.with_boot_id", str(folder / "boot-id"))
        async with relay(folder, document, prefix=prefix) as process:
            vm = Machine(azure, receiver, process, folder, known_at_approval)
            await vm.boot(1)
            yield vm


async def test_notices_come_first_and_the_boot_id_shows_the_reboot(tmp_path: Path) -> None:
    """The relay is killed after Azure accepted. It starts under another boot id.

    See docs/guarantees.md#notices-come-before-the-startrequest and
    docs/guarantees.md#an-outcome-is-what-this-relay-saw.
    """
    async with machine(tmp_path) as vm:
        event = await vm.approve_reboot()
        await vm.wait_for_notice(event, "startrequest.accepted")
        await vm.relay.kill()
        vm.azure.start(event)
        vm.azure.end(event)
        await vm.boot(2)
        await vm.wait_for_notice(event, "event.ended")
        assert vm.known_at_approval == [BEFORE]
        told = vm.receiver.types_of(event.event_id)
        assert told == [*BEFORE, "startrequest.accepted", "event.ended"]
        assert vm.outcome(event) == ("completed", "rebooted", True)
        assert len(vm.azure.start_requests) == 1


async def test_a_reboot_before_the_answer_leaves_the_start_request_unknown(tmp_path: Path) -> None:
    """The relay is killed during the POST. It reports the reboot as completed.

    It cannot know whether Azure took the StartRequest.
    """
    async with machine(tmp_path) as vm:
        vm.azure.add_fault(Fault(kind="hang", on="approval", calls=1, processed=True))
        event = await vm.approve_reboot()
        await vm.azure.wait_until_approved(event, within=30)
        await vm.relay.kill()
        vm.azure.start(event)
        vm.azure.end(event)
        await vm.boot(2)
        await vm.wait_for_notice(event, "startrequest.failed")
        assert vm.known_at_approval == [BEFORE]
        told = vm.receiver.types_of(event.event_id)
        assert told == [*BEFORE, "event.ended", "approval.voided", "startrequest.failed"]
        assert vm.outcome(event) == ("completed", "rebooted", False)
        failed = vm.receiver.by_subject()[event.event_id][-1]["data"]
        assert "whether IMDS took the StartRequest is not known" in failed["reason"]
        assert len(vm.azure.start_requests) == 1
        kinds = [row.kind for row in vm.relay.journal()]
        assert kinds == [*BEFORE, "claim", "event.ended", "approval.voided", "startrequest.failed"]


async def test_an_orderly_shutdown_tells_first_that_azure_accepted(tmp_path: Path) -> None:
    """SIGTERM comes while Azure accepts. The relay reports the answer and exits with 0 in time."""
    async with machine(tmp_path) as vm:
        vm.azure.add_fault(Fault(kind="delay", on="approval", calls=1, time=1.0))
        event = await vm.approve_reboot()
        await vm.azure.wait_until(lambda: bool(vm.azure.start_requests), within=30)
        assert await vm.relay.stop() == 0
        assert vm.receiver.types_of(event.event_id) == [*BEFORE, "startrequest.accepted"]
        vm.azure.start(event)
        vm.azure.end(event)
        await vm.boot(2)
        await vm.wait_for_notice(event, "event.ended")
        assert vm.outcome(event) == ("completed", "rebooted", True)
        assert len(vm.azure.start_requests) == 1
