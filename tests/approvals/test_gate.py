"""The gate on a real store, before a port that is a few lines; the clock is turned by hand."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.gate import Gate
from relay.approvals.request import DecisionAnswer
from relay.approvals.service import ApprovalService
from relay.errors import SourceError, SourceRefused, SourceUnavailable, StoreUnavailable
from relay.events.cloudevent import CloudEvent
from relay.events.model import Document, Event
from relay.ingest.recorder import PollResult, Recorder
from relay.outbox import Identity, StoreSettings
from relay.outbox.file import open_for_reading
from relay.outbox.journal import rows, verify
from relay.outbox.sqlite import Store, open_store
from tests.approvals.builders import BOOT, ORIGIN, SETTINGS, SPEAKS, approval, event
from tests.approvals.manual_clock import NOON, HandClock, eventually

USER, OTHER, ONE = (
    event(event_source="User"),
    event("E-2", event_source="User"),
    event(event_type="Redeploy"),
)
STARTED = event(event_source="User", event_status="Started", not_before=None)
REFUSED = SourceRefused("expected 200, got 400", status=400)
UNAVAILABLE = SourceUnavailable("expected 200, got 503", status=503)
TIMEOUT = SourceUnavailable("expected an answer within 10s, none came whole")


class Azure:
    """IMDS as the gate sees it: a document to read afresh, and StartRequests that are answered as a test says."""

    def __init__(self, clock: HandClock, *events: Event) -> None:
        self.events: tuple[Event, ...] = events
        self.answers: deque[SourceError | None] = deque()
        self.unreadable: deque[SourceError] = deque()
        self.sent: list[tuple[str, ...]] = []
        self.reads = 0
        self.under_way = 0
        self.after_read: Callable[[], object] = lambda: None
        self.reading, self.answering = asyncio.Event(), asyncio.Event()
        self.reading.set()
        self.answering.set()
        self.store: Store
        self._clock = clock
        self._recorder = Recorder(ORIGIN, BOOT, frozenset({"db-1"}))

    async def read_fresh(self) -> None:
        """Read and record, when the test lets it."""
        self.reads += 1
        await self.reading.wait()
        if self.unreadable:
            raise self.unreadable.popleft()
        await self.read()
        self.after_read()

    async def read(self) -> None:
        """As a poll does."""
        sighting = PollResult(Document(1, self.events), self._clock.now(), gap=False)
        await self.store.transact(lambda tx: self._recorder.record(tx, sighting), fail_open=True)

    async def start(self, event_ids: Sequence[str]) -> None:
        """Answer, when the test lets it."""
        assert self.under_way == 0, "two StartRequests in flight"
        self.under_way += 1
        try:
            self.sent.append(tuple(event_ids))
            await self.answering.wait()
        finally:
            self.under_way -= 1
        answer = self.answers.popleft() if self.answers else None
        if answer is not None:
            raise answer


class Bench:
    """A gate that runs, and everything around it."""

    def __init__(
        self, path: Path, clock: HandClock, azure: Azure, store: Store, gate: Gate
    ) -> None:
        self.path, self.clock, self.azure, self.store, self.gate = path, clock, azure, store, gate

    async def see(self, *events: Event) -> None:
        """Azure's document changes, and a poll reads it."""
        self.azure.events = events
        await self.azure.read()

    async def submit(self, *given: Any, **changes: Any) -> DecisionAnswer:
        """Somebody asks for something."""
        return await self.gate.submit(approval(*given, at=self.clock.now(), **changes))

    def told(self, *names: str) -> list[CloudEvent]:
        """What the file's journal says, by a connection of its own; the chain is checked."""
        with contextlib.closing(open_for_reading(self.path)) as reader:
            verify(reader)
            said = [
                CloudEvent.parse(row.body)
                for row in rows(reader)
                if row.kind not in ("claim", "mode")
            ]
        return [one for one in said if not names or one.name in names]

    def kinds(self) -> list[str]:
        """The kinds of the journal's rows."""
        with contextlib.closing(open_for_reading(self.path)) as reader:
            return [row.kind for row in rows(reader)]

    async def until_told(self, name: str, times: int = 1) -> list[CloudEvent]:
        """Wait until it was said so often."""
        await eventually(lambda: len(self.told(name)) >= times)
        await self.at_rest()  # else the clock could be turned between the gate's look and its sleep
        return self.told(name)

    async def delivered(self) -> None:
        """Every sink has got everything."""

        def work(tx: Any) -> None:
            for entry in tx.deliveries.waiting():
                tx.deliveries.settle(entry.id, "delivered", None, NOON)

        await self.store.transact(work)

    async def at_rest(self) -> None:
        """Wait until the gate has done what it can: more round trips through the store than its whole road has."""
        for _ in range(8):
            await self.store.read(lambda _: None)
            for _ in range(10):
                await asyncio.sleep(0)


