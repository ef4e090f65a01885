"""Start orders against a real IMDS over loopback: no StartRequest too late, and none twice.

The server's clock is the real one. That of the VM is moved by the tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import orjson
import pytest

from relay.events.model import Document, ScheduledEvent
from relay.fleet.agent import start_orders
from relay.fleet.agent.start_orders import StartOrders
from relay.fleet.messages import ORDER_LIFETIME, StartOrder, StartResult
from relay.imds import SourceSettings
from relay.imds.client import ImdsClient
from relay.imds.document import parse_document
from relay.imds.poller import Poller
from relay.ingest import DatedRead
from tests.background_tasks import BackgroundTasks
from tests.clocks import ShiftedClock
from tests.eventually import eventually
from tests.fleet.hub_side import make_order
from tests.imds.running_poller import running_poller
from tests.imds.scripted_server import EVENT, Answer, ScriptedServer, run_server
from tests.sinks.http_receiver import Received

EVENT_ID = str(EVENT["EventId"])
VM_ID = "5d7b8a9e-0000-4000-8000-00000000c0de"


@dataclass
class Imds:
    """The script of an IMDS: one event, and what the next calls meet."""

    fields: Mapping[str, Any] = field(default_factory=lambda: EVENT)
    gone: bool = False
    ahead: timedelta = timedelta()
    """How much the clock of IMDS is ahead of the real one, and so of the hub's."""
    tells_time: bool = True
    start_answer: Answer = field(default_factory=lambda: Answer(b""))
    before_document: Callable[[], None] | None = None
    """Called once, after the answer to the next read got its date and before it is sent."""
    document_status: int = 200
    document_pause: float = 0.0
    """Seconds before each answer to a read."""
    posts: list[tuple[datetime, tuple[str, ...]]] = field(default_factory=list)
    """When each StartRequest arrived, and for which EventIds."""

    @property
    def event(self) -> ScheduledEvent:
        return parse_document(self._body()).events[0]

    def _body(self) -> bytes:
        events = [] if self.gone else [self.fields]
        return orjson.dumps({"DocumentIncarnation": 1, "Events": events})

    def answer(self, request: Received) -> Answer:
        if request.method == "POST":
            requests = orjson.loads(request.body)["StartRequests"]
            ids = tuple(each["EventId"] for each in requests)
            self.posts.append((datetime.now(UTC), ids))
            return self.start_answer
        date = datetime.now(UTC) + self.ahead
        headers = {"Date": format_datetime(date, usegmt=True)} if self.tells_time else {}
        if self.before_document is not None:
            change, self.before_document = self.before_document, None
            change()
        status, pause = self.document_status, self.document_pause
        return Answer(self._body(), status, headers=headers, pause=pause)


@dataclass
class Rig:
    """Orders under way, and their results."""

    imds: Imds
    server: ScriptedServer
    clock: ShiftedClock
    orders: StartOrders
    results: list[StartResult]

    def order(self, *, seconds: float = 5.0, **changes: Any) -> StartOrder:
        return make_order(EVENT_ID, self.imds.event.revision, seconds=seconds, **changes)

    async def carry_out(self, order: StartOrder | None = None, **changes: Any) -> StartResult:
        order = order or self.order(**changes)
        count = len(self.results)
        self.orders.take(order)
        await eventually(lambda: len(self.results) > count)
        return self.results[count]

    async def carry_out_while_polling(self, *, during_read: Callable[[], None]) -> StartResult:
        """Give an order while a poll is in flight, so the next read is that of the order."""
        order = self.order()

        def give_order() -> None:
            self.orders.take(order)
            self.imds.before_document = during_read

        self.imds.before_document = give_order
        await eventually(lambda: bool(self.results))
        return self.results[0]


