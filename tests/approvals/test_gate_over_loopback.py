"""The gate before the real client and poller, and an Azure that is simulated over loopback; all of them by one turned clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from relay.approvals.gate import Gate
from relay.approvals.service import ApprovalService
from relay.events.cloudevent import CloudEvent
from relay.imds import SourceSettings
from relay.imds.client import ImdsClient
from relay.imds.poller import Poller
from relay.ingest.recorder import Recorder
from relay.outbox import Identity, StoreSettings
from relay.outbox.journal import verify
from relay.outbox.sqlite import Store, open_store
from relay.simulator import VM, Event, Fault, Plan, Setup, Simulator
from tests.approvals.builders import ORIGIN, SETTINGS, SPEAKS
from tests.approvals.manual_clock import HandClock

_TURN = 0.1
USER = Plan(source="User", starts_after=2.0, lasts=5.0)


@dataclass
class Rig:
    """A relay's heart, beating."""

    sim: Simulator
    clock: HandClock
    store: Store

    async def told(self, *names: str) -> list[CloudEvent]:
        """What the journal says."""

        def work(tx: Any) -> list[CloudEvent]:
            verify(tx._connection)  # noqa: SLF001  # the chain is checked on the way
            return [
                one
                for _, one in tx.journal.events_after(0, 10_000)
                if not names or one.name in names
            ]

        return await self.store.read(work)

    async def until(self, condition: Callable[[], bool], within: float = 60.0) -> None:
        """Turn the clock until it holds."""
        await self.clock.turn_until(condition, step=_TURN, within=within)

    async def until_told(self, name: str, within: float = 60.0) -> CloudEvent:
        """Turn the clock until it was said; returns the last of that name."""
        heard: list[CloudEvent] = []
        self.store.listeners.recorded.append(
            lambda recorded: heard.extend(one.event for one in recorded if one.event.name == name)
        )
        heard[:0] = await self.told(name)
        await self.until(lambda: bool(heard), within)
        return heard[-1]

    @property
    def calls(self) -> str:
        """G for each read, P for each StartRequest."""
        return "".join(call.method[0] for call in self.sim.calls)