@asynccontextmanager
async def bench(
    folder: Path,
    *events: Event,
    settings: ApprovalsSettings = SETTINGS,
    clock: HandClock | None = None,
    sinks: Sequence[str] = (),
    names_us: bool = True,
    azure: Azure | None = None,
) -> AsyncIterator[Bench]:
    """A gate that runs on the store in a folder. Leaving the context is a kill: nobody is asked to finish anything."""
    clock = clock or HandClock()
    path = folder / "relay.db"
    azure = azure or Azure(clock, *events)
    async with open_store(
        StoreSettings(path=path), Identity(ORIGIN.scope, "vm"), clock, lambda _: sinks
    ) as store:
        azure.store = store
        await azure.read()
        gate = Gate(
            ApprovalService(settings, ORIGIN, client_resources=SPEAKS),
            store,
            azure,
            clock,
            lambda _: names_us,
        )
        task = asyncio.create_task(gate.run())
        try:
            yield Bench(path, clock, azure, store, gate)
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            await asyncio.wait({task})


# --- the road of a grant


async def test_what_was_granted_is_read_afresh_claimed_sent_and_told(tmp_path: Path) -> None:
    async with bench(tmp_path, USER) as it:
        (accepted,) = await it.until_told("startrequest.accepted")
        assert it.azure.sent == [("E-1",)]
        assert it.azure.reads == 1
        assert it.kinds() == [
            "event.scheduled",
            "approval.granted",
            "claim",
            "startrequest.accepted",
        ]
        assert accepted.data["status"] == 200


async def test_the_claim_is_on_disk_before_the_start_request_goes_out(tmp_path: Path) -> None:
    async with bench(tmp_path, USER) as it:
        it.azure.answering.clear()
        await eventually(lambda: bool(it.azure.sent))
        assert it.kinds()[-1] == "claim"


async def test_nothing_is_sent_without_a_rule(tmp_path: Path) -> None:
    async with bench(tmp_path, event(event_type="Freeze"), event("E-2")) as it:
        await it.submit(of=event("E-2"))
        await it.at_rest()
        it.clock.turn(60)
        await it.at_rest()
        assert (it.azure.sent, it.azure.reads) == ([], 0)


async def test_several_grants_share_a_fresh_read_and_a_start_request(tmp_path: Path) -> None:
    async with bench(tmp_path, USER, OTHER) as it:
        await it.until_told("startrequest.accepted", 2)
        assert it.azure.sent == [("E-1", "E-2")]
        assert it.azure.reads == 1


async def test_a_start_request_never_holds_more_than_a_hundred(tmp_path: Path) -> None:
    async with bench(
        tmp_path, *(event(f"E-{number}", event_source="User") for number in range(130))
    ) as it:
        await it.until_told("startrequest.accepted", 130)
        assert [len(sent) for sent in it.azure.sent] == [100, 30]
        assert it.azure.reads == 2


@pytest.mark.parametrize("ids", ["one id", "no id", "ids of their own"])
async def test_200_concurrent_copies_of_one_approval_are_one_start_request(
    tmp_path: Path, ids: str
) -> None:
    async with bench(tmp_path, ONE) as it:
        copies = [
            {"one id": "r", "no id": None, "ids of their own": f"r{number}"}[ids]
            for number in range(200)
        ]
        answers = await asyncio.gather(*(it.submit(of=ONE, request_id=copy) for copy in copies))
        assert {(answer.status, answer.body["state"]) for answer in answers} == {(202, "granted")}
        await it.until_told("startrequest.accepted")
        await it.at_rest()
        assert it.azure.sent == [("E-1",)]
        assert len(it.told("approval.granted")) == 1
        assert len(it.told("approval.recorded")) == (200 if ids == "ids of their own" else 1)


