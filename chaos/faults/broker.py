"""RabbitMQ is killed, frozen, blocked by an alarm, or gone."""

from __future__ import annotations

import asyncio

from chaos.faults import Fault, under_load
from chaos.trial import Trial

FROZEN = 5.0
"""Seconds without an answer: more than a delivery may take."""
BLOCKED = 3.0
GONE = 20.0
"""Seconds that stand for an hour: many times the longest pause between two tries of the sink."""


async def _kill(running: Trial) -> None:
    await running.load.wait_until_busy(1)
    await asyncio.to_thread(running.broker.kill)
    await asyncio.to_thread(running.broker.start)
    await running.load.wait_until_busy(1)


async def _freeze(running: Trial) -> None:
    await asyncio.to_thread(running.broker.freeze)
    await asyncio.sleep(FROZEN)
    await asyncio.to_thread(running.broker.thaw)
    await running.load.wait_until_busy(1)


async def _block(running: Trial) -> None:
    await asyncio.to_thread(running.broker.alarm, on=True)
    await asyncio.sleep(BLOCKED)
    await asyncio.to_thread(running.broker.alarm, on=False)
    await running.load.wait_until_busy(1)


async def _take_away(running: Trial) -> None:
    await asyncio.to_thread(running.broker.stop)
    await asyncio.sleep(GONE)
    await asyncio.to_thread(running.broker.start)
    await running.load.wait_until_busy(1)


FAULTS = (
    Fault(
        name="broker-killed",
        text="RabbitMQ is killed while it confirms, and started again",
        quick=2,
        full=20,
        run=under_load(_kill),
    ),
    Fault(
        name="broker-frozen",
        text=f"RabbitMQ stands still for {FROZEN:g} s with its connections open",
        quick=2,
        full=20,
        run=under_load(_freeze),
    ),
    Fault(
        name="broker-blocked",
        text=f"a memory alarm of RabbitMQ blocks publishers for {BLOCKED:g} s",
        quick=2,
        full=20,
        run=under_load(_block),
    ),
    Fault(
        name="broker-gone",
        text=f"RabbitMQ is shut down for {GONE:g} s, a scaled hour",
        quick=1,
        full=5,
        run=under_load(_take_away),
    ),
)
