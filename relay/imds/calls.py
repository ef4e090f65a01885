"""Makes one HTTP call to the metadata service, and says when the next may follow.

`ImdsClient` decides which calls there are. All of them share one `CallBudget`. A call is sent once
or not at all, never after its deadline, and its answer is bounded. Each failure is a SourceError.
Nothing is repeated here: the poller and the reader of instance metadata call again after
`retry_delay`. Sources: the events page and the IMDS page (docs/protocol.md#imds-scheduled-events).
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from types import SimpleNamespace
from typing import Self

import aiohttp
from aiohttp.connector import AddrInfoType

from relay import __version__
from relay.clock import Clock
from relay.errors import (
    DocumentError,
    DocumentTooLarge,
    SourceCallNotSentInTime,
    SourceError,
    SourceRefused,
    SourceUnavailable,
)
from relay.events.timestamps import parse_timestamp
from relay.net import exponential_backoff
from relay.net.http import measure_clock_skew, parse_retry_after

MAX_CALLS = 2
"""Calls in one window. Azure allows five a second for each VM, shared by all its programs.

See docs/protocol.md#five-calls-a-second.
"""
CALL_WINDOW = 1.05
"""Seconds: one second, and a margin for the clock of the service and for the network."""
MAX_BACKOFF = 5.0
"""Seconds before jitter. It is short because a Preempt can give ten seconds of notice.

See docs/protocol.md#notice.
"""
MAX_RETRY_AFTER = 60.0
"""Seconds: a longer Retry-After is cut to this."""
MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
"""A larger response is refused."""
MAX_ERROR_BYTES = 200
"""This much of the body of a 400 goes into the error."""
ERROR_BODY_TIMEOUT = 1.0
"""Seconds to wait for the body of a 400."""
_TOO_LATE = "the deadline of the call passed before it was sent"
_HEADERS = {
    "Metadata": "true",
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "User-Agent": f"imds-relay/{__version__}",
}


class CallBudget:
    """Allows at most `MAX_CALLS` calls in any `CALL_WINDOW`. A call counts from when it was sent.

    Each of so many places is a moment from which on it may be used. Who has the place of a call
    keeps it until the call is sent, which can take long, or until it is certain that it is not.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._places: asyncio.PriorityQueue[float] = asyncio.PriorityQueue()
        for _ in range(MAX_CALLS):
            self._places.put_nowait(-math.inf)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Callable[[float], None]]:
        """Wait for a place, in order of arrival. Tell the result when the call was sent."""
        free_at = await self._places.get()
        sent_at: float | None = None

        def mark_sent(moment: float) -> None:
            nonlocal sent_at
            sent_at = moment
            self._places.put_nowait(moment + CALL_WINDOW)

        try:
            while (delay := free_at - self._clock.monotonic()) > 0:
                await self._clock.sleep(delay)
            yield mark_sent
        finally:
            if sent_at is None:
                self._places.put_nowait(free_at)


def retry_delay(failures: int, retry_after: float | None, interval: float, jitter: float) -> float:
    """Return the seconds to wait after this many failed calls in a row.

    The pause starts at ``interval`` and doubles up to `MAX_BACKOFF`, or stays at a longer interval.
    ``jitter`` (0 to 1) adds up to a quarter. ``retry_after`` (seconds, from the service) can only
    lengthen the pause, up to `MAX_RETRY_AFTER`.
    """
    backoff = exponential_backoff(failures, first=interval, maximum=max(interval, MAX_BACKOFF))
    return max(backoff, min(retry_after or 0.0, MAX_RETRY_AFTER)) + jitter * backoff / 4


_DISCARD_UNSENT = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
"""SO_LINGER with no seconds: a close discards what the kernel has not sent yet."""


@dataclass(frozen=True, slots=True)
class DatedBody:
    """The body of a response, and what it says about the time.

    ``date`` is the service's time in whole seconds, from the header ``Date``; None without a
    readable one. The service wrote it after ``asked_at``, our wall clock, and ``asked_monotonic``,
    our monotonic clock: the moment before the request was sent.
    """

    body: bytes
    date: datetime | None
    asked_at: datetime
    asked_monotonic: float


@dataclass(slots=True, kw_only=True)
class Call:
    """One call: the request, and what became of it."""

    origin: str
    """The URL of the service, without a path."""
    path: str
    query: Mapping[str, str]
    timeout: float
    """Seconds from when the call may be made until the whole answer is there."""
    connect_timeout: float | None = None
    """Seconds for the connection; None: there is only the timeout of the whole call."""
    body: bytes | None = None
    """The JSON of a POST; None: this is a GET."""
    seconds_left: Callable[[], float] | None = None
    """Returns how long the call may still be sent; None: there is no deadline.

    It is asked directly before the first byte is written. The call ends when that time is over, and
    nothing of it is sent later: the connection is dropped with what the kernel has not sent yet.
    """
    mark_sent: Callable[[float], None] = field(init=False)
    sent: tuple[datetime, float] | None = field(default=None, init=False)
    """The moment directly before its headers were written, by both clocks; None: they were not."""