# --- tell_first


async def test_notices_have_tell_first_to_get_out(tmp_path: Path) -> None:
    async with bench(tmp_path, USER, sinks=("bus", "hook")) as it:
        await it.until_told("approval.granted")
        for _ in range(4):
            it.clock.turn(1.24)
            await it.at_rest()
        assert (it.azure.reads, it.azure.sent) == (0, [])
        it.clock.turn(0.05)
        await it.until_told("startrequest.accepted")


async def test_tell_first_is_over_when_every_sink_was_told(tmp_path: Path) -> None:
    async with bench(tmp_path, USER, sinks=("bus", "hook")) as it:
        await it.until_told("approval.granted")
        it.clock.turn(0.05)
        await it.at_rest()
        assert it.azure.sent == []
        await it.delivered()
        it.clock.turn(0.05)
        await it.until_told("startrequest.accepted")


@pytest.mark.parametrize("seconds", [60, -3600])
async def test_tell_first_is_measured_by_the_clock_that_nobody_sets(
    tmp_path: Path, seconds: float
) -> None:
    async with bench(tmp_path, USER, sinks=("bus",)) as it:
        await it.until_told("approval.granted")
        await it.at_rest()
        it.clock.set(NOON + timedelta(seconds=seconds))
        it.clock.turn(4.9)
        await it.at_rest()
        assert it.azure.sent == []
        it.clock.turn(0.1)
        await it.until_told("startrequest.accepted")


async def test_tell_first_has_run_while_approvals_were_off_or_held(tmp_path: Path) -> None:
    async with bench(tmp_path, USER, OTHER, sinks=("bus",)) as it:
        await it.until_told("approval.granted", 2)
        await it.submit("hold", "eve", OTHER)
        await it.gate.set_mode("off", "local:root")
        await it.at_rest()
        it.clock.turn(5)
        await it.gate.set_mode("on", "local:root")
        await it.until_told("startrequest.accepted")
        await it.submit("release", "eve", OTHER)
        await it.until_told("startrequest.accepted", 2)


async def test_an_event_of_other_machines_waits_for_nobody(tmp_path: Path) -> None:
    async with bench(tmp_path, USER, sinks=("bus",), names_us=False) as it:
        await it.until_told("startrequest.accepted")


async def test_one_that_waits_delays_no_other(tmp_path: Path) -> None:
    """Only what is about an event counts, and only that event is waited with."""
    async with bench(tmp_path, sinks=("bus",)) as it:
        await it.see(USER)
        await it.until_told("approval.granted")
        it.clock.turn(4.9)
        await it.see(USER, OTHER)
        await it.until_told("approval.granted", 2)
        it.clock.turn(0.1)
        await it.until_told("startrequest.accepted")
        assert it.azure.sent == [("E-1",)]


async def test_news_that_the_fresh_read_brought_come_first_too(tmp_path: Path) -> None:
    async with bench(tmp_path, USER, sinks=("bus",)) as it:
        await it.until_told("approval.granted")
        it.azure.events = (event(event_source="User", description="other words"),)
        await it.delivered()
        it.clock.turn(0.05)
        await it.until_told("event.updated")
        await it.at_rest()
        assert it.azure.sent == []
        await it.delivered()
        it.clock.turn(0.05)
        await it.until_told("startrequest.accepted")


async def test_a_hold_during_tell_first_stops_it_and_a_release_lets_it_go(tmp_path: Path) -> None:
    async with bench(tmp_path, USER, sinks=("bus",)) as it:
        await it.until_told("approval.granted")
        assert (await it.submit("hold", "eve", USER)).body["state"] == "held"
        it.clock.turn(6)
        await it.at_rest()
        assert (it.azure.reads, it.azure.sent) == (0, [])
        assert (await it.submit("release", "eve", USER)).body["state"] == "granted"
        await it.until_told("startrequest.accepted")
        assert len(it.told("approval.granted")) == 1