@asynccontextmanager
async def rig(folder: Path, *, is_old: bool = True) -> AsyncIterator[Rig]:
    """Run a poller and orders. ``is_old``: the agent has run for a while."""
    imds, clock = Imds(), ShiftedClock()
    results: list[StartResult] = []

    async def publish(result: StartResult) -> None:
        results.append(result)

    async with run_server(imds.answer) as server:
        source = SourceSettings(url=server.url, interval=0.5)
        async with running_poller(folder, source, clock) as (_, client, poller):
            orders = StartOrders(poller, client, publish, VM_ID, clock)
            if is_old:
                clock.monotonic_ahead += 60
            async with BackgroundTasks(orders.run()):
                await eventually(lambda: poller.last_document is not None)
                yield Rig(imds, server, clock, orders, results)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path) as running:
        yield running


async def test_an_order_for_the_event_as_it_is_is_carried_out(running: Rig) -> None:
    order = running.order().model_copy(update={"event_id": EVENT_ID.lower()})
    result = await running.carry_out(order)
    assert (result.result, result.status, result.reason) == ("accepted", 200, None)
    assert (result.grant, result.attempt) == (order.grant, order.attempt)
    ((at, ids),) = running.imds.posts
    assert ids == (EVENT_ID,), "in the case that Azure wrote"
    assert at < order.deadline


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"EventStatus": "Started"}, "Started"),
        ({"EventStatus": None}, "not Scheduled"),
        ({"Resources": ["vm-0", "vm-1"]}, "revision"),
        ({"NotBefore": "Mon, 19 Sep 2050 18:29:48 GMT"}, "revision"),
        ({"EventType": "Redeploy"}, "revision"),
        ({"EventId": "another"}, "not in the document"),
    ],
)
async def test_nothing_is_sent_for_an_event_that_is_not_the_ordered_one_any_more(
    running: Rig, change: dict[str, Any], reason: str
) -> None:
    order = running.order()
    running.imds.fields = {**running.imds.fields, **change}
    result = await running.carry_out(order)
    assert result.result == "changed"
    assert reason in (result.reason or "")
    assert running.imds.posts == []


# --- time


@pytest.mark.parametrize("minutes", [-30, 30])
async def test_the_clock_of_the_vm_does_not_matter(running: Rig, minutes: int) -> None:
    running.clock.wall_ahead = minutes * 60.0
    assert (await running.carry_out()).result == "accepted"
    assert (await running.carry_out(seconds=-1)).result == "stale"
    assert len(running.imds.posts) == 1


@pytest.mark.parametrize("minutes", [-10, 10])
async def test_a_hub_with_a_wrong_clock_starts_nothing(running: Rig, minutes: int) -> None:
    """A hub that is ahead would set deadlines that are minutes away, and order again before."""
    running.imds.ahead = timedelta(minutes=minutes)
    assert (await running.carry_out()).result == "stale"
    assert running.imds.posts == []


@pytest.mark.parametrize(
    ("status", "tells_time", "reason"),
    [
        (503, True, "the document could not be read, nothing was sent"),
        (200, False, "IMDS gave no Date with the document, nothing was sent"),
    ],
)
async def test_without_a_document_and_the_time_of_imds_nothing_is_sent(
    running: Rig, status: int, tells_time: bool, reason: str
) -> None:
    running.imds.document_status, running.imds.tells_time = status, tells_time
    result = await running.carry_out()
    assert (result.result, result.status, running.imds.posts) == ("failed", None, [])
    assert reason in (result.reason or "")


@pytest.mark.parametrize(("seconds", "outcome"), [(0.9, "stale"), (3.0, "accepted")])
async def test_the_fraction_of_a_second_that_the_time_of_imds_leaves_out_may_have_passed(
    running: Rig, monkeypatch: pytest.MonkeyPatch, seconds: float, outcome: str
) -> None:
    read = Poller.read_with_imds_time

    order = running.order()

    async def read_at(poller: Poller) -> DatedRead[Document]:
        running.clock.monotonic_ahead += 1.1  # the next two calls need not wait
        left = timedelta(seconds=seconds)
        return replace(await read(poller), imds_time=order.deadline - left)

    monkeypatch.setattr(Poller, "read_with_imds_time", read_at)
    assert (await running.carry_out(order)).result == outcome