class ImdsSession:
    """An async context manager over one HTTP session, whose calls share one `CallBudget`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._budget = CallBudget(clock)
        self._session: aiohttp.ClientSession | None = None
        self.clock_skew: float | None = None
        """Seconds that the service's clock is certainly ahead of ours; None if it is not known."""

    async def __aenter__(self) -> Self:
        tracing = aiohttp.TraceConfig()
        tracing.on_request_headers_sent.append(self._before_write)
        tracing.on_request_chunk_sent.append(self._before_write)
        self._session = aiohttp.ClientSession(
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,  # no proxies: docs/protocol.md#no-proxies
            trace_configs=[tracing],
            connector=aiohttp.TCPConnector(socket_factory=_make_abortive_socket),
            middlewares=(_send_once,),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def send(self, call: Call) -> DatedBody:
        """Make the call, and return the body of the answer; of the answer to a POST nothing.

        Waits until it may call, in order of arrival. Raises SourceCallNotSentInTime if the deadline
        passed and nothing was sent, SourceRefused for a 400, DocumentTooLarge for a body over
        `MAX_DOCUMENT_BYTES`, DocumentError for one with a Content-Encoding, and SourceUnavailable
        if a later call may work.
        """
        left = None if call.seconds_left is None else max(0.0, call.seconds_left())
        try:
            # The timeout covers the wait for a place in the budget too.
            async with asyncio.timeout(left), self._budget.place() as call.mark_sent:
                return await self._send(call)
        except TimeoutError:
            if call.sent is None:
                raise SourceCallNotSentInTime(_TOO_LATE) from None
            raise SourceUnavailable(
                f"expected an answer from {call.origin} before the deadline of the call"
            ) from None

    async def _send(self, call: Call) -> DatedBody:
        if self._session is None:
            raise RuntimeError("expected ImdsClient to be entered (async with) before it is called")
        is_post = call.body is not None
        began = self._clock.now()
        try:
            async with (
                asyncio.timeout(call.timeout),
                self._session.request(
                    "POST" if is_post else "GET",
                    f"{call.origin}{call.path}",
                    params=call.query,
                    data=call.body,
                    headers={"Content-Type": "application/json"} if is_post else {},
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=call.connect_timeout),
                    trace_request_ctx=call,
                ) as response,
            ):
                now = self._clock.now()
                date = response.headers.get("Date")
                self.clock_skew = measure_clock_skew(
                    date, now, elapsed=(now - began).total_seconds()
                )
                if response.status != 200:
                    raise await self._error_from_response(response)
                body = b"" if is_post else await _read_body(response)
                asked_at, asked_monotonic = call.sent or (began, self._clock.monotonic())
                return DatedBody(body, parse_timestamp(date), asked_at, asked_monotonic)
        except aiohttp.ConnectionTimeoutError as error:
            raise SourceUnavailable(
                f"expected a connection to {call.origin} within {call.connect_timeout:g}s"
            ) from error
        except TimeoutError as error:
            raise SourceUnavailable(
                f"expected a complete answer from {call.origin} within {call.timeout:g}s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error.__cause__, SourceCallNotSentInTime):  # raised in `_before_write`
                raise SourceCallNotSentInTime(_TOO_LATE) from None
            raise _unavailable_error(error) from error

    async def _before_write(
        self, _session: aiohttp.ClientSession, context: SimpleNamespace, _params: object
    ) -> None:
        """Check the time. aiohttp writes headers and body together, after it said so of both.

        A process can be stopped between the two: aiohttp writes the body in another task.
        """
        call: Call = context.trace_request_ctx
        if call.seconds_left is not None and call.seconds_left() <= 0:
            raise SourceCallNotSentInTime(_TOO_LATE)
        if call.sent is None:
            call.sent = self._clock.now(), self._clock.monotonic()
            call.mark_sent(call.sent[1])

    async def _error_from_response(self, response: aiohttp.ClientResponse) -> SourceError:
        status = response.status
        if status == 400:
            text = b""
            with suppress(TimeoutError, aiohttp.ClientError):  # must not hide the 400
                async with asyncio.timeout(ERROR_BODY_TIMEOUT):
                    text = await response.content.read(MAX_ERROR_BYTES)
            return SourceRefused(
                "expected 200, got 400: the header, api-version or body of the request is wrong; "
                f"the answer says {text.decode('utf-8', 'replace').strip()!r}",
                status=400,
            )
        if 300 <= status < 400:
            # The query of the target may hold a secret.
            target = response.headers.get("Location", "nowhere").partition("?")[0][:200]
            return SourceUnavailable(
                f"expected 200, got {status}: a redirect to {target}, which is never followed",
                status=status,
            )
        retry_after = parse_retry_after(
            response.headers.get("Retry-After"), self._clock.now(), maximum=MAX_RETRY_AFTER
        )
        status_line = f"{status} {response.reason or ''}".rstrip()
        return SourceUnavailable(
            f"expected 200, got {status_line}", status=status, retry_after=retry_after
        )


def _make_abortive_socket(info: AddrInfoType) -> socket.socket:
    """Return a socket that sends nothing after it was closed.

    A call that is given up must not reach the service later. Without this, the kernel would go on
    sending what a service that did not read has not confirmed.
    """
    family, kind, protocol, _, _ = info
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DISCARD_UNSENT)
    return made


async def _send_once(
    request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    # aiohttp sends a GET again when a kept-alive connection breaks. The budget would not know of
    # that call, so turn the error into one that aiohttp does not retry.
    try:
        return await send(request)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise _unavailable_error(error) from error


def _unavailable_error(error: Exception) -> SourceUnavailable:
    return SourceUnavailable(f"expected an answer, got {type(error).__name__}: {error}")


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise DocumentError(
            f"expected an answer without Content-Encoding, got {encoding[:50]!r}", status=200
        )
    # To leave a response before its end closes the connection.
    body = bytearray()
    if (response.content_length or 0) <= MAX_DOCUMENT_BYTES:
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > MAX_DOCUMENT_BYTES:
                break
        else:
            return bytes(body)
    raise DocumentTooLarge(
        f"expected an answer of at most {MAX_DOCUMENT_BYTES} bytes (4 MiB), got a larger one",
        status=200,
    )