@pytest.mark.parametrize("mode", ["off", "dry-run"])
async def test_the_switch_turned_during_tell_first_stops_it(tmp_path: Path, mode: Any) -> None:
    async with bench(tmp_path, USER, sinks=("bus",)) as it:
        await it.until_told("approval.granted")
        assert await it.gate.set_mode(mode, "local:root") == await it.gate.mode() == mode
        it.clock.turn(6)
        await it.at_rest()
        assert (it.azure.reads, it.azure.sent) == (0, [])
        await it.gate.set_mode("on", "local:root")
        await it.until_told("startrequest.accepted")


# --- between the fresh read and the claim


@pytest.mark.parametrize(
    ("then", "failed"),
    [
        ((), "ended"),
        ((STARTED,), "started"),
        ((event(event_source="User", resources=("db-1", "db-2")),), "changed"),
        ((event(event_source="User", due=30),), "changed"),
    ],
)
async def test_what_the_fresh_read_shows_otherwise_is_not_sent(
    tmp_path: Path, then: tuple[Event, ...], failed: str
) -> None:
    async with bench(tmp_path, USER, sinks=("bus",)) as it:
        await it.until_told("approval.granted")
        await it.at_rest()
        it.azure.events = then
        it.azure.reading.clear()
        it.clock.turn(5)
        await eventually(lambda: it.azure.reads == 1)
        it.azure.reading.set()
        (told,) = await it.until_told("startrequest.failed")
        assert failed in told.data["reason"]
        assert it.azure.sent == []


async def test_a_hold_during_the_fresh_read_is_in_time(tmp_path: Path) -> None:
    async with bench(tmp_path, ONE) as it:
        it.azure.reading.clear()
        await it.submit(of=ONE)
        await eventually(lambda: it.azure.reads == 1)
        assert (await it.submit("hold", "eve", ONE)).status == 202
        it.azure.reading.set()
        await it.at_rest()
        assert it.azure.sent == []


async def test_the_switch_turned_during_the_fresh_read_is_in_time(tmp_path: Path) -> None:
    async with bench(tmp_path, ONE) as it:
        it.azure.reading.clear()
        await it.submit(of=ONE)
        await eventually(lambda: it.azure.reads == 1)
        await it.gate.set_mode("off", "local:root")
        it.azure.reading.set()
        await it.at_rest()
        assert it.azure.sent == []


async def test_not_before_passes_during_the_fresh_read(tmp_path: Path) -> None:
    async with bench(tmp_path, ONE) as it:
        it.azure.reading.clear()
        await it.submit(of=ONE)
        await eventually(lambda: it.azure.reads == 1)
        it.clock.turn(900)
        it.azure.reading.set()
        (told,) = await it.until_told("startrequest.failed")
        assert (told.data["attempts"], it.azure.sent) == (0, [])


async def test_not_before_passes_while_the_claim_waits_for_the_disk(tmp_path: Path) -> None:
    """The moment of the claim counts, not that at which it was asked for."""
    async with bench(tmp_path, ONE) as it:
        disk = threading.Event()
        it.azure.after_read = lambda: it.store.submit(lambda _: disk.wait(10))
        await it.submit(of=ONE)
        await eventually(lambda: it.gate.service.in_flight != frozenset())
        it.clock.turn(900)
        disk.set()
        await it.until_told("startrequest.failed")
        assert it.azure.sent == []


async def test_what_cannot_be_read_afresh_is_not_sent(tmp_path: Path) -> None:
    azure = Azure(HandClock(), ONE)
    async with bench(tmp_path, azure=azure) as it:
        azure.unreadable.extend([UNAVAILABLE, REFUSED])
        await it.submit(of=ONE)
        await eventually(lambda: azure.reads == 1)
        for reads in (2, 3):
            assert azure.sent == []
            await eventually(lambda: bool(it.clock.asleep))
            it.clock.turn(1)
            await eventually(lambda reads=reads: azure.reads == reads)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        await it.until_told("startrequest.accepted")


