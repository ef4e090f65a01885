"""The receiver: a process with HTTP endpoints, or a consumer of a queue, that notes each arrival.

It does as little as it can, because it shares the machine with the sender. An event has arrived
when the whole request has been read. Signatures are verified after the measurement.

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
from standardwebhooks import Webhook, WebhookVerificationError
from typing_extensions import override

from bench import EXCHANGE, SECRET

QUEUE = "imds-relay.bench.received"

_ACCEPTED = b"HTTP/1.1 204 No Content\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_EVENT_ID = re.compile(rb'"subject":"BE9C([0-9A-F]{4})-0000-4000-8000-([0-9A-F]{12})"')
_MAX_LINE = 2**26
_EXIT_TIMEOUT = 10.0


class Book:
    """What arrived in the present run, by endpoint and number of the event."""

    def __init__(self) -> None:
        self.delays: dict[int, float] = {}
        self._run = -1
        self._first_arrivals: dict[tuple[int, int], int] = {}
        self._requests: list[tuple[bytes, bytes]] = []
        self._repeats = 0
        self._awaited = 0
        self._ignored: int | None = None
        self._complete = asyncio.Event()

    def note(self, endpoint: int, head: bytes, body: bytes) -> None:
        """Note one request or message; ``head`` is empty for a message."""
        now = time.monotonic_ns()
        match = _EVENT_ID.search(body)
        if match is None or int(match[1], 16) != self._run:
            return
        key = endpoint, int(match[2], 16)
        if key in self._first_arrivals:
            self._repeats += 1
        else:
            self._first_arrivals[key] = now
        if head:
            self._requests.append((head, body))
        if self._awaited and self._count() >= self._awaited:
            self._complete.set()

    async def begin(self, run: int) -> None:
        """Forget what arrived, and note the events of this run only."""
        self._run = run
        self._first_arrivals, self._requests, self._repeats = {}, [], 0

    async def delay(self, endpoint: int, seconds: float) -> None:
        """Let an endpoint answer this late from now on."""
        self.delays[endpoint] = seconds

    async def wait(self, count: int, seconds: float, ignored: int | None) -> int:
        """Wait until so many deliveries have arrived, and return how many.

        Those to the endpoint ``ignored`` do not count.
        """
        self._awaited, self._ignored = count, ignored
        self._complete.clear()
        if self._count() < count:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._complete.wait(), seconds)
        self._awaited = 0
        return self._count()

    async def arrivals(self) -> dict[str, Any]:
        """Return the first arrival of each delivery, the repeats and the wrong signatures."""
        first = [(*key, moment) for key, moment in self._first_arrivals.items()]
        wrong = sum(not _is_signed(head, body) for head, body in self._requests)
        return {"first": first, "repeats": self._repeats, "forged": wrong}

    def _count(self) -> int:
        if self._ignored is None:
            return len(self._first_arrivals)
        return sum(endpoint != self._ignored for endpoint, _ in self._first_arrivals)


def _is_signed(head: bytes, body: bytes) -> bool:
    lines = head.decode("latin-1").split("\r\n")[1:]
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    try:
        Webhook(SECRET).verify(body, headers)
    except WebhookVerificationError:
        return False
    return True


class _Endpoint(asyncio.Protocol):
    """A connection to one HTTP endpoint."""

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
            head, body = self._received[:end_of_head], self._received[end_of_head + 4 : end]
            self._received = self._received[end:]
            self._book.note(self._number, head, body)
            if delay := self._book.delays.get(self._number):
                asyncio.get_running_loop().call_later(delay, self._answer)
            else:
                self._answer()

    def _answer(self) -> None:
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
            book.note(0, b"", message.body)
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

    async def begin(self, run: int) -> None:
        """See `Book.begin`."""
        await self.call("begin", run)

    async def delay(self, endpoint: int, seconds: float) -> None:
        """See `Book.delay`."""
        await self.call("delay", endpoint, seconds)

    async def wait(self, count: int, within: float, ignored: int | None = None) -> int:
        """See `Book.wait`."""
        return int(await self.call("wait", count, within, ignored))

    async def arrivals(self) -> dict[str, Any]:
        """See `Book.arrivals`."""
        return dict(await self.call("arrivals"))

    async def call(self, *words: object) -> Any:
        """Send one call, and return what it answered."""
        assert self._process.stdin is not None  # noqa: S101  # it is a pipe
        self._process.stdin.write(orjson.dumps(words) + b"\n")
        return await self.answer()

    async def answer(self) -> Any:
        """Read one line."""
        assert self._process.stdout is not None  # noqa: S101  # it is a pipe
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the receiver has ended")
        return orjson.loads(line)


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
        handle.urls = await handle.answer()
        yield handle
    finally:
        assert process.stdin is not None  # noqa: S101  # it is a pipe
        process.stdin.close()
        try:
            async with asyncio.timeout(_EXIT_TIMEOUT):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