@pytest.mark.parametrize(("wall", "monotonic"), [(6, 0), (0, 6), (-3600, 6)])
async def test_a_freeze_between_the_read_and_the_start_request_sends_nothing(
    running: Rig, wall: float, monotonic: float
) -> None:
    """One of the two clocks shows it, whichever goes on, also if the wall clock is set back."""

    def freeze() -> None:
        running.clock.wall_ahead += wall
        running.clock.monotonic_ahead += monotonic

    result = await running.carry_out_while_polling(during_read=freeze)
    assert result.result == "stale"
    assert running.imds.posts == []


async def test_a_start_request_that_waits_for_its_turn_until_the_deadline_is_not_sent(
    running: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = ImdsClient.send_start_request

    async def send_later(client: ImdsClient, *ids: str, **options: Any) -> None:
        running.clock.monotonic_ahead += 6
        await send(client, *ids, **options)

    monkeypatch.setattr(ImdsClient, "send_start_request", send_later)
    assert (await running.carry_out()).result == "stale"
    assert running.imds.posts == []


async def test_a_read_that_hangs_ends_in_time_and_sends_nothing_later(
    running: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_orders, "ORDER_LIFETIME", 1.0)
    order = running.order(seconds=1.0)
    running.imds.document_pause = 2.5
    began = running.clock.monotonic()
    result = await running.carry_out(order)
    assert result.result == "stale"
    assert 0.9 <= running.clock.monotonic() - began < 30
    reads = len(running.server.requests)
    running.imds.document_pause = 0.0
    await eventually(lambda: len(running.server.requests) > reads + 1)
    assert running.imds.posts == []


# --- once


async def test_an_order_that_comes_twice_under_way_sends_one_start_request(running: Rig) -> None:
    running.imds.start_answer = Answer(b"", pause=0.5)
    order = running.order()
    for _ in range(5):
        running.orders.take(order)
    await eventually(lambda: bool(running.imds.posts))
    running.orders.take(order)
    await eventually(lambda: bool(running.results))
    running.orders.take(order)
    await running.carry_out(running.order().model_copy(update={"event_id": "another"}))
    assert [each.result for each in running.results] == ["accepted", "changed"]
    assert len(running.imds.posts) == 1


async def test_an_order_for_another_vm_is_neither_carried_out_nor_answered(running: Rig) -> None:
    """Two names of relays can be the same word of a routing key. The other VM answers."""
    running.orders.take(running.order(vm_id="another"))
    order = running.order(vm_id=VM_ID)
    result = await running.carry_out(order)
    assert (result.grant, result.result) == (order.grant, "accepted")
    assert len(running.imds.posts) == 1


async def test_an_agent_that_has_just_started_carries_out_nothing(tmp_path: Path) -> None:
    """The process before it may have carried out the same order, and knew that alone."""
    async with rig(tmp_path, is_old=False) as running:
        result = await running.carry_out()
        assert (result.result, running.imds.posts) == ("stale", [])
        assert "started" in (result.reason or "")
        running.clock.monotonic_ahead += ORDER_LIFETIME
        assert (await running.carry_out()).result == "accepted"


async def test_orders_that_are_not_begun_when_the_agent_stops_send_nothing(running: Rig) -> None:
    running.imds.start_answer = Answer(b"", pause=0.5)
    first, second = running.order(), running.order()
    running.orders.take(first)
    await eventually(lambda: bool(running.imds.posts))
    running.orders.take(second)
    await running.orders.stop(60.0)
    results = [(each.grant, each.result) for each in running.results]
    assert results == [(first.grant, "accepted"), (second.grant, "stale")]
    assert len(running.imds.posts) == 1


# --- results


@pytest.mark.parametrize(("status", "result"), [(400, "refused"), (500, "failed"), (429, "failed")])
async def test_the_result_says_what_imds_answered(running: Rig, status: int, result: str) -> None:
    running.imds.start_answer = Answer(b"", status)
    answered = await running.carry_out()
    assert (answered.result, answered.status) == (result, status)
    assert len(running.imds.posts) == 1
