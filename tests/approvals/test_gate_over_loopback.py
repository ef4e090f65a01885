"""The gate with the real client, poller and store, against the simulator over loopback.

All of them share one manual clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import Gate
from relay.events.cloudevent import CloudEvent
from relay.imds import SourceSettings
from relay.imds.client import ImdsClient
from relay.imds.poller import ImdsStartRequestPort, Poller
from relay.ingest.recorder import Recorder
from relay.simulator import VM, Event, Fault, Plan, Setup, Simulator
from relay.store import StateFileScopeAndVm, StoreSettings
from relay.store.journal import verify_journal
from relay.store.sqlite import Store, open_store
from tests.approvals.builders import CLIENT_RESOURCES, ORIGIN, SETTINGS
from tests.clocks import ManualClock

_CLOCK_STEP = 0.1
USER = Plan(source="User", starts_after=2.0, lasts=5.0)


@dataclass
class RelayHarness:
    """A poller and a gate that run, with what a test needs of them."""

    sim: Simulator
    clock: ManualClock
    store: Store

    async def events(self, *names: str) -> list[CloudEvent]:
        """The events in the journal; the hash chain is checked too."""

        def read_events(tx: Any) -> list[CloudEvent]:
            verify_journal(tx._connection)  # noqa: SLF001  # for the check
            return [
                recorded
                for _, recorded in tx.journal.events_after(0, 10_000)
                if not names or recorded.name in names
            ]

        return await self.store.read(read_events)

    async def advance_until(self, condition: Callable[[], bool], within: float = 60.0) -> None:
        """Advance the clock until the condition holds."""
        await self.clock.advance_until(condition, step=_CLOCK_STEP, within=within)

    async def wait_for_event(self, name: str, within: float = 60.0) -> CloudEvent:
        """Advance the clock until the journal has an event with this name; return the last one."""
        matching: list[CloudEvent] = []
        self.store.listeners.recorded.append(
            lambda recorded: matching.extend(
                item.event for item in recorded if item.event and item.name == name
            )
        )
        matching[:0] = await self.events(name)
        await self.advance_until(lambda: bool(matching), within)
        return matching[-1]

    @property
    def calls(self) -> str:
        """G for each read, P for each StartRequest."""
        return "".join(call.method[0] for call in self.sim.calls)


@asynccontextmanager
async def running_relay(
    folder: Path,
    sim: Simulator,
    clock: ManualClock,
    *,
    boot: str = "boot-1",
    timeout: str = "30s",  # noqa: ASYNC109  # the setting's own name
) -> AsyncIterator[RelayHarness]:
    """Run a poller and a gate on the store in a folder. Leaving the context kills them.

    ``timeout`` is in real time, and long unless a call hangs.
    """
    source = SourceSettings.model_validate(
        {"url": sim.url, "timeout": timeout, "first_timeout": timeout}
    )
    async with (
        open_store(
            StoreSettings(path=folder / "relay.db"),
            StateFileScopeAndVm(ORIGIN.scope, "vm"),
            clock,
            lambda _: (),
        ) as store,
        ImdsClient(source, clock) as client,
    ):
        recorder = Recorder(ORIGIN, boot, frozenset({"vm-0"}))
        poller = Poller(
            source,
            client,
            recorder,
            store,
            clock,
            report=lambda *_, **__: None,
            last_read_at=None,
            jitter=lambda: 0.0,
        )
        gate = Gate(
            ApprovalEngine(SETTINGS, ORIGIN, client_resources=CLIENT_RESOURCES),
            store,
            ImdsStartRequestPort(poller, client),
            clock,
            lambda _: True,
        )
        tasks = [asyncio.create_task(poller.run()), asyncio.create_task(gate.run())]
        try:
            yield RelayHarness(sim, clock, store)
            assert not any(task.done() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@pytest.fixture
async def azure() -> AsyncIterator[tuple[Simulator, ManualClock]]:
    """A simulated Azure, and its clock."""
    clock = ManualClock()
    async with Simulator(Setup(vms=(VM("vm-0"), VM("vm-1"))), clock=clock) as sim:
        yield sim, clock


def _assert_call_rate(sim: Simulator) -> None:
    """At most two calls a second, and a read right before each StartRequest."""
    calls = list(sim.calls)
    for before, call in zip(calls, calls[2:], strict=False):
        assert (
            (call.at - before.at).total_seconds() > 1.0 - 2 * _CLOCK_STEP
        )  # the clock may be turned while a call is on its way
    for before, call in pairwise(calls):
        assert "GET" in (before.method, call.method)


async def test_a_reboot_by_a_user_is_approved_at_once_and_ends(
    tmp_path: Path, azure: tuple[Simulator, ManualClock]
) -> None:
    async with running_relay(tmp_path, *azure) as relay:
        event = relay.sim.schedule(USER)
        await relay.wait_for_event("event.ended")
        assert relay.sim.event(event).approved_by == ("vm-0",)
        assert [recorded.name for recorded in await relay.events()] == [
            "event.scheduled",
            "approval.granted",
            "startrequest.accepted",
            "event.started",
            "event.ended",
        ]
        started, ended = await relay.events("event.started", "event.ended")
        assert started.data["approvedByRelay"] is True
        assert (ended.data["outcome"], ended.data["evidence"], ended.data["approvedByRelay"]) == (
            "completed",
            "observed",
            True,
        )
        assert relay.calls.count("P") == 1
        _assert_call_rate(relay.sim)


@pytest.mark.parametrize("kind", ["hang", "reset"])
async def test_a_start_request_with_a_lost_answer_is_not_repeated_once_started(
    tmp_path: Path, azure: tuple[Simulator, ManualClock], kind: Any
) -> None:
    """Azure took the StartRequest: the fresh read finds the event Started."""
    async with running_relay(tmp_path, *azure, timeout="2s" if kind == "hang" else "30s") as relay:
        relay.sim.add_fault(Fault(kind=kind, on="approval", processed=True))
        event = relay.sim.schedule(Plan(source="User", starts_after=0.0, lasts=None))
        failed = await relay.wait_for_event("startrequest.failed")
        assert (failed.subject, failed.data["status"], failed.data["attempts"]) == (
            event.event_id,
            None,
            1,
        )
        assert "not known" in failed.data["reason"]
        assert relay.calls.count("P") == 1
        assert (await relay.events("event.started"))[0].data["approvedByRelay"] is False


async def _killed_in_flight(folder: Path, sim: Simulator, clock: ManualClock) -> Event:
    async with running_relay(folder, sim, clock) as relay:
        sim.add_fault(Fault(kind="hang", on="approval", processed=True))
        event = sim.schedule(Plan(source="User", starts_after=30.0, lasts=10.0))
        await relay.advance_until(lambda: bool(sim.start_requests))
        return event


async def test_a_kill_by_the_approved_reboot_is_reported_after_the_boot(
    tmp_path: Path, azure: tuple[Simulator, ManualClock]
) -> None:
    """The VM goes down before the answer is written, and comes back to an empty document."""
    sim, clock = azure
    event = await _killed_in_flight(tmp_path, sim, clock)
    clock.advance(60)
    sim.tick()
    assert not sim.event(event).is_live
    async with running_relay(tmp_path, sim, clock, boot="boot-2") as relay:
        ended = await relay.wait_for_event("event.ended")
        failed = await relay.wait_for_event("startrequest.failed")
        assert (ended.data["outcome"], ended.data["evidence"], ended.data["approvedByRelay"]) == (
            "completed",
            "rebooted",
            False,
        )
        assert "not known" in failed.data["reason"]
        assert len(sim.start_requests) == 1