# --- in flight


async def test_a_hold_after_the_claim_is_too_late(tmp_path: Path) -> None:
    async with bench(tmp_path, USER) as it:
        it.azure.answering.clear()
        await eventually(lambda: bool(it.azure.sent))
        assert (await it.submit("hold", "eve", USER)).status == 409
        it.azure.answering.set()
        await it.until_told("startrequest.accepted")
        assert (await it.submit("hold", "eve", USER)).status == 409


async def test_an_event_that_is_seen_started_before_the_answer_came_has_not_failed(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, USER) as it:
        it.azure.answering.clear()
        await eventually(lambda: bool(it.azure.sent))
        await it.see(STARTED)
        await it.at_rest()
        it.azure.answering.set()
        await it.until_told("startrequest.accepted")
        assert not it.told("startrequest.failed")


async def test_quiet_waits_for_the_answer_but_not_for_ever(tmp_path: Path) -> None:
    async with bench(tmp_path, USER) as it:
        it.azure.answering.clear()
        await eventually(lambda: bool(it.azure.sent))
        first, second = (
            asyncio.create_task(it.gate.wait_until_idle(2)),
            asyncio.create_task(it.gate.wait_until_idle(1000)),
        )
        await eventually(lambda: sum(left <= 0.05 for left in it.clock.asleep) == 2)
        it.clock.turn(2)
        await first
        assert not second.done()
        it.azure.answering.set()
        await it.until_told("startrequest.accepted")
        await it.at_rest()
        it.clock.turn(0.05)
        await second


# --- answers that are no yes


async def test_a_shared_400_is_split_and_each_is_sent_alone(tmp_path: Path) -> None:
    azure = Azure(HandClock(), USER, OTHER)
    azure.answers.extend([REFUSED, REFUSED, None])
    async with bench(tmp_path, azure=azure) as it:
        await it.until_told("startrequest.accepted")
        (failed,), (accepted,) = it.told("startrequest.failed"), it.told("startrequest.accepted")
        assert azure.sent == [("E-1", "E-2"), ("E-1",), ("E-2",)]
        assert azure.reads == 3
        assert (failed.subject, failed.data["status"], failed.data["attempts"]) == ("E-1", 400, 2)
        assert (accepted.subject, accepted.data["status"], accepted.data["attempts"]) == (
            "E-2",
            200,
            2,
        )
        it.clock.turn(30)
        await it.at_rest()
        assert len(azure.sent) == 3


async def test_a_400_is_final(tmp_path: Path) -> None:
    azure = Azure(HandClock(), USER)
    azure.answers.append(REFUSED)
    async with bench(tmp_path, azure=azure) as it:
        (failed,) = await it.until_told("startrequest.failed")
        assert (failed.data["status"], failed.data["attempts"]) == (400, 1)
        assert "400" in failed.data["reason"]
        it.clock.turn(60)
        await it.at_rest()
        assert azure.sent == [("E-1",)]


async def test_no_answer_is_tried_again_after_a_fresh_read_each_time_a_little_later(
    tmp_path: Path,
) -> None:
    azure = Azure(HandClock(), USER)
    pauses = (1, 2, 4, 8, 8)
    azure.answers.extend([UNAVAILABLE, TIMEOUT, *[UNAVAILABLE] * 3])
    async with bench(tmp_path, azure=azure) as it:
        for sent, pause in enumerate(pauses, 1):
            await eventually(lambda sent=sent: len(azure.sent) == sent)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            await it.at_rest()
            it.clock.turn(pause - 0.1)
            await it.at_rest()
            assert (len(azure.sent), azure.reads) == (sent, sent)
            it.clock.turn(0.2)
        (accepted,) = await it.until_told("startrequest.accepted")
        assert accepted.data["attempts"] == len(pauses) + 1
        assert it.kinds().count("claim") == len(pauses) + 1


