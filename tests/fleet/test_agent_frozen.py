"""Agents that stand still in the middle of an order, and go on too late, or are killed.

SIGSTOP does to a process what a freeze of the VM does. No StartRequest may arrive after the
deadline, at whatever step it stood still, and no two are ever in flight.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import orjson
import pytest

from relay.fleet.messages import ORDER_LIFETIME, ChangeData, StartOrder
from relay.imds.calls import CALL_WINDOW
from relay.simulator import Plan, Setup, Simulator
from relay.simulator.setup import Fault
from tests.depth import CHAOS
from tests.eventually import eventually
from tests.fleet.hub_side import (
    HubSide,
    agent_document,
    carry_out,
    hub_side,
    make_order,
    wait_until_old_enough,
)
from tests.fleet.running_fleet import AUTOMATIC, RunningFleet, running_fleet
from tests.imds.scripted_server import EVENT, Answer, run_server
from tests.journey.relay_process import RelayProcess, relay
from tests.rabbitmq import Broker
from tests.sinks.http_receiver import Received

DOCUMENT = orjson.dumps({"DocumentIncarnation": 1, "Events": [EVENT]})
INSTANCE = orjson.dumps({"compute": {"vmId": "vm-id", "name": "vm-0"}})


def no_such_event() -> StartOrder:
    """Return an order for which an agent reads the document, and sends nothing."""
    return make_order("no-such-event", "none")


@dataclass
class Imds:
    on_read: Callable[[], float] | None = None
    """Called with each read of the document; it returns the seconds until the answer."""
    on_start: Callable[[], float] | None = None
    """The same for each StartRequest."""
    starts: list[datetime] = field(default_factory=list)
    reads: int = 0

    def answer(self, request: Received) -> Answer:
        now = datetime.now(UTC)
        headers = {"Date": format_datetime(now, usegmt=True)}
        if request.target.startswith("/metadata/instance"):
            return Answer(INSTANCE, headers=headers)
        if request.method == "POST":
            self.starts.append(now)
            return Answer(b"", headers=headers, pause=self.on_start() if self.on_start else 0)
        self.reads += 1
        return Answer(DOCUMENT, headers=headers, pause=self.on_read() if self.on_read else 0)


@dataclass
class Rig:
    """An agent in a process of its own, which knows the event."""

    hub: HubSide
    imds: Imds
    process: RelayProcess
    revision: str
    reads_before: int
    """The reads of the document before the test."""

    def order(self, seconds: float = 5.0) -> StartOrder:
        return make_order(str(EVENT["EventId"]), self.revision, seconds=seconds)

    def stop(self) -> float:
        self._signal(signal.SIGSTOP)
        return 0.0

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    async def go_on_after(self, order: StartOrder) -> None:
        """Let the process go on when the deadline has passed."""
        seconds = (order.deadline - datetime.now(UTC)).total_seconds()
        await asyncio.sleep(max(0.0, seconds) + 0.1)
        self.go_on()

    async def wait_until_done(self) -> None:
        """Wait until nothing of the orders so far is left: a later one has its result."""
        await carry_out(self.hub, no_such_event())

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.process is not None
        self.process.process.send_signal(number)


@pytest.fixture
async def running(own_broker: Broker, tmp_path: Path) -> AsyncIterator[Rig]:
    imds = Imds()
    async with hub_side(own_broker) as hub, run_server(imds.answer) as server:
        document: dict[str, Any] = agent_document(
            own_broker,
            hub.exchange,
            # It reads the document once. All other reads are for orders.
            source={"url": server.url, "interval": "1h"},
            api={},
        )
        async with relay(tmp_path, document) as process:
            await process.start()
            (reported,) = await hub.wait_for(ChangeData)
            await hub.wait_for_listener()
            await wait_until_old_enough(hub)
            rig = Rig(hub, imds, process, reported.revision, imds.reads)
            try:
                yield rig
            finally:
                rig.go_on()


def results_of(rig: Rig, order: StartOrder) -> list[str]:
    return [result.result for result in rig.hub.results if result.grant == order.grant]


async def test_an_agent_that_stands_still_before_an_order_sends_nothing(running: Rig) -> None:
    """The order waits in the socket or in the queue."""
    running.stop()
    order = running.order()
    await running.hub.send(order)
    await running.go_on_after(order)
    await eventually(lambda: results_of(running, order) == ["stale"])
    assert running.imds.starts == []


async def test_an_agent_that_stands_still_while_it_reads_sends_nothing(running: Rig) -> None:
    """The answer with a good time waits in its socket."""
    order = running.order()
    running.imds.on_read = running.stop
    await running.hub.send(order)
    await eventually(lambda: running.imds.reads > running.reads_before)
    await running.go_on_after(order)
    await eventually(lambda: results_of(running, order) == ["stale"])
    running.imds.on_read = None
    await running.wait_until_done()
    assert running.imds.starts == []


@pytest.mark.parametrize("after", [0.0, 0.05, 0.3] if CHAOS else [0.05])
async def test_who_stands_still_after_a_read_sends_nothing_late(running: Rig, after: float) -> None:
    """After two reads the StartRequest waits about a second for its place in the budget."""
    await asyncio.sleep(CALL_WINDOW)  # the reads before count no longer
    stopped = asyncio.Event()

    def stop() -> None:
        running.stop()
        stopped.set()

    def stop_after_second_read() -> float:
        if running.imds.reads == running.reads_before + 2:
            asyncio.get_running_loop().call_later(after, stop)
        return 0.0

    running.imds.on_read = stop_after_second_read
    await running.hub.send(no_such_event())
    order = running.order()
    await running.hub.send(order)
    await stopped.wait()
    assert running.imds.starts == []
    await running.go_on_after(order)
    await eventually(lambda: results_of(running, order) == ["stale"])
    await running.wait_until_done()
    assert running.imds.starts == []


async def test_who_stands_still_while_imds_answers_does_not_repeat_it(running: Rig) -> None:
    order = running.order()
    running.imds.on_start = running.stop
    await running.hub.send(order)
    await eventually(lambda: bool(running.imds.starts))
    await running.go_on_after(order)
    await eventually(lambda: len(results_of(running, order)) == 1)
    assert results_of(running, order) in (["accepted"], ["failed"])
    await running.hub.send(order)
    await running.wait_until_done()
    assert len(results_of(running, order)) == len(running.imds.starts) == 1
    assert running.imds.starts[0] < order.deadline


async def test_after_its_restart_a_killed_agent_carries_out_no_order_again(running: Rig) -> None:
    order = running.order()
    running.imds.on_start = lambda: 600.0
    await running.hub.send(order)
    await eventually(lambda: bool(running.imds.starts))
    await running.process.kill()
    pulses = len(running.hub.pulses)
    await running.process.start()
    await running.hub.wait_for_listener(pulses + 1)
    await running.hub.send(order)
    await eventually(lambda: results_of(running, order) == ["stale"])
    assert len(running.imds.starts) == 1


# --- frozen and killed at random, for minutes


ROUNDS = 20
SCOPE = "vmss-a-1f0c33ab"
VMS = ("vm-0", "vm-1", "vm-2")
TOLERANCE = 0.1
"""Seconds between a log line and the step that it is about, on a machine that stalls."""


@dataclass(frozen=True, slots=True)
class Ordered:
    at: float
    event_id: str
    name: str
    """The grant, the attempt and the agent."""


def orders_in(log: pytest.LogCaptureFixture) -> list[Ordered]:
    return [
        Ordered(record.created, str(record.args[0]), str(record.args[2]))
        for record in log.records
        if record.name == "relay.fleet.hub.start_orders"
        and record.msg.startswith("fleet: order to start")
        and isinstance(record.args, tuple)
    ]


def judge(azure: Simulator, orders: list[Ordered]) -> None:
    """Assert that each StartRequest belongs to one order, in its time, and to the last one sent."""
    used: Counter[str] = Counter()
    for call in azure.start_requests:
        (event_id,) = call.event_ids
        at = call.at.timestamp()
        before = [each for each in orders if each.event_id == event_id and each.at <= at + 0.01]
        assert before, f"nobody ordered {event_id}"
        last = before[-1]
        assert f"relay {call.vm} of" in last.name, "an earlier order was carried out after another"
        assert at <= last.at + ORDER_LIFETIME + TOLERANCE, "it came after the deadline"
        used[last.name] += 1
    assert max(used.values(), default=0) <= 1, "an order was carried out twice"


@pytest.mark.skipif(not CHAOS, reason="takes minutes: make chaos-tests")
@pytest.mark.timeout(900)
async def test_frozen_and_killed_agents_never_leave_two_start_requests_in_flight(
    own_broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "relay.fleet.hub.start_orders")
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(
            running_fleet(
                own_broker,
                tmp_path,
                {SCOPE: VMS},
                hub=AUTOMATIC,
                without_agents=VMS,
                setup=Setup(rate_limit=None),
            )
        )
        azure = fleet.azure
        agents = [await start_process(stack, fleet, vm) for vm in VMS]
        await eventually(lambda: {agent.relay for agent in fleet.roster} == set(VMS))
        chance = random.Random(11)  # noqa: S311  # moments and victims
        event_ids = []
        for number in range(ROUNDS):
            event_ids.append(azure.schedule(Plan(id=f"E-{number}", starts_after=0.2)).event_id)
            # The answer takes its time, so that an agent is hit while it waits for it, too.
            azure.add_fault(Fault(kind="delay", on="approval", time=chance.uniform(0, 3)))
            await disturb(chance.choice(agents), chance)
        await eventually(
            lambda: all("event.started" in fleet.told(each) for each in event_ids), within=400
        )
        judge(azure, orders_in(caplog))


async def start_process(stack: AsyncExitStack, fleet: RunningFleet, vm: str) -> RelayProcess:
    document = fleet.agent_document(SCOPE, vm)
    del document["store"], document["api"]
    process = await stack.enter_async_context(relay(fleet.directory / vm, document))
    await process.start()
    return process


async def disturb(victim: RelayProcess, chance: random.Random) -> None:
    assert victim.process is not None
    await asyncio.sleep(chance.uniform(0.3, 2.5))
    if chance.random() < 0.5:
        await victim.kill()
        await victim.start(ready=False)
        return
    victim.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(chance.uniform(1, 9))
    victim.process.send_signal(signal.SIGCONT)
