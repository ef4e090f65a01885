"""The receiver: a process with HTTP endpoints, or a consumer of a queue, that notes each arrival.

It does as little as it can, because it shares the machine with the sender. An event has arrived
when the whole request has been read.

The measurement starts it with `receiver`, and sends a line of JSON for each call: the name of a
method of `Book`, then its arguments. Each answer is a line of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aio_pika
import orjson
from aio_pika.abc import AbstractIncomingMessage
from typing_extensions import override

from bench import EXCHANGE

QUEUE = "imds-relay.bench.received"

_ACCEPTED = b"HTTP/1.1 204 No Content\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_EVENT_ID = re.compile(rb'"subject":"BE9C([0-9A-F]{4})-0000-4000-8000-([0-9A-F]{12})"')
_MAX_LINE = 2**26


class Book:
    """What arrived in the present run, by endpoint and number of the event."""

    def __init__(self) -> None:
        self._run = -1
        self._first_arrivals: dict[tuple[int, int], int] = {}
        self._repeats = 0
        self._awaited = 0
        self._complete = asyncio.Event()

    def note(self, endpoint: int, body: bytes) -> None:
        now = time.monotonic_ns()
        match = _EVENT_ID.search(body)
        if match is None or int(match[1], 16) != self._run:
            return
        key = endpoint, int(match[2], 16)
        if key in self._first_arrivals:
            self._repeats += 1
        else:
            self._first_arrivals[key] = now
        if self._awaited and len(self._first_arrivals) >= self._awaited:
            self._complete.set()

    async def begin(self, run: int) -> None:
        """Forget what arrived, and note the events of this run only."""
        self._run = run
        self._first_arrivals, self._repeats = {}, 0

    async def wait(self, count: int, seconds: float) -> int:
        """Wait until so many deliveries have arrived, and return how many."""
        self._awaited = count
        self._complete.clear()
        if len(self._first_arrivals) < count:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._complete.wait(), seconds)
        self._awaited = 0
        return len(self._first_arrivals)

    async def arrivals(self) -> dict[str, Any]:
        """Return the first arrival of each delivery, and how many repeats there were."""
        first = [(*key, moment) for key, moment in self._first_arrivals.items()]
        return {"first": first, "repeats": self._repeats}


class _Endpoint(asyncio.Protocol):
    def __init__(self, book: Book, number: int) -> None:
        self._book = book
        self._number = number
        self._received = b""
        self._transport: asyncio.Transport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  # a stream
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end_of_head := self._received.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._received, 0, end_of_head)
            end = end_of_head + 4 + (int(length[1]) if length else 0)
            if len(self._received) < end:
                return
            body = self._received[end_of_head + 4 : end]
            self._received = self._received[end:]
            self._book.note(self._number, body)
            if self._transport is not None and not self._transport.is_closing():
                self._transport.write(_ACCEPTED)


async def serve(endpoints: int, amqp_url: str | None) -> None:
    """Listen, print the URLs, and carry out the calls on standard input until it ends."""
    book, loop = Book(), asyncio.get_running_loop()
    urls = []
    for number in range(endpoints):
        server = await loop.create_server(
            lambda number=number: _Endpoint(book, number),  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            "127.0.0.1",
            0,
            backlog=1024,
        )
        urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    async with contextlib.AsyncExitStack() as stack:
        if amqp_url is not None:
            await stack.enter_async_context(_consumer(book, amqp_url))
        calls = asyncio.StreamReader(limit=_MAX_LINE)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(calls), sys.stdin)
        print(orjson.dumps(urls).decode(), flush=True)
        while line := await calls.readline():
            name, *arguments = orjson.loads(line)
            print(orjson.dumps(await getattr(book, name)(*arguments)).decode(), flush=True)


@asynccontextmanager
async def _consumer(book: Book, amqp_url: str) -> AsyncIterator[None]:
    """Consume a quorum queue that is bound to the exchange, as the relay declares that."""
    connection = await aio_pika.connect(amqp_url)
    async with connection, connection.channel() as channel:
        await channel.set_qos(prefetch_count=500)
        exchange = await channel.declare_exchange(
            EXCHANGE,
            aio_pika.ExchangeType.TOPIC,
            durable=True,
            arguments={"alternate-exchange": f"{EXCHANGE}.unrouted"},
        )
        queue = await channel.declare_queue(
            QUEUE, durable=True, arguments={"x-queue-type": "quorum"}
        )
        await queue.bind(exchange, "#")

        async def note(message: AbstractIncomingMessage) -> None:
            book.note(0, message.body)
            await message.ack()

        tag = await queue.consume(note)
        yield
        await queue.cancel(tag)
        await queue.delete(if_unused=False, if_empty=False)


class Receiver:
    """The receiver's process, as the measurement uses it. `receiver` makes it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.urls: list[str] = []
        """The HTTP endpoints."""

    async def call(self, *words: object) -> Any:
        """Call a method of `Book`, and return what it answered. Without words, read the URLs."""
        assert self._process.stdin is not None  # noqa: S101  # pipes
        assert self._process.stdout is not None  # noqa: S101
        if words:
            self._process.stdin.write(orjson.dumps(words) + b"\n")
        return orjson.loads(await self._process.stdout.readline())


@asynccontextmanager
async def receiver(endpoints: int, amqp_url: str | None = None) -> AsyncIterator[Receiver]:
    """Run a receiver with so many HTTP endpoints, or with a consumer of the broker."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.receiver",
        str(endpoints),
        *([amqp_url] if amqp_url else []),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_LINE,
    )
    handle = Receiver(process)
    try:
        handle.urls = await handle.call()
        yield handle
    finally:
        assert process.stdin is not None  # noqa: S101  # it is a pipe
        process.stdin.close()  # it deletes its queue
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 10.0)
        with contextlib.suppress(ProcessLookupError):
            process.kill()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
