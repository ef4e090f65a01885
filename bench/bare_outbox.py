"""A bare outbox: what the same libraries allow with none of the relay's features.

It polls the same endpoint, inserts each new event, delivers it signed, and settles it. One thread
commits: each transaction takes up to `MAX_ROWS` new events and everything that was delivered since
the one before it. There is no journal, no order, no retry, and no log of attempts.

`python -m bench.bare_outbox` with the configuration as JSON: see `Configuration`.
"""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aio_pika
import aiohttp
import orjson

from bench import EXCHANGE, SECRET
from relay.events.cloudevent import CONTENT_TYPE
from relay.signature import sign

MAX_ROWS = 200
"""New events in one transaction."""
SETTLE_PAUSE = 0.01
"""Seconds in which deliveries gather before a transaction that only settles."""
IN_FLIGHT = 64
"""Deliveries that are open at once, over all endpoints."""

_SCHEMA = """
CREATE TABLE event (position INTEGER PRIMARY KEY, id TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE entry (
  position INTEGER NOT NULL, target INTEGER NOT NULL, settled INTEGER NOT NULL,
  PRIMARY KEY (position, target)
) WITHOUT ROWID;
CREATE INDEX waiting ON entry (position) WHERE NOT settled;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Where it polls, what it writes, and where it delivers: to endpoints or to a broker."""

    source: str
    path: str
    endpoints: list[str]
    amqp_url: str | None


@dataclass(frozen=True, slots=True)
class Message:
    position: int
    id: str
    body: bytes


Deliver = Callable[[int, Message], Awaitable[None]]
"""Delivers a message to the target with this number."""


async def run(configuration: Configuration) -> None:
    """Poll, store and deliver until the process is ended."""
    targets = 1 if configuration.amqp_url else len(configuration.endpoints)
    queues: list[asyncio.Queue[Message]] = [asyncio.Queue() for _ in range(targets)]
    async with _connected(configuration) as deliver, aiohttp.ClientSession() as session:
        writer = _Writer(configuration.path, queues)

        async def send(target: int) -> None:
            while True:
                message = await queues[target].get()
                await deliver(target, message)
                writer.settle(message.position, target)

        async with asyncio.TaskGroup() as group:
            group.create_task(writer.run())
            for target in range(targets):
                for _ in range(max(8, IN_FLIGHT // targets)):
                    group.create_task(send(target))
            seen: set[str] = set()
            url = f"{configuration.source}/metadata/scheduledevents"
            while True:
                async with session.get(url, headers={"Metadata": "true"}) as response:
                    writer.add(_new_events(await response.read(), seen))


class _Writer:
    """Owns the file. Events go to the queues of all targets once they are on disk."""

    def __init__(self, path: str, queues: list[asyncio.Queue[Message]]) -> None:
        self._queues = queues
        self._thread = ThreadPoolExecutor(1)
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.executescript(_SCHEMA)
        self._last_position = 0
        self._new: list[Message] = []
        self._settled: list[tuple[int, int]] = []
        self._work, self._arrived = asyncio.Event(), asyncio.Event()

    def add(self, events: list[tuple[str, bytes]]) -> None:
        """Store new events, then hand them to the senders."""
        for event_id, body in events:
            self._last_position += 1
            self._new.append(Message(self._last_position, event_id, body))
        if events:
            self._work.set()
            self._arrived.set()

    def settle(self, position: int, target: int) -> None:
        self._settled.append((position, target))
        self._work.set()

    async def run(self) -> None:
        """Commit in groups."""
        loop = asyncio.get_running_loop()
        while True:
            await self._work.wait()
            self._work.clear()
            if not self._new:
                self._arrived.clear()
                await asyncio.wait(
                    [asyncio.ensure_future(self._arrived.wait())], timeout=SETTLE_PAUSE
                )
            new, self._new = self._new[:MAX_ROWS], self._new[MAX_ROWS:]
            settled, self._settled = self._settled, []
            await loop.run_in_executor(self._thread, self._commit, new, settled)
            for queue in self._queues:
                for message in new:
                    queue.put_nowait(message)
            if self._new:
                self._work.set()

    def _commit(self, new: list[Message], settled: list[tuple[int, int]]) -> None:
        # Each statement gives up the interpreter and has to get it back, so there are few.
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        if new:
            values = [value for row in new for value in (row.position, row.id, row.body)]
            execute(f"INSERT INTO event VALUES {_rows(3, len(new))}", values)  # noqa: S608  # our own text
            targets = range(len(self._queues))
            entries = [value for row in new for to in targets for value in (row.position, to, 0)]
            execute(f"INSERT INTO entry VALUES {_rows(3, len(entries) // 3)}", entries)  # noqa: S608  # our own text
        if settled:
            execute(
                "UPDATE entry SET settled = 1 WHERE (position, target) IN "
                "(SELECT value ->> 0, value ->> 1 FROM json_each(?))",
                [orjson.dumps(settled).decode()],
            )
        execute("COMMIT")


def _new_events(document: bytes, seen: set[str]) -> list[tuple[str, bytes]]:
    """Return id and body of a CloudEvent for each event that was not seen before."""
    new = [event for event in orjson.loads(document)["Events"] if event["EventId"] not in seen]
    seen.update(event["EventId"] for event in new)
    return [_cloudevent(event) for event in new]


def _rows(columns: int, count: int) -> str:
    return ", ".join([f"({', '.join('?' * columns)})"] * count)


def _cloudevent(event: dict[str, Any]) -> tuple[str, bytes]:
    """Return a CloudEvent's id and body, of about the size of the relay's."""
    digest = hashlib.sha256(event["EventId"].encode()).hexdigest()[:32]
    body = {
        "specversion": "1.0",
        "id": digest,
        "source": "imds://bench",
        "type": "io.imdsrelay.event.scheduled.v1",
        "subject": event["EventId"],
        "time": "2026-01-01T00:00:00.000000Z",
        "datacontenttype": "application/json",
        "dataschema": "https://example.com/schemas/event.scheduled.v1.json",
        "scope": "bench",
        "relay": "vm-0",
        "eventtype": event["EventType"],
        "eventsource": event["EventSource"],
        "correlationid": event["EventId"],
        "partitionkey": event["EventId"],
        "data": event,
    }
    return digest, orjson.dumps(body)


@asynccontextmanager
async def _connected(configuration: Configuration) -> AsyncIterator[Deliver]:
    """Yield what delivers a message."""
    if configuration.amqp_url is not None:
        connection = await aio_pika.connect(configuration.amqp_url)
        async with connection, connection.channel(on_return_raises=True) as channel:
            exchange = await channel.get_exchange(EXCHANGE, ensure=False)

            async def publish(_: int, message: Message) -> None:
                made = aio_pika.Message(
                    message.body,
                    message_id=message.id,
                    content_type=CONTENT_TYPE,
                    delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                )
                await exchange.publish(made, "bench")

            yield publish
        return
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=15)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def post(target: int, message: Message) -> None:
            now = int(time.time())
            headers = {
                "Content-Type": CONTENT_TYPE,
                "webhook-id": message.id,
                "webhook-timestamp": str(now),
                "webhook-signature": sign([SECRET], message.id, now, message.body),
            }
            url = configuration.endpoints[target]
            async with session.post(url, data=message.body, headers=headers) as response:
                await response.read()
                response.raise_for_status()

        yield post


if __name__ == "__main__":
    asyncio.run(run(Configuration(**orjson.loads(sys.argv[1]))))
