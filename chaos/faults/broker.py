"""RabbitMQ is killed, frozen, blocked by an alarm, or gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from chaos.faults import Fault, Run, under_load
from chaos.trial import Trial
from tests.rabbitmq import Broker

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


def _without(
    seconds: float, take: Callable[[Broker], object], give: Callable[[Broker], object]
) -> Run:
    async def inject(running: Trial) -> None:
        await asyncio.to_thread(take, running.broker)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(give, running.broker)
        await running.load.wait_until_busy(1)

    return under_load(inject)


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
        run=_without(FROZEN, Broker.freeze, Broker.thaw),
    ),
    Fault(
        name="broker-blocked",
        text=f"a memory alarm of RabbitMQ blocks publishers for {BLOCKED:g} s",
        quick=2,
        full=20,
        run=_without(BLOCKED, partial(Broker.alarm, on=True), partial(Broker.alarm, on=False)),
    ),
    Fault(
        name="broker-gone",
        text=f"RabbitMQ is shut down for {GONE:g} s, a scaled hour",
        quick=1,
        full=5,
        run=_without(GONE, Broker.stop, Broker.start),
    ),
)
