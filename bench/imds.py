"""A metadata service that tells a change at once: it holds each poll until there is one.

So a time that begins with the change contains no wait for the next poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import orjson

MAX_HOLD = 5.0
"""Seconds after which a poll is answered although nothing has changed."""
READY_TIMEOUT = 60.0
"""Seconds in which a sender must poll again."""

VM_ID = "7d3f2a10-5c86-4c6b-9a54-08c2b1f0e6aa"
_INSTANCE = orjson.dumps(
    {
        "compute": {
            "name": "vm-0",
            "vmId": VM_ID,
            "vmScaleSetName": "",
            "resourceId": "/subscriptions/bench/vm-0",
        }
    }
)


def event_id(run: int, number: int) -> str:
    """Return the EventId of an event in a run. `bench.receiver` reads both numbers from it."""
    return f"BE9C{run % 0x10000:04X}-0000-4000-8000-{number:012X}"


def not_before() -> str:
    """Return a NotBefore an hour from now, as Azure writes it."""
    moment = (datetime.now(UTC) + timedelta(hours=1)).replace(microsecond=0)
    return format_datetime(moment, usegmt=True)


def scheduled_events(run: int, numbers: Iterable[int], due: str) -> list[dict[str, Any]]:
    """Return events of a document, of the size that Azure's have. ``due`` is their NotBefore."""
    return [
        {
            "EventId": event_id(run, number),
            "EventStatus": "Scheduled",
            "EventType": "Reboot",
            "ResourceType": "VirtualMachine",
            "Resources": ["vm-0", "vm-1"],
            "NotBefore": due,
            "Description": "Host server is undergoing maintenance. The machine restarts once.",
            "EventSource": "Platform",
            "DurationInSeconds": 9,
        }
        for number in numbers
    ]


class MetadataEndpoint:
    """Serves one document. `metadata_endpoint` makes it."""

    def __init__(self) -> None:
        self.url = ""
        self.answers_after: float | None = None
        """Seconds after which a poll is answered; None if it waits for a change.

        Azure's service answers at once. The bare outbox polls again as soon as it has an answer.
        """
        self._incarnation = 1
        self._told_incarnation = 0
        self._body = b""
        self._changed = asyncio.Event()
        self._poll_waits = asyncio.Event()
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._set_body([])

    def tell(self, events: Sequence[dict[str, Any]]) -> int:
        """Show these events from now on. Return the time of the change in nanoseconds."""
        self._incarnation += 1
        self._set_body(events)
        told_at = time.monotonic_ns()
        self._changed.set()
        return told_at

    async def poll_waits(self) -> None:
        """Wait until a poll waits for a change: everything told before has been read."""
        async with asyncio.timeout(READY_TIMEOUT):
            await self._poll_waits.wait()

    def _set_body(self, events: Sequence[dict[str, Any]]) -> None:
        self._body = orjson.dumps({"DocumentIncarnation": self._incarnation, "Events": events})

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  # the server made one
        self._connections[task] = writer
        task.add_done_callback(self._connections.pop)
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = _INSTANCE if b"/metadata/instance" in head else await self._document()
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(body) + body
                )

    async def close(self) -> None:
        tasks = set(self._connections)
        for writer in self._connections.values():
            writer.transport.abort()
        self._changed.set()
        if tasks:
            await asyncio.wait(tasks)

    async def _document(self) -> bytes:
        if self.answers_after is not None:
            await asyncio.sleep(self.answers_after)
        elif self._told_incarnation == self._incarnation:
            self._changed.clear()
            self._poll_waits.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), MAX_HOLD)
            self._poll_waits.clear()
        self._told_incarnation = self._incarnation
        return self._body


@asynccontextmanager
async def metadata_endpoint() -> AsyncIterator[MetadataEndpoint]:
    endpoint = MetadataEndpoint()
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    endpoint.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield endpoint
    finally:
        server.close()
        await endpoint.close()