@asynccontextmanager
async def rig(
    folder: Path,
    sim: Simulator,
    clock: HandClock,
    *,
    boot: str = "boot-1",
    timeout: str = "30s",  # noqa: ASYNC109  # the setting's own name
) -> AsyncIterator[Rig]:
    """A relay on the store in a folder; leaving the context is a kill. ``timeout`` is real time, and long unless a call hangs."""
    source = SourceSettings.model_validate(
        {"url": sim.url, "timeout": timeout, "first_timeout": timeout}
    )
    async with (
        open_store(
            StoreSettings(path=folder / "relay.db"),
            Identity(ORIGIN.scope, "vm"),
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
            say=lambda *_: None,
            last_read=None,
            chance=lambda: 0.0,
        )
        gate = Gate(
            ApprovalService(SETTINGS, ORIGIN, client_resources=SPEAKS),
            store,
            poller,
            clock,
            lambda _: True,
        )
        tasks = [asyncio.create_task(poller.run()), asyncio.create_task(gate.run())]
        try:
            yield Rig(sim, clock, store)
            assert not any(task.done() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@pytest.fixture
async def azure() -> AsyncIterator[tuple[Simulator, HandClock]]:
    """A simulated Azure, and the clock by which it lives."""
    clock = HandClock()
    async with Simulator(Setup(vms=(VM("vm-0"), VM("vm-1"))), clock=clock) as sim:
        yield sim, clock


def _keeps_the_pace(sim: Simulator) -> None:
    """Two calls in a second at the most, every other one a read at the least, and each StartRequest right after a read."""
    calls = list(sim.calls)
    for before, call in zip(calls, calls[2:], strict=False):
        assert (
            call.at - before.at
        ).total_seconds() > 1.0 - 2 * _TURN  # the clock may be turned while a call is on its way
    for before, call in pairwise(calls):
        assert "GET" in (before.method, call.method)


async def test_a_reboot_that_a_user_wants_is_approved_at_once_and_runs_to_its_end(
    tmp_path: Path, azure: tuple[Simulator, HandClock]
) -> None:
    async with rig(tmp_path, *azure) as it:
        event = it.sim.schedule(USER)
        await it.until_told("event.ended")
        assert it.sim.event(event).approved_by == ("vm-0",)
        assert [one.name for one in await it.told()] == [
            "event.scheduled",
            "approval.granted",
            "startrequest.accepted",
            "event.started",
            "event.ended",
        ]
        started, ended = await it.told("event.started", "event.ended")
        assert started.data["approvedByRelay"] is True
        assert (ended.data["outcome"], ended.data["evidence"], ended.data["approvedByRelay"]) == (
            "completed",
            "observed",
            True,
        )
        assert it.calls.count("P") == 1
        _keeps_the_pace(it.sim)


async def test_503_is_tried_again_with_a_fresh_read_before_each(
    tmp_path: Path, azure: tuple[Simulator, HandClock]
) -> None:
    async with rig(tmp_path, *azure) as it:
        it.sim.fault(Fault(status=503, on="approval", calls=3))
        it.sim.schedule(USER)
        accepted = await it.until_told("startrequest.accepted")
        assert accepted.data["attempts"] == 4
        assert it.calls.count("P") == 4
        _keeps_the_pace(it.sim)


async def test_two_events_in_one_start_request_are_split_by_a_400(
    tmp_path: Path, azure: tuple[Simulator, HandClock]
) -> None:
    async with rig(tmp_path, *azure) as it:
        it.sim.fault(Fault(status=400, on="approval", calls=2))
        first, second = it.sim.schedule(USER), it.sim.schedule(USER)
        failed = await it.until_told("startrequest.failed")
        accepted = await it.until_told("startrequest.accepted")
        sent = [call.event_ids for call in it.sim.start_requests]
        assert sorted(sent[0]) == sorted((first.event_id, second.event_id))
        assert [len(ids) for ids in sent] == [2, 1, 1]
        assert {failed.subject, accepted.subject} == {first.event_id, second.event_id}
        assert failed.data["status"] == 400
        _keeps_the_pace(it.sim)


@pytest.mark.parametrize("kind", ["hang", "reset"])
async def test_an_answer_that_is_lost_is_not_known_and_not_sent_again_once_started(
    tmp_path: Path, azure: tuple[Simulator, HandClock], kind: Any
) -> None:
    """A StartRequest that Azure took: after a fresh read the event is Started."""
    async with rig(tmp_path, *azure, timeout="2s" if kind == "hang" else "30s") as it:
        it.sim.fault(Fault(kind=kind, on="approval", processed=True))
        event = it.sim.schedule(Plan(source="User", starts_after=0.0, lasts=None))
        failed = await it.until_told("startrequest.failed")
        assert (failed.subject, failed.data["status"], failed.data["attempts"]) == (
            event.event_id,
            None,
            1,
        )
        assert "not known" in failed.data["reason"]
        assert it.calls.count("P") == 1
        assert (await it.told("event.started"))[0].data["approvedByRelay"] is False


async def test_an_answer_that_is_lost_is_sent_again_while_scheduled(
    tmp_path: Path, azure: tuple[Simulator, HandClock]
) -> None:
    async with rig(tmp_path, *azure) as it:
        it.sim.fault(Fault(kind="reset", on="approval", processed=True))
        it.sim.schedule(Plan(source="User", starts_after=30.0, lasts=None))
        accepted = await it.until_told("startrequest.accepted")
        assert accepted.data["attempts"] == 2
        assert it.calls.count("P") == 2


async def test_what_another_vm_approved_is_not_ours(
    tmp_path: Path, azure: tuple[Simulator, HandClock]
) -> None:
    async with rig(tmp_path, *azure) as it:
        event = it.sim.schedule(Plan(lasts=2.0))
        await it.until_told("event.scheduled")
        it.sim.approve(event, "vm-1")
        ended = await it.until_told("event.ended")
        assert (ended.data["outcome"], ended.data["approvedByRelay"]) == ("completed", False)
        assert it.calls.count("P") == 0


async def _killed_in_flight(folder: Path, sim: Simulator, clock: HandClock) -> Event:
    async with rig(folder, sim, clock) as it:
        sim.fault(Fault(kind="hang", on="approval", processed=True))
        event = sim.schedule(Plan(source="User", starts_after=30.0, lasts=10.0))
        await it.until(lambda: bool(sim.start_requests))
        return event


async def test_a_kill_in_flight_is_repeated_while_scheduled(
    tmp_path: Path, azure: tuple[Simulator, HandClock]
) -> None:
    event = await _killed_in_flight(tmp_path, *azure)
    async with rig(tmp_path, *azure) as it:
        accepted = await it.until_told("startrequest.accepted")
        assert (accepted.subject, accepted.data["attempts"]) == (event.event_id, 2)
        assert len(await it.told("approval.granted")) == 1


async def test_a_kill_by_the_very_reboot_is_told_after_the_boot(
    tmp_path: Path, azure: tuple[Simulator, HandClock]
) -> None:
    """The StartRequest was taken, the VM went down before the answer was written, and comes back to an empty document."""
    sim, clock = azure
    event = await _killed_in_flight(tmp_path, sim, clock)
    clock.turn(60)
    sim.tick()
    assert not sim.event(event).live
    async with rig(tmp_path, sim, clock, boot="boot-2") as it:
        ended = await it.until_told("event.ended")
        failed = await it.until_told("startrequest.failed")
        assert (ended.data["outcome"], ended.data["evidence"], ended.data["approvedByRelay"]) == (
            "completed",
            "rebooted",
            False,
        )
        assert "not known" in failed.data["reason"]
        assert len(sim.start_requests) == 1
