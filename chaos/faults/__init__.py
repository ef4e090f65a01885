"""What can fail: a module for each part of the world, and the contract of a fault.

A module has a tuple ``FAULTS``. A fault is added there, and the command finds it.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import random
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.judge import Counts
from chaos.trial import Trial, Wiring, trial
from tests.rabbitmq import Broker

ROUNDS_OF_A_TRIAL = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where some rounds happen. ``advance`` is called before each of them."""

    folder: Path
    broker: Broker
    chance: random.Random
    advance: Callable[[], None]


Run = Callable[[Place, int], Coroutine[Any, Any, Counts]]
"""Performs so many rounds, and returns what came of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of failure.

    ``text`` says what happens in a round, for the report. ``quick`` and ``full`` are the rounds of
    each tier. ``needs`` is a program, or root.
    """

    name: str
    text: str
    quick: int
    full: int
    run: Run
    rounds_of_a_trial: int = ROUNDS_OF_A_TRIAL
    needs: str | None = None

    @property
    def can_run(self) -> bool:
        if self.needs == "root":
            return os.geteuid() == 0
        return self.needs is None or shutil.which(self.needs) is not None


@asynccontextmanager
async def no_wiring(_: Place) -> AsyncIterator[Wiring]:
    yield Wiring()


def under_load(
    inject: Callable[[Trial], Awaitable[None]],
    wire: Callable[[Place], AbstractAsyncContextManager[Wiring]] = no_wiring,
) -> Run:
    """Return the run of a fault that ``inject`` performs and takes back in each round."""

    async def run(place: Place, rounds: int) -> Counts:
        async with (
            wire(place) as wiring,
            trial(place.folder, place.broker, place.chance, wiring) as running,
        ):
            await running.load.wait_until_busy()
            for _ in range(rounds):
                place.advance()
                await inject(running)
            if running.process.prefix != wiring.prefix:  # the fault ran the relay under a program
                await running.process.kill()
                running.process.prefix = wiring.prefix
                await running.process.start(ready=False)
            counts = await running.settle()
        counts.rounds = rounds
        return counts

    return run


def all_faults() -> dict[str, Fault]:
    modules = [
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    ]
    return {fault.name: fault for module in modules for fault in module.FAULTS}
