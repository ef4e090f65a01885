"""A program that records for as long as it lives, and says on its output what was acknowledged. `test_crash` kills it.

Three rounds follow each other: one event, one hundred at once, and a delivery that is settled.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.outbox.open_store import NOW, open_store_in, record_event


async def main(folder: Path) -> None:
    """Record until killed."""
    async with open_store_in(folder, lambda _: ("bus", "chat")) as kept:
        number = 0
        while True:
            for position in (
                await kept.transact(record_event(number + 1)),
                *await asyncio.gather(
                    *(
                        kept.submit(record_event(number + 2 + more), fail_open=more % 2 == 0)
                        for more in range(100)
                    )
                ),
            ):
                print("recorded", position, flush=True)  # noqa: T201  # whoever kills it listens
            entry = 2 * number + 1
            await kept.transact(
                lambda tx, entry=entry: tx.deliveries.settle(entry, "delivered", None, NOW)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            )
            print("settled", entry, flush=True)  # noqa: T201  # the same
            number += 101


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
