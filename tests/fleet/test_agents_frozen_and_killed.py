"""Agents are frozen and killed while they have orders: no two StartRequests are ever in flight.

It takes minutes, so only `make chaos-tests` runs it. `test_agent_frozen` tries each step of one
order.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from relay.fleet.messages import ORDER_LIFETIME
from relay.simulator import Plan, Setup, Simulator
from relay.simulator.setup import Fault
from tests.depth import CHAOS
from tests.eventually import eventually
from tests.fleet.running_fleet import AUTOMATIC, RunningFleet, running_fleet
from tests.journey.relay_process import RelayProcess, relay
from tests.rabbitmq import Broker

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
