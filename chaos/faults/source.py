"""IMDS fails in every way that the simulator knows."""

from __future__ import annotations

from typing import get_args

from chaos.faults import Fault, under_load
from chaos.trial import Trial
from relay.simulator import Fault as ImdsFault
from relay.simulator.setup import Kind

KINDS = tuple(get_args(Kind))
STATUSES = (404, 410, 429, 500, 503)
LASTS = 4.0
"""Seconds in which a fault meets calls."""
_numbers = iter(range(1_000_000))


async def _fail(running: Trial) -> None:
    """Let the next kind of fault meet polls, and StartRequests where that makes sense."""
    number = next(_numbers)
    kind = KINDS[number % len(KINDS)]
    on = "document"
    if kind in ("status", "delay", "hang", "reset") and running.chance.random() < 0.5:
        on = "approval"
    running.azure.add_fault(
        ImdsFault(
            kind=kind,
            on=on,  # type: ignore[arg-type]  # one of the two above
            calls=running.chance.randrange(1, 4),
            lasts=LASTS,
            status=running.chance.choice(STATUSES),
            processed=on == "approval" and kind != "delay" and running.chance.random() < 0.5,
            time=2.0,
        )
    )
    await running.load.wait_until_busy(1)
    running.azure.clear_faults()


FAULTS = (
    Fault(
        name="imds",
        text="IMDS fails in one of the ways that the simulator knows: statuses, delays, resets, "
        "documents that are cut off, empty, malformed, too large or repeated",
        quick=len(KINDS),
        full=20 * len(KINDS),
        run=under_load(_fail),
        rounds_of_a_trial=len(KINDS),
    ),
)
