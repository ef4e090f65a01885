"""What can fail: a module for each part of the world, and the contract of a fault.

A module has a tuple ``FAULTS``. A fault is added there, and the command finds it.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from chaos.judge import Counts
from chaos.trial import Trial, Wiring, trial
from tests.rabbitmq import Broker

ROUNDS_OF_A_TRIAL = 10
"""Rounds under one load. Each trial ends with a judgment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where some rounds happen. ``advance`` is called before each of them."""

    folder: Path
    broker: Broker
    chance: random.Random
    advance: Callable[[], None]


Run = Callable[[Place, int], Awaitable[Counts]]
"""Performs so many rounds, and returns what came of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of failure.

    ``text`` says what happens in a round, for the report. ``quick`` and ``full`` are the rounds of
    each tier. ``missing`` returns what this machine lacks; None: nothing.
    """

    name: str
    text: str
    quick: int
    full: int
    run: Run
    rounds_of_a_trial: int = ROUNDS_OF_A_TRIAL
    missing: Callable[[], str | None] = lambda: None


@asynccontextmanager
async def no_wiring(_: Place) -> AsyncIterator[Wiring]:
    """Put nothing between the relay and its far sides."""
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
            counts = await running.settle()
        counts.rounds = rounds
        return counts

    return run


def all_faults() -> dict[str, Fault]:
    """Return the faults of all modules of this package, by name."""
    modules = [
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    ]
    return {fault.name: fault for module in modules for fault in module.FAULTS}
