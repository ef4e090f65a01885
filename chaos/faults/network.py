"""The network between the relay and IMDS, the webhook and RabbitMQ misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chaos.faults import Fault, Place, under_load
from chaos.trial import Trial, Wiring
from tests.counting_proxy import PIECE, CountingProxy

LASTS = 4.0
"""Seconds: longer than a call may take."""
DELAY = 0.3
"""Seconds before each piece of data, in both directions."""
SLICE = 7
"""Bytes that pass at once."""


@asynccontextmanager
async def _with_proxies(_: Place) -> AsyncIterator[Wiring]:
    yield Wiring(proxied=True)


def _choose(running: Trial) -> list[CountingProxy]:
    """Return the proxies that a round concerns: one, or all."""
    every = list(running.proxies.values())
    return running.chance.choice([*([each] for each in every), every])


async def _lasts(running: Trial, proxies: list[CountingProxy]) -> None:
    await asyncio.sleep(LASTS)
    for each in proxies:
        if not each.to_host.is_set():
            each.cut()  # what was held is lost
        each.delay, each.piece = 0.0, PIECE
        await each.listen()
    await running.load.wait_until_busy(1)


async def _delay(running: Trial) -> None:
    chosen = _choose(running)
    for each in chosen:
        each.delay = DELAY
    await _lasts(running, chosen)


async def _slice(running: Trial) -> None:
    chosen = _choose(running)
    for each in chosen:
        each.piece, each.delay = SLICE, 0.001
    await _lasts(running, chosen)


async def _drop(running: Trial) -> None:
    chosen = _choose(running)
    for each in chosen:
        each.hold()
    await _lasts(running, chosen)


async def _reset(running: Trial) -> None:
    chosen = _choose(running)
    for _ in range(5):
        await running.pause(0.5)
        for each in chosen:
            each.cut()
    await running.load.wait_until_busy(1)


async def _refuse(running: Trial) -> None:
    chosen = _choose(running)
    for each in chosen:
        each.go_away()
    await _lasts(running, chosen)


FAULTS = (
    Fault(
        name="network-slow",
        text=f"each piece of data takes {DELAY * 1000:g} ms more, for {LASTS:g} s",
        quick=2,
        full=20,
        run=under_load(_delay, _with_proxies),
    ),
    Fault(
        name="network-sliced",
        text=f"data arrives in pieces of {SLICE} bytes, for {LASTS:g} s",
        quick=2,
        full=20,
        run=under_load(_slice, _with_proxies),
    ),
    Fault(
        name="network-half-open",
        text=f"connections stay open and nothing passes, for {LASTS:g} s; then they are reset",
        quick=3,
        full=20,
        run=under_load(_drop, _with_proxies),
    ),
    Fault(
        name="network-reset",
        text="all connections are reset, five times within a few seconds",
        quick=3,
        full=20,
        run=under_load(_reset, _with_proxies),
    ),
    Fault(
        name="network-refused",
        text=f"connections are reset and new ones refused, for {LASTS:g} s",
        quick=2,
        full=20,
        run=under_load(_refuse, _with_proxies),
    ),
)
