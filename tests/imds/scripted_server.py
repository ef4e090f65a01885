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
from typing import Any, Literal

from multidict import CIMultiDict

from relay.clock import Clock, SystemClock
from tests.sinks.http_receiver import Connection, Received, listening

EMPTY = b'{"DocumentIncarnation":1,"Events":[]}'
EVENT: Mapping[str, Any] = {
    "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
    "EventType": "Reboot",
    "EventStatus": "Scheduled",
    "ResourceType": "VirtualMachine",
    "Resources": ["vm-0"],
    "NotBefore": "Mon, 19 Sep 2050 18:29:47 GMT",
    "EventSource": "Platform",
    "DurationInSeconds": -1,
}
"""An event as a document has it."""


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
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"HTTP/1.1 {self.status} Reason\r\n{fields}\r\n".encode()


Script = Callable[[Received], Answer]


@dataclass(slots=True)
class ScriptedServer:
    """The server. ``answer`` is the response to all requests, or is called for each request."""

    answer: Answer | Script
    clock: Clock
    """Gives the times of the requests."""
    requests: list[Received] = field(default_factory=list)
    url: str = ""

    async def serve(self, connection: Connection) -> None:
        """Answer the requests of a connection until an answer ends it."""
        answer = Answer()
        while answer.then == "keep":
            request = await connection.request()
            self.requests.append(request)
            answer = self.answer if isinstance(self.answer, Answer) else self.answer(request)
            await asyncio.sleep(answer.pause)
            if answer.raw is not None:
                await connection.send(answer.raw)
            elif answer.drip is None:
                await connection.send(answer.head(), answer.body)
            else:
                await connection.send(answer.head())
                for byte in answer.body:
                    await asyncio.sleep(answer.drip)
                    await connection.send(bytes([byte]))
        if answer.then == "hang":
            await asyncio.Event().wait()
        if answer.then == "reset":
            # Closing with a linger of zero seconds sends RST instead of FIN.
            connected = connection.writer.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.writer.close()
        await connection.writer.wait_closed()


@contextlib.asynccontextmanager
async def run_server(
    answer: Answer | Script | None = None, clock: Clock | None = None
) -> AsyncIterator[ScriptedServer]:
    """Serve on a free loopback port until the block ends."""
    server = ScriptedServer(answer or Answer(), clock or SystemClock())
    async with listening(server.serve, clock=server.clock) as receiver:
        server.url = f"http://127.0.0.1:{receiver.port}"
        yield server


def answers_in_order(*answers: Answer) -> Script:
    """Return a script that gives the responses in order and repeats the last."""
    remaining = list(answers)
    return lambda _: remaining.pop(0) if len(remaining) > 1 else remaining[0]
