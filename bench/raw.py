"""Raw limits: what the building blocks do on this machine with nothing around them.

`python -m bench.raw posts URL COUNT`, `… publishes URL COUNT`, `… consumes URL COUNT QUEUE` or
`… commits FOLDER COUNT ROWS` prints the operations per second and the CPU time of each in
milliseconds, as JSON.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aio_pika
import orjson
from aiormq.abc import DeliveredMessage

from bench import EXCHANGE
from bench.bare_outbox import IN_FLIGHT, amqp_message, client_session, post_signed

BODY = orjson.dumps({"subject": "BE9C", "data": "x" * 900})
"""About as large as an event. The receiver counts none of them."""


WARM_UP = 500
"""Operations before the clock starts."""

Cost = tuple[float, float]
"""Elapsed and CPU seconds."""


async def posts(url: str, count: int) -> Cost:
    """POST so many signed events."""
    async with client_session() as session:
        return await _time(count, lambda number: post_signed(session, url, f"raw-{number}", BODY))


async def publishes(url: str, count: int) -> Cost:
    """Publish so many persistent messages, each confirmed by the broker."""
    connection = await aio_pika.connect(url)
    async with connection, connection.channel(on_return_raises=True) as channel:
        exchange = await channel.get_exchange(EXCHANGE, ensure=False)

        async def publish(number: int) -> None:
            await exchange.publish(amqp_message(f"raw-{number}", BODY), "bench")

        return await _time(count, publish)


async def consumes(url: str, count: int, queue: str) -> Cost:
    """Consume so many messages without acknowledgements."""
    arrived, complete = 0, asyncio.Event()

    async def note(_: DeliveredMessage) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == count:
            complete.set()

    connection = await aio_pika.connect(url)
    async with connection, connection.channel() as channel:
        underlay = await channel.get_underlay_channel()
        began, cpu_before = time.perf_counter(), time.process_time()
        await underlay.basic_consume(queue, note, no_ack=True)
        await complete.wait()
        return time.perf_counter() - began, time.process_time() - cpu_before


async def _time(count: int, send: Callable[[int], Awaitable[None]]) -> Cost:
    """Return the cost of so many operations, `IN_FLIGHT` of them at once."""
    await _repeat(min(count, WARM_UP), send)
    began, cpu_before = time.perf_counter(), time.process_time()
    await _repeat(count, send)
    return time.perf_counter() - began, time.process_time() - cpu_before


async def _repeat(count: int, send: Callable[[int], Awaitable[None]]) -> None:
    numbers = iter(range(count))

    async def sender() -> None:
        for number in numbers:
            await send(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(sender())


def commits(folder: Path, count: int, rows: int) -> Cost:
    """Insert so many events, in transactions of so many rows that are on disk before the next."""
    connection = sqlite3.connect(folder / "raw.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE event (position INTEGER PRIMARY KEY, body BLOB NOT NULL)")
    began, cpu_before = time.perf_counter(), time.process_time()
    for _ in range(0, count, rows):
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO event (body) VALUES (?)", [(BODY,)] * rows)
        connection.execute("COMMIT")
    cost = time.perf_counter() - began, time.process_time() - cpu_before
    connection.close()
    return cost


def main() -> None:
    """Carry out one kind of operation, and print what it cost."""
    kind, place, count, *more = sys.argv[1:]
    if kind == "posts":
        elapsed, cpu = asyncio.run(posts(place, int(count)))
    elif kind == "publishes":
        elapsed, cpu = asyncio.run(publishes(place, int(count)))
    elif kind == "consumes":
        elapsed, cpu = asyncio.run(consumes(place, int(count), more[0]))
    else:
        elapsed, cpu = commits(Path(place), int(count), int(more[0]))
    cost = {"per_second": int(count) / elapsed, "cpu_ms": cpu / int(count) * 1000}
    print(orjson.dumps(cost).decode())


if __name__ == "__main__":
    main()
