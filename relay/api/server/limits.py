"""Limits that protect the server from slow, broken and hostile callers. Times are in seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from relay.api.schema.responses import Problem

MAX_BODY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The limits of one server. Tests set lower ones."""

    max_connections: int = 256
    """Open connections over TCP."""
    max_local_connections: int = 64
    """Open connections on the local socket."""
    handshake_timeout: float = 5.0
    """Time for a TLS handshake."""
    idle_timeout: float = 15.0
    """Time that a connection may be idle, and time for the head of a request."""
    body_timeout: float = 10.0
    """Time for the body of a request."""
    linger_timeout: float = 1.0
    """Time for reading the rest of a refused body."""
    send_timeout: float = 15.0
    """Time in which a caller must receive its response."""
    max_large_answers: int = 32
    """Pages that are built or sent at once."""
    max_large_answers_of_caller: int = 4
    """Of them, pages of one caller."""
    max_long_reads: int = 4
    """Pages and batches of streams that the thread of the store reads between two writes."""
    max_streams: int = 64
    """Open event streams."""
    max_streams_per_principal: int = 8
    """Open event streams of one principal."""
    stream_keep_alive_interval: float = 15.0
    """Silence after which a stream sends a comment, so that proxies keep the connection."""
    stream_send_timeout: float = 10.0
    """Time in which the reader of a stream must make room for more."""


class LargeAnswerLimiter:
    """Bounds how many large answers are built or sent at once: slow readers hold few of them.

    Each answer is a page of bounded size. A problem is small, so it holds no slot while it is sent.
    """

    def __init__(self, total: int, per_caller: int, timeout: float) -> None:
        """``timeout``: the seconds that a call waits for a slot."""
        self._free = asyncio.Semaphore(total)
        self._per_caller = per_caller
        self._timeout = timeout
        self._by_caller: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def slot(self, caller: str) -> AsyncIterator[None]:
        """Hold a slot while the context lasts. Raises Problem 429 if none becomes free in time."""
        own = self._by_caller.get(caller)
        if own is None:
            own = self._by_caller[caller] = asyncio.Semaphore(self._per_caller)
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._timeout):
                    await stack.enter_async_context(own)
                    await stack.enter_async_context(self._free)
            except TimeoutError:
                raise Problem(
                    429,
                    "too many answers are being read at once; read them faster, or one by one",
                    headers={"Retry-After": "1"},
                ) from None
            yield
