"""The relay's own machine is what is rebooted: what is known elsewhere before it goes, and what the relay knows afterwards.

Azure ends the relay with the machine: by SIGKILL where a host fails, by SIGTERM where the machine shuts down in order.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relay.outbox.file import open_for_reading
from relay.outbox.journal import read_rows, verify_journal
from relay.simulator import VM, Event, Fault, Plan, Setup, Simulator
from tests.journey.relay_process import (
    Inbox,
    RelayProcess,
    client,
    eventually,
    inbox,
    relay,
    webhook,
)

BEFORE = ["event.scheduled", "approval.recorded", "approval.granted"]
"""What must be known elsewhere before the StartRequest."""


@dataclass(slots=True)
class Machine:
    """A VM, with the relay on it, the Azure around it and a receiver elsewhere."""

    azure: Simulator
    receiver: Inbox
    relay: RelayProcess
    folder: Path
    known_at_approval: list[list[str]]
    """What the receiver had been told about the event at each moment at which Azure took a StartRequest for it."""

    async def boot(self, number: int) -> None:
        """The machine is up again, under another boot id, and its relay with it."""
        (self.folder / "boot-id").write_text(f"boot-{number}\n")
        await self.relay.start()

    async def approved(self) -> Event:
        """A reboot of this VM is announced, and somebody approves it."""
        event = self.azure.schedule(
            Plan(type="Reboot", resources=("vm-0",), lasts=None, starts_after=600.0)
        )
        seen = await self.state(event, "pending")
        wish = {"eventId": event.event_id, "decision": "approve", "revision": seen["revision"]}
        status, answer = await self.relay.call("POST", "/v1/approvals", wish)
        assert (status, answer["state"]) == (202, "granted")
        return event

    async def state(self, event: Event, state: str) -> dict[str, Any]:
        """The event as the API gives it, once its approval is in this state."""
        seen: dict[str, Any] = {}

        async def there() -> bool:
            status, body = await self.relay.call("GET", f"/v1/events/{event.event_id}")
            seen.update(body if status == 200 else {})
            return status == 200 and bool(body["approval"]["state"] == state)

        await eventually(there, every=0.2, within=30)  # a client may ask ten times a second
        return seen

    async def told(self, event: Event, name: str) -> None:
        """Wait until the receiver was told."""
        await eventually(
            lambda: name in self.receiver.types_of(event.event_id), within=30, what=name
        )

    def end_of(self, event: Event) -> tuple[str, str, bool]:
        """How the event ended, as the receiver was told."""
        (ended,) = (
            one["data"]
            for one in self.receiver.by_subject()[event.event_id]
            if one["type"].endswith(".event.ended.v1")
        )
        return ended["outcome"], ended["evidence"], ended["approvedByRelay"]

    def journal(self) -> list[str]:
        """The kinds of all rows; the chain holds."""
        connection = open_for_reading(self.relay.store)
        try:
            verify_journal(connection)
            return [row.kind for row in read_rows(connection)]
        finally:
            connection.close()


@asynccontextmanager
async def machine(folder: Path, **approvals: Any) -> AsyncIterator[Machine]:
    """A VM that has booted for the first time."""
    known: list[list[str]] = []

    def watch(line: str) -> None:
        _, what, _, event_id, *_ = (*line.split(), "", "", "", "")  # the simulator's log
        if what == "approved":
            known.append(box.types_of(event_id))

    async with inbox() as box, Simulator(Setup(vms=(VM("vm-0"),)), report=watch) as azure:
        document = {
            "source": {"url": azure.url},
            "sinks": [webhook(box.url)],
            "approvals": {
                "rules": [{"name": "all", "approve": {"votes": 1, "from": ["client:drain"]}}],
                **approvals,
            },
            "api": {"clients": [client()]},
        }
        prefix = (sys.executable, "-m", "tests.journey.with_boot_id", str(folder / "boot-id"))
        async with relay(folder, document, prefix=prefix) as process:
            found = Machine(azure, box, process, folder, known)
            await found.boot(1)
            yield found


async def test_what_has_to_be_known_is_known_before_and_the_boot_tells_that_it_happened(
    tmp_path: Path,
) -> None:
    """Killed once Azure had accepted; another boot; an empty document: completed, evidence rebooted (promises 1 and 4)."""
    async with machine(tmp_path) as vm:
        event = await vm.approved()
        await vm.told(event, "startrequest.accepted")
        await vm.relay.kill()
        vm.azure.start(event)
        vm.azure.end(event)
        await vm.boot(2)
        await vm.told(event, "event.ended")
        assert vm.known_at_approval == [BEFORE]
        assert vm.receiver.types_of(event.event_id) == [
            *BEFORE,
            "startrequest.accepted",
            "event.ended",
        ]
        assert vm.end_of(event) == ("completed", "rebooted", True)
        assert len(vm.azure.start_requests) == 1


async def test_a_machine_that_goes_before_the_answer_came_is_told_as_it_is_known(
    tmp_path: Path,
) -> None:
    """Killed while the POST was under way: that Azure took it is not known, that the machine was rebooted is."""
    async with machine(tmp_path) as vm:
        vm.azure.fault(Fault(kind="hang", on="approval", calls=1, processed=True))
        event = await vm.approved()
        await vm.azure.approved(event, within=30)
        await vm.relay.kill()
        vm.azure.start(event)
        vm.azure.end(event)
        await vm.boot(2)
        await vm.told(event, "startrequest.failed")
        assert vm.known_at_approval == [BEFORE]
        assert vm.receiver.types_of(event.event_id) == [
            *BEFORE,
            "event.ended",
            "approval.voided",
            "startrequest.failed",
        ]
        assert vm.end_of(event) == ("completed", "rebooted", False)
        failed = vm.receiver.by_subject()[event.event_id][-1]["data"]
        assert "whether IMDS took the StartRequest is not known" in failed["reason"]
        assert len(vm.azure.start_requests) == 1
        assert vm.journal() == [
            *BEFORE,
            "claim",
            "event.ended",
            "approval.voided",
            "startrequest.failed",
        ]


async def test_a_start_that_was_seen_is_the_better_evidence(tmp_path: Path) -> None:
    async with machine(tmp_path) as vm:
        event = await vm.approved()
        await vm.told(event, "startrequest.accepted")
        vm.azure.start(event)
        await vm.told(event, "event.started")
        await vm.relay.kill()
        vm.azure.end(event)
        await vm.boot(2)
        await vm.told(event, "event.ended")
        assert vm.end_of(event) == ("completed", "observed", True)


async def test_where_no_boot_came_between_the_end_is_unknown(tmp_path: Path) -> None:
    """The relay was killed alone, the event is gone from Scheduled, and a StartRequest of ours had been sent."""
    async with machine(tmp_path) as vm:
        event = await vm.approved()
        await vm.told(event, "startrequest.accepted")
        await vm.relay.kill()
        vm.azure.cancel(event)
        await vm.boot(1)
        await vm.told(event, "event.ended")
        assert vm.end_of(event) == ("unknown", "none", True)


async def test_a_receiver_that_was_down_hears_everything_in_order_after_the_boot(
    tmp_path: Path,
) -> None:
    """tell_first passes, the machine goes, and what waited is told by the next life: nothing recorded is lost.

    See docs/guarantees.md#nothing-recorded-is-lost.
    """
    async with machine(tmp_path, tell_first="1s") as vm:
        vm.receiver.status = 503
        event = await vm.approved()
        await vm.state(event, "accepted")
        await vm.relay.kill()
        vm.azure.start(event)
        vm.azure.end(event)
        vm.receiver.status = 204
        await vm.boot(2)
        await vm.told(event, "event.ended")
        assert vm.known_at_approval == [[]]
        assert vm.receiver.types_of(event.event_id) == [
            *BEFORE,
            "startrequest.accepted",
            "event.ended",
        ]
        assert vm.end_of(event) == ("completed", "rebooted", True)


async def test_a_machine_that_shuts_down_in_order_says_first_that_its_request_was_accepted(
    tmp_path: Path,
) -> None:
    """SIGTERM at the very moment at which Azure accepts: the relay still has its answer, tells it, and ends with 0 in time."""
    async with machine(tmp_path) as vm:
        vm.azure.fault(Fault(kind="delay", on="approval", calls=1, time=1.0))
        event = await vm.approved()
        await vm.azure.until(lambda: bool(vm.azure.start_requests), within=30)
        assert await vm.relay.stop() == 0
        assert vm.receiver.types_of(event.event_id) == [*BEFORE, "startrequest.accepted"]
        vm.azure.start(event)
        vm.azure.end(event)
        await vm.boot(2)
        await vm.told(event, "event.ended")
        assert vm.end_of(event) == ("completed", "rebooted", True)
        assert len(vm.azure.start_requests) == 1


async def test_a_machine_that_shuts_down_before_its_request_sends_none_and_forgets_nothing(
    tmp_path: Path,
) -> None:
    """SIGTERM while tell_first waits: the drain sends no StartRequest, and the next life sends it once."""
    async with machine(tmp_path, tell_first="30s") as vm:
        vm.receiver.status = 503
        event = await vm.approved()
        assert await vm.relay.stop() == 0
        assert not vm.azure.start_requests
        vm.receiver.status = 204
        await vm.boot(2)
        await vm.told(event, "startrequest.accepted")
        assert vm.receiver.types_of(event.event_id) == [*BEFORE, "startrequest.accepted"]
        assert len(vm.azure.start_requests) == 1