async def test_after_a_success_the_first_rest_is_short_again(tmp_path: Path) -> None:
    azure = Azure(HandClock(), USER)
    azure.answers.extend([UNAVAILABLE, UNAVAILABLE, None, UNAVAILABLE])
    async with bench(tmp_path, azure=azure) as it:
        await it.clock.turn_until(lambda: len(azure.sent) == 3)
        await it.until_told("startrequest.accepted")
        await it.see(USER, OTHER)
        await eventually(lambda: len(azure.sent) == 4)
        await it.at_rest()
        it.clock.turn(1)
        await it.until_told("startrequest.accepted", 2)


async def test_a_rest_that_the_service_asks_for_is_given(tmp_path: Path) -> None:
    azure = Azure(HandClock(), USER)
    azure.answers.append(SourceUnavailable("expected 200, got 429", status=429, retry_after=20))
    async with bench(tmp_path, azure=azure) as it:
        await eventually(lambda: len(azure.sent) == 1)
        await it.at_rest()
        it.clock.turn(19.9)
        await it.at_rest()
        assert len(azure.sent) == 1
        it.clock.turn(0.1)
        await it.until_told("startrequest.accepted")


async def test_what_becomes_of_the_event_during_a_rest_is_told_at_once(tmp_path: Path) -> None:
    azure = Azure(HandClock(), USER)
    azure.answers.append(SourceUnavailable("expected 200, got 429", status=429, retry_after=60))
    async with bench(tmp_path, azure=azure) as it:
        await eventually(lambda: len(azure.sent) == 1)
        await it.at_rest()
        await it.see(STARTED)
        (failed,) = await it.until_told("startrequest.failed")
        assert (failed.data["status"], failed.data["attempts"]) == (429, 1)
        assert "not known" in failed.data["reason"]
        it.clock.turn(60)
        await it.at_rest()
        assert azure.sent == [("E-1",)]


async def test_a_timeout_that_azure_took_all_the_same_is_not_sent_again(tmp_path: Path) -> None:
    azure = Azure(HandClock(), USER)
    azure.answers.append(TIMEOUT)
    async with bench(tmp_path, azure=azure) as it:
        await eventually(lambda: len(azure.sent) == 1)
        await it.at_rest()
        azure.events = (STARTED,)
        it.clock.turn(1)
        (failed,) = await it.until_told("startrequest.failed")
        assert (failed.data["status"], failed.data["attempts"]) == (None, 1)
        assert (azure.reads, azure.sent) == (2, [("E-1",)])


# --- time


async def test_a_hold_that_expires_lets_a_grant_go_by_itself(tmp_path: Path) -> None:
    async with bench(
        tmp_path, ONE, settings=SETTINGS.model_copy(update={"hold_expires": 50.0})
    ) as it:
        await it.submit("hold", "eve", ONE)
        await it.submit(of=ONE)
        await it.at_rest()
        it.clock.turn(49.9)
        await it.at_rest()
        assert it.azure.sent == []
        it.clock.turn(0.1)
        await it.until_told("startrequest.accepted")
        assert [one.data["decision"] for one in it.told("approval.recorded")] == [
            "hold",
            "approve",
            "release",
        ]


async def test_a_wall_clock_that_was_set_is_noticed_within_a_minute(tmp_path: Path) -> None:
    async with bench(tmp_path, event()) as it:
        await it.submit()
        await it.at_rest()
        it.clock.set(NOON + timedelta(minutes=6))
        it.clock.turn(60)
        (voided,) = await it.until_told("approval.voided")
        assert voided.data["why"] == "expired"


# --- kills


async def test_a_kill_before_the_claim_forgets_no_grant(tmp_path: Path) -> None:
    async with bench(tmp_path, ONE, sinks=("bus",)) as it:
        await it.submit(of=ONE)
    async with bench(tmp_path, ONE) as it:
        await it.delivered()
        it.clock.turn(1)
        await it.until_told("startrequest.accepted")
        assert it.azure.sent == [("E-1",)]


async def _killed_in_flight(folder: Path) -> None:
    async with bench(folder, ONE) as it:
        await it.submit(of=ONE)
        it.azure.answering.clear()
        await eventually(lambda: bool(it.azure.sent))
        assert it.kinds()[-1] == "claim"


