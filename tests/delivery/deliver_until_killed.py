"""A program that records and delivers until `test_restart` kills it.

It prints every event that a receiver has taken.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from relay.events.cloudevent import CloudEvent
from relay.sinks import Receipt
from tests.delivery.running_dispatcher import ScriptedSink, running_dispatcher

CHANCE = random.Random(1)  # noqa: S311  # the same in every run


async def take(event: CloudEvent) -> Receipt:
    await asyncio.sleep(CHANCE.random() * 0.003)
    print(event.subject, event.id, flush=True)  # noqa: T201  # whoever kills it listens
    return Receipt()


async def main(folder: Path) -> None:
    async with running_dispatcher(folder, {"bus": ScriptedSink(take, concurrency=4)}) as relay:
        while True:
            for number in range(6):
                await relay.record_event(
                    f"E-{number}",
                    CHANCE.choice(["event.scheduled", "event.updated", "approval.recorded"]),
                )


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
