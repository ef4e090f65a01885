"""The poller over loopback, with every fault of the simulator and a manual clock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from relay.errors import SourceError
from relay.events.model import Document
from relay.events.timestamps import format_rfc3339
from relay.imds import SourceSettings
from relay.imds.document import parse_document
from relay.imds.poller import ANSWER_TIMEOUT, FIRST_ANSWER_TIMEOUT, LARGE_BODY, Poller
from relay.simulator import VM, Fault, Plan, Setup, Simulator
from relay.store import RecordedEvent
from tests.clocks import NOON, ManualClock
from tests.eventually import eventually
from tests.imds.running_poller import running_poller
from tests.imds.scripted_server import Answer, Script, ScriptedServer, answers_in_order, run_server

_SECOND = 1.06
"""Seconds. It is longer than the window in which the client makes at most two calls."""


@dataclass
class Rig:
    clock: ManualClock
    poller: Poller
    reports: list[tuple[str, str]] = field(default_factory=list)
    recorded: list[RecordedEvent] = field(default_factory=list)
    """All that were recorded, also in memory."""

    @property
    def names(self) -> list[str]:
        return [event.name for event in self.recorded]

    @property
    def reported(self) -> list[str]:
        return [name for name, _ in self.reports]

    @property
    def outcome(self) -> tuple[str, str]:
        (ended,) = [each.event for each in self.recorded if each.name == "event.ended"]
        assert ended is not None
        return ended.data["outcome"], ended.data["evidence"]

    async def polled(self, times: int = 1) -> None:
        """Let this number of intervals pass, each with its poll."""
        for _ in range(times):
            before = self.poller.polls
            await self.resting()
            self.clock.advance(_SECOND)
            await eventually(lambda before=before: self.poller.polls > before)
            await self.resting()

    async def resting(self) -> None:
        """Wait until the poller sleeps: the watch does so at all times, and the pause makes two."""
        await eventually(lambda: self.poller.polls > 0 and len(self.clock.remaining_sleeps) >= 2)


@asynccontextmanager
async def rig(
    folder: Path, url: str, clock: ManualClock, *, last_read: datetime | None = None, **source: str
) -> AsyncIterator[Rig]:
    """Run a poller on a store in a folder. Only a call that hangs waits for the time limits."""
    usual = {"url": url, "timeout": "30s", "first_timeout": "30s"}
    settings = SourceSettings.model_validate(usual | source)
    reports: list[tuple[str, str]] = []

    def report(name: str, reason: str, **_: Any) -> None:
        reports.append((name, reason))

    polling = running_poller(folder, settings, clock, last_read=last_read, report=report)
    async with polling as (store, _, poller):
        running = Rig(clock, poller, reports)
        store.listeners.recorded.append(running.recorded.extend)
        yield running


def azure(clock: ManualClock) -> Simulator:
    return Simulator(Setup(vms=(VM("vm-0"),), rate_limit=None), clock=clock)


@asynccontextmanager
async def simulated(folder: Path, **given: Any) -> AsyncIterator[tuple[Rig, Simulator]]:
    clock = ManualClock()
    async with azure(clock) as sim, rig(folder, sim.url, clock, **given) as running:
        await running.resting()
        yield running, sim


@asynccontextmanager
async def served(
    folder: Path, answer: Answer | Script, **given: Any
) -> AsyncIterator[tuple[Rig, ScriptedServer]]:
    async with (
        run_server(answer) as server,
        rig(folder, server.url, ManualClock(), **given) as running,
    ):
        yield running, server


SCHEDULED = (
    b'{"Events": [{"EventId": "E-1", "EventStatus": "Scheduled",'
    b' "NotBefore": "2026-04-11T18:00:00Z"}]}'
)
NOTHING = b'{"Events": []}'


# --- polls


async def test_an_idle_poll_writes_nothing(tmp_path: Path) -> None:
    async with simulated(tmp_path) as (running, sim):
        sim.schedule(Plan())
        await running.polled()
        with contextlib.closing(sqlite3.connect(tmp_path / "relay.db")) as other:
            version = "PRAGMA data_version"  # moves when another connection commits a change
            before = other.execute(version).fetchone()
            await running.polled(5)
            assert other.execute(version).fetchone() == before
            sim.schedule(Plan())
            await running.polled()
            assert other.execute(version).fetchone() != before


async def test_a_large_document_is_read_as_a_small_one(tmp_path: Path) -> None:
    async with simulated(tmp_path) as (running, sim):
        for _ in range(100):
            sim.schedule(Plan(description="x" * (LARGE_BODY // 50)))
        await running.polled()
        assert running.names == ["event.scheduled"] * 100


async def test_a_change_has_the_read_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet orders what its agents say by it. A VM can freeze before it has parsed the body."""

    def parse_after_freeze(body: bytes, version: str) -> Document:
        running.clock.advance(60)
        return parse_document(body, version)

    monkeypatch.setattr("relay.imds.poller.parse_document", parse_after_freeze)
    async with served(tmp_path, Answer(SCHEDULED)) as (running, _):
        await eventually(lambda: bool(running.recorded))
        (event,) = running.recorded
        assert event.event is not None
        assert event.event.attributes["time"] == format_rfc3339(NOON)