async def test_a_kill_between_claim_and_answer_is_repeated_while_nothing_has_changed(
    tmp_path: Path,
) -> None:
    await _killed_in_flight(tmp_path)
    async with bench(tmp_path, ONE) as it:
        (accepted,) = await it.until_told("startrequest.accepted")
        assert (it.azure.sent, accepted.data["attempts"]) == ([("E-1",)], 2)
        assert len(it.told("approval.granted")) == 1


@pytest.mark.parametrize(
    "then",
    [
        (),
        (event(event_type="Redeploy", event_status="Started", not_before=None),),
        (event(event_type="Redeploy", due=1000),),
        (event(event_type="Redeploy", resources=("db-1", "db-2")),),
        (event(event_type="Redeploy", event_status="Paused"),),
    ],
)
async def test_a_kill_between_claim_and_answer_is_never_repeated_otherwise(
    tmp_path: Path, then: tuple[Event, ...]
) -> None:
    await _killed_in_flight(tmp_path)
    azure = Azure(HandClock(), ONE)
    async with bench(tmp_path, azure=azure) as it:
        azure.events = then
        (failed,) = await it.until_told("startrequest.failed")
        assert (failed.data["status"], failed.data["attempts"]) == (None, 1)
        await it.at_rest()
        assert azure.sent == []


@pytest.mark.parametrize("seconds", [900, 100000])
async def test_a_kill_between_claim_and_answer_is_not_repeated_after_not_before(
    tmp_path: Path, seconds: float
) -> None:
    await _killed_in_flight(tmp_path)
    clock = HandClock(NOON + timedelta(seconds=seconds))
    async with bench(tmp_path, azure=Azure(clock, ONE), clock=clock) as it:
        await it.until_told("startrequest.failed")
        await it.at_rest()
        assert it.azure.sent == []


# --- a disk that cannot be written


def _writable(store: Store, yes: bool) -> None:
    connection = store._opened.connection  # noqa: SLF001  # as a disk that is mounted read-only after an error
    connection.execute(f"PRAGMA query_only = {'OFF' if yes else 'ON'}")


async def test_a_decision_that_cannot_be_written_is_503_and_none(tmp_path: Path) -> None:
    async with bench(tmp_path, ONE) as it:
        _writable(it.store, False)
        assert (await it.submit(of=ONE, request_id="r")).status == 503
        with pytest.raises(StoreUnavailable):
            await it.gate.set_mode("off", "local:root")
        _writable(it.store, True)
        await eventually(lambda: it.store.failing is None)
        assert await it.gate.mode() == "on"
        assert not it.told("approval.recorded")
        assert (await it.submit(of=ONE, request_id="r")).status == 202


async def test_nothing_is_sent_that_cannot_be_claimed_on_disk(tmp_path: Path) -> None:
    async with bench(tmp_path, ONE) as it:
        it.azure.reading.clear()
        await it.submit(of=ONE)
        await eventually(lambda: it.azure.reads == 1)
        _writable(it.store, False)
        it.azure.reading.set()
        for reads in (2, 3):
            await it.clock.turn_until(lambda reads=reads: it.azure.reads >= reads)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        assert it.azure.sent == []
        _writable(it.store, True)
        await it.clock.turn_until(lambda: bool(it.azure.sent))
        await it.until_told("startrequest.accepted")


async def test_an_answer_that_cannot_be_written_is_told_from_memory_and_sent_no_more(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, USER) as it:
        heard: list[str] = []
        it.store.listeners.recorded.append(
            lambda recorded: heard.extend(one.event.name for one in recorded)
        )
        it.azure.answering.clear()
        await eventually(lambda: bool(it.azure.sent))
        _writable(it.store, False)
        it.azure.answering.set()
        await eventually(lambda: "startrequest.accepted" in heard)
        _writable(it.store, True)
        await eventually(lambda: it.store.failing is None)
        it.clock.turn(10)
        await it.at_rest()
        assert len(it.told("startrequest.accepted")) == 1
        assert it.azure.sent == [("E-1",)]
        assert heard.count("startrequest.accepted") == 1
