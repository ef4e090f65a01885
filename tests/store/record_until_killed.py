"""A program that records until `test_crash` kills it. It prints every write that was acknowledged.

Each round records one event, then one hundred events at once, and settles a delivery.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.store.open_store import NOW, open_store_in, record_event


async def main(folder: Path) -> None:
    async with open_store_in(folder, lambda _: ("bus", "chat")) as store:
        number = 0
        while True:
            for position in (
                await store.transact(record_event(number + 1)),
                *await asyncio.gather(
                    *(
                        store.submit(record_event(number + 2 + offset), fail_open=offset % 2 == 0)
                        for offset in range(100)
                    )
                ),
            ):
                print("recorded", position, flush=True)  # noqa: T201  # whoever kills it listens
            entry = 2 * number + 1
            await store.transact(
                lambda tx, entry=entry: tx.deliveries.store_final_state(
                    entry, "delivered", None, NOW
                )  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            )
            print("settled", entry, flush=True)  # noqa: T201  # the same
            number += 101


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
