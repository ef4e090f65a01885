"""A real HTTP server on loopback whose responses a test scripts byte by byte.

It remembers every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from multidict import CIMultiDict

from relay.clock import Clock, SystemClock

EMPTY = b'{"DocumentIncarnation":1,"Events":[]}'


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request as it arrived.

    ``at`` is the monotonic time in seconds, ``peer`` the port of the client.
    """

    method: str
    target: str
    headers: CIMultiDict[str]
    body: bytes
    at: float
    peer: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A scripted response.

    Content-Length is that of ``body`` unless ``headers`` set it. ``raw`` replaces the whole
    response. ``pause`` is the seconds before the response, ``drip`` those between two bytes of the
    body. ``then`` is what happens to the connection afterwards.
    """

    body: bytes = EMPTY
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    pause: float = 0.0
    drip: float | None = None
    then: Literal["keep", "close", "reset", "hang"] = "keep"

    def head(self) -> bytes:
        headers: CIMultiDict[str] = CIMultiDict(self.headers)
        if "Transfer-Encoding" not in headers:
            headers.setdefault("Content-Length", str(len(self.body)))
        lines = [
            f"HTTP/1.1 {self.status} Reason",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode()


Script = Callable[[ReceivedRequest], Answer]


class ScriptedServer:
    """The server. ``answer`` is the response to all requests, or is called for each request."""

    def __init__(self, answer: Answer | Script, clock: Clock) -> None:
        self.answer = answer
        self.clock = clock
        self.requests: list[ReceivedRequest] = []
        self.request_arrived = asyncio.Event()
        self.url = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        # A client that hangs up and the end of the test are no errors of the server.
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        ):
            while await self._answer_request(reader, writer):
                pass
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self._tasks.discard(task)

    async def _answer_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        request = await _read_request(reader, writer, self.clock)
        self.requests.append(request)
        self.request_arrived.set()
        answer = self.answer if isinstance(self.answer, Answer) else self.answer(request)
        await asyncio.sleep(answer.pause)
        await _send_answer(answer, writer)
        if answer.then == "hang":
            await asyncio.Event().wait()
        if answer.then == "reset":
            # Closing with a linger of zero seconds sends RST instead of FIN.
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return answer.then == "keep"

    async def wait_for_request(self) -> None:
        self.request_arrived.clear()
        await self.request_arrived.wait()

    async def end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _send_answer(answer: Answer, writer: asyncio.StreamWriter) -> None:
    if answer.raw is not None:
        writer.write(answer.raw)
    elif answer.drip is None:
        writer.write(answer.head() + answer.body)
    else:
        writer.write(answer.head())
        for byte in answer.body:
            await asyncio.sleep(answer.drip)
            writer.write(bytes([byte]))
            await writer.drain()
    await writer.drain()


async def _read_request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, clock: Clock
) -> ReceivedRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii").split("\r\n")
    at = clock.monotonic()
    method, target, _ = head[0].split(" ")
    headers: CIMultiDict[str] = CIMultiDict()
    for line in head[1:]:
        if line:
            name, _, value = line.partition(": ")
            headers.add(name, value)
    body = await reader.readexactly(int(headers.get("Content-Length", "0")))
    return ReceivedRequest(method, target, headers, body, at, writer.get_extra_info("peername")[1])


@contextlib.asynccontextmanager
async def run_server(
    answer: Answer | Script | None = None, clock: Clock | None = None
) -> AsyncIterator[ScriptedServer]:
    """Serve on a free loopback port until the block ends.

    ``clock`` gives the times of the requests.
    """
    server = ScriptedServer(answer or Answer(), clock or SystemClock())
    listener = await asyncio.start_server(server._serve, "127.0.0.1", 0)  # noqa: SLF001  # the context manager belongs to the class
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        await server.end()
        await listener.wait_closed()


def answers_in_order(*answers: Answer) -> Script:
    """Return a script that gives the responses in order and repeats the last."""
    remaining = list(answers)
    return lambda _: remaining.pop(0) if len(remaining) > 1 else remaining[0]