# --- what is no document changes nothing


@pytest.mark.parametrize(
    "fault",
    [
        *(Fault(status=status, calls=3) for status in (400, 503)),
        *(Fault(kind=kind, calls=3) for kind in ("empty", "no-events", "reset")),
        Fault(kind="hang", calls=1),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
async def test_a_faulty_answer_ends_neither_events_nor_polls(tmp_path: Path, fault: Fault) -> None:
    timeout = "2s" if fault.kind == "hang" else "30s"
    async with simulated(tmp_path, timeout=timeout) as (running, sim):
        sim.schedule(Plan())
        await running.polled()
        sim.add_fault(fault)
        calls = len(sim.calls)
        await running.clock.advance_until(lambda: running.poller.failures == fault.calls)
        assert running.names == ["event.scheduled"]
        await running.clock.advance_until(lambda: running.poller.failures == 0)
        assert running.names == ["event.scheduled"]
        assert len(sim.calls) == calls + (fault.calls or 0) + 1
        sim.schedule(Plan())
        await running.clock.advance_until(lambda: running.names == ["event.scheduled"] * 2)


async def test_the_same_trouble_is_logged_once_and_so_is_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "relay.imds.poller")
    async with simulated(tmp_path) as (running, sim):
        sim.add_fault(Fault(status=503, calls=3))
        sim.add_fault(Fault(status=400, calls=2))
        await running.clock.advance_until(
            lambda: len(sim.calls) >= 6 and running.poller.failures == 0
        )
        sim.add_fault(Fault(status=400))
        await running.polled()
        logged = [record for record in caplog.records if record.name == "relay.imds.poller"]
        levels = ["WARNING", "ERROR", "INFO", "ERROR"]
        assert [record.levelname for record in logged[:4]] == levels
        assert "503" in logged[0].getMessage()
        assert "400" in logged[1].getMessage() == logged[3].getMessage()


async def test_retry_after_only_lengthens_and_no_question_cuts_it_short(tmp_path: Path) -> None:
    async with simulated(tmp_path) as (running, sim):
        sim.add_fault(Fault(status=429, retry_after=20.0))
        await running.polled()
        calls = len(sim.calls)
        question = asyncio.create_task(running.poller.read_with_imds_time())
        for _ in range(19):
            running.clock.advance(1)
            await asyncio.sleep(0)
        assert (len(sim.calls), question.done()) == (calls, False)
        running.clock.advance(1)
        await question
        assert len(sim.calls) == calls + 1


# --- fresh reads


async def test_a_fresh_read_waits_for_no_interval_and_counts_as_the_poll(tmp_path: Path) -> None:
    async with simulated(tmp_path, interval="10s") as (running, sim):
        running.clock.advance(4)
        sim.schedule(Plan())
        given_up = asyncio.create_task(running.poller.read_with_imds_time())
        await asyncio.sleep(0)
        given_up.cancel()  # those who ask for the same read get it
        await running.poller.read_with_imds_time()
        assert running.names == ["event.scheduled"]
        await running.resting()
        assert len(sim.calls) == 2
        assert running.clock.remaining_sleeps[0] == pytest.approx(10)


async def test_a_read_that_began_before_the_question_is_not_fresh(tmp_path: Path) -> None:
    script = answers_in_order(Answer(NOTHING, pause=0.1), Answer(SCHEDULED))
    async with served(tmp_path, script) as (running, server):
        await eventually(lambda: len(server.requests) == 1)
        await running.poller.read_with_imds_time()
        assert len(server.requests) == 2
        assert running.names == ["event.scheduled"]


async def test_whoever_asks_when_the_poller_stops_is_told_so(tmp_path: Path) -> None:
    script = answers_in_order(Answer(NOTHING), Answer(NOTHING, then="hang", raw=b""))
    async with served(tmp_path, script) as (running, server):
        await running.resting()
        asked = asyncio.create_task(running.poller.read_with_imds_time())
        await eventually(lambda: len(server.requests) == 2)
        late = asyncio.create_task(running.poller.read_with_imds_time())
        await asyncio.sleep(0)
    for question in (asked, late, running.poller.read_with_imds_time()):
        with pytest.raises(SourceError, match="stops"):
            await asyncio.wait_for(question, 60)


# --- whether it is there at all


async def test_the_source_is_lost_150_s_from_the_start_or_90_s_after_a_read(tmp_path: Path) -> None:
    clock = ManualClock()
    until = clock.advance_until
    async with azure(clock) as sim:
        sim.add_fault(Fault(status=503, lasts=1000.0))
        async with rig(tmp_path, sim.url, clock) as running:
            told: list[str] = []
            for timeout, cause in ((FIRST_ANSWER_TIMEOUT, "503"), (ANSWER_TIMEOUT, "empty body")):
                age = running.poller.read_age  # the clock went on while the read was recorded
                almost = clock.monotonic() - (age or 0.0) + timeout - 0.5
                await until(lambda almost=almost: clock.monotonic() >= almost, step=0.5)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
                assert not running.poller.lost
                await until(lambda: running.poller.lost, step=0.1, within=3)
                clock.advance(300)
                await until(lambda: running.poller.failures > 20)
                told.append("relay.source-lost")
                assert running.reported == told, "once"
                assert f"{timeout:g} s" in running.reports[-1][1]
                assert cause in running.reports[-1][1]
                sim.clear_faults()
                await until(lambda: not running.poller.lost)
                told.append("relay.source-recovered")
                sim.add_fault(Fault(kind="empty", lasts=1000.0))
            assert running.reported == told


async def test_a_document_too_large_is_reported_at_once_and_ends_nothing(tmp_path: Path) -> None:
    """Other failures pass by themselves; this one hides events until somebody acts."""
    async with simulated(tmp_path) as (running, sim):
        event = sim.schedule(Plan(lasts=None))
        await running.clock.advance_until(lambda: "event.scheduled" in running.names)
        sim.update_event(event, description="x" * 5_000_000)
        before = running.clock.monotonic()
        await running.clock.advance_until(lambda: running.poller.lost)
        assert running.clock.monotonic() - before < ANSWER_TIMEOUT
        await running.clock.advance_until(lambda: running.poller.failures > 30)
        ((name, reason),) = running.reports
        assert name == "relay.source-lost"
        assert "larger than 4 MiB" in reason
        assert "nothing is reported as ended" in reason
        reading = asyncio.create_task(running.poller.read_with_imds_time())
        await running.clock.advance_until(reading.done)
        with pytest.raises(SourceError, match="4 MiB"):
            await reading
        assert running.names == ["event.scheduled"]
        sim.update_event(event, description="x")
        await running.clock.advance_until(lambda: not running.poller.lost)
        assert running.reported == ["relay.source-lost", "relay.source-recovered"]
        sim.end(sim.start(event))
        await running.clock.advance_until(lambda: "event.ended" in running.names)


async def test_the_source_is_lost_also_while_a_call_hangs(tmp_path: Path) -> None:
    async with served(tmp_path, Answer(pause=60)) as (running, server):
        await eventually(lambda: len(server.requests) == 1)
        running.clock.advance(FIRST_ANSWER_TIMEOUT)
        await eventually(lambda: running.poller.lost)
        assert running.reported == ["relay.source-lost"]


# --- gaps: what may have started and ended unseen


CANCELED, UNKNOWN = ("canceled", "observed"), ("unknown", "none")


@pytest.mark.parametrize(
    ("expected", "last_read"),
    [
        (CANCELED, NOON - timedelta(seconds=4.9)),
        (UNKNOWN, NOON - timedelta(seconds=5.1)),
        (UNKNOWN, None),
        (UNKNOWN, NOON + timedelta(seconds=60)),
    ],
    ids=["a short stop", "a long stop", "a crash", "a clock that was set back"],
)
async def test_after_a_restart_the_stop_counts_as_the_gap(
    tmp_path: Path, expected: tuple[str, str], last_read: datetime | None
) -> None:
    clock = ManualClock()
    async with azure(clock) as sim:
        event = sim.schedule(Plan(notice=3600.0))
        async with rig(tmp_path, sim.url, clock) as running:
            await running.resting()
        sim.cancel(event)
        clock.advance(_SECOND)
        clock.set_wall_clock(NOON)
        async with rig(tmp_path, sim.url, clock, last_read=last_read) as running:
            assert running.poller.last_read_at == last_read
            await running.resting()
            assert running.outcome == expected


@pytest.mark.parametrize(
    ("expected", "api_version"), [(UNKNOWN, "2017-11-01"), (CANCELED, "2019-01-01")]
)
async def test_an_event_that_an_older_version_leaves_out_is_not_canceled(
    tmp_path: Path, expected: tuple[str, str], api_version: str
) -> None:
    """After a short stop. Who polls with the older version cannot know which it was."""
    clock = ManualClock()
    async with azure(clock) as sim:
        event = sim.schedule(Plan(type="Terminate", notice=600.0))
        async with rig(tmp_path, sim.url, clock) as running:
            await running.resting()
        if expected == CANCELED:
            sim.cancel(event)
        clock.advance(1)
        again = rig(tmp_path, sim.url, clock, last_read=clock.now(), api_version=api_version)
        async with again as running:
            await running.resting()
            assert running.outcome == expected


@pytest.mark.parametrize(
    ("expected", "interval", "wall", "monotonic"),
    [
        (CANCELED, "1s", 4.9, 4.9),
        (UNKNOWN, "1s", 5.1, 5.1),
        (CANCELED, "4s", 11.9, 11.9),
        (UNKNOWN, "4s", 12.1, 12.1),
        (UNKNOWN, "1s", 3600, 1.1),
        (UNKNOWN, "1s", -3600, 60),
        (CANCELED, "1s", -3600, 1.1),
    ],
)
async def test_polling_that_paused_for_too_long_by_either_clock_tells_no_cancellation(
    tmp_path: Path, expected: tuple[str, str], interval: str, wall: float, monotonic: float
) -> None:
    """Too long is more than three intervals and five seconds."""
    async with served(tmp_path, Answer(SCHEDULED), interval=interval) as (running, server):
        await running.resting()
        server.answer = Answer(NOTHING)
        clock, now = running.clock, running.clock.now()
        clock.advance(monotonic)
        clock.set_wall_clock(now + timedelta(seconds=wall))
        await eventually(lambda: "event.ended" in running.names)
        assert running.outcome == expected


async def test_the_time_that_a_call_took_is_a_part_of_the_interval(tmp_path: Path) -> None:

    def script(_: object) -> Answer:
        if len(server.requests) == 2:
            running.clock.advance(0.4)  # while the call is on its way
        return Answer()

    async with served(tmp_path, script, interval="3s") as (running, server):
        await running.resting()
        clock = running.clock
        clock.advance(3)
        await eventually(lambda: len(server.requests) == 2 and len(clock.remaining_sleeps) == 2)
        assert clock.remaining_sleeps[0] == pytest.approx(2.6)
