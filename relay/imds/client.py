"""Makes HTTP calls to the metadata service: the document, a StartRequest, and instance metadata.

Sources: the events page and the IMDS page (docs/protocol.md#imds-scheduled-events). All calls share
a budget. The client does not repeat a call: the poller decides when to call again, with
`retry_delay`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import SimpleNamespace
from typing import Self

import aiohttp
import orjson
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
from relay.imds import DISCOVER, SourceSettings
from relay.imds.document import DocumentReader, parse_document
from relay.imds.endpoint import VIRTUAL_NETWORK, Candidate, CandidateFinder
from relay.net.backoff import exponential_backoff
from relay.net.egress import start_refusing_imds_address, stop_refusing_imds_address
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
CONNECT_TIMEOUT = 5.0
"""Seconds to connect to a place where the service may be."""
SEARCH_AFTER = 15.0
"""Seconds without a usable answer after which a service that was found is searched again."""

_EVENTS_PATH = "/metadata/scheduledevents"
_INSTANCE_PATH = "/metadata/instance"
_INSTANCE_QUERY = {"api-version": "2021-02-01", "format": "json"}
_HEADERS = {
    "Metadata": "true",
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "User-Agent": f"imds-relay/{__version__}",
}

_log = logging.getLogger(__name__)


class CallRateLimiter:
    """Allows at most `MAX_CALLS` calls in any `CALL_WINDOW`. A call counts from when it was sent.

    A caller reserves a place before it connects, which can take long. Then it calls `mark_sent` or
    `release`, once.
    """

    def __init__(self) -> None:
        self._reserved = 0
        self._sent: deque[float] = deque(maxlen=MAX_CALLS)

    def delay(self, now: float) -> float | None:
        """Return the seconds until a place is free; None if calls not yet sent hold every place."""
        recent = [moment for moment in self._sent if now < moment + CALL_WINDOW]
        if self._reserved + len(recent) < MAX_CALLS:
            return 0.0
        return recent[0] + CALL_WINDOW - now if recent else None

    def reserve_call(self) -> None:
        """Take a place. Call this only directly after `delay` returned 0."""
        self._reserved += 1

    def mark_sent(self, now: float) -> None:
        """The call that holds a place is being sent."""
        self._reserved -= 1
        self._sent.append(now)

    def release(self) -> None:
        """The call that holds a place was never sent."""
        self._reserved -= 1


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


@dataclass(slots=True)
class _Call:
    """One call in flight. The moments are those directly before its headers were written."""

    origin: str
    """The URL of the service, without a path."""
    sent_at: datetime
    sent_monotonic: float
    sent: bool = False
    """Whether its headers were written."""
    seconds_left: Callable[[], float] | None = None
    """How long it may still be sent; None: there is no limit."""
    date: datetime | None = None
    """The ``Date`` of the response."""
    connect_timeout: float | None = None
    """Seconds for the connection; None: there is only the timeout of the whole call."""

    @property
    def is_too_late(self) -> bool:
        """Whether it may not be sent any more."""
        return self.seconds_left is not None and self.seconds_left() <= 0


class ImdsClient:
    """An async context manager over one HTTP session.

    Calls may overlap and share one `CallRateLimiter`. Every method waits until it may call, in
    order of arrival. The timeout covers the whole call after that. Every method raises
    SourceRefused for a 400, DocumentError for an unusable body, and SourceUnavailable if a later
    call may work.

    With ``source.url: discover`` the first read searches the service: the first candidate of
    ``finder`` that answers with a document. It is searched again after `SEARCH_AFTER` seconds
    without a usable answer. While it is known, no sink can connect to its address.
    """

    def __init__(
        self, settings: SourceSettings, clock: Clock, finder: CandidateFinder | None = None
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._finder = finder or CandidateFinder(clock) if settings.url == DISCOVER else None
        self._found: Candidate | None = None
        self._searching = asyncio.Lock()
        self._failing_since: float | None = None  # monotonic
        self._usable_body: bytes | None = None  # the last that was a document
        self._budget = CallRateLimiter()
        self._arrivals = asyncio.Lock()
        self._budget_changed = asyncio.Event()
        self._has_answered = False
        self._session: aiohttp.ClientSession | None = None
        self.clock_skew: float | None = None
        """Seconds that the service's clock is certainly ahead of ours; None if it is not known."""

    def use_source_settings(self, settings: SourceSettings) -> None:
        """Take the timeouts from these settings from now on. The URL must be the same."""
        self._settings = settings

    async def __aenter__(self) -> Self:
        tracing = aiohttp.TraceConfig()
        tracing.on_request_headers_sent.append(self._on_headers_sent)
        tracing.on_request_chunk_sent.append(_check_deadline_before_sending_body)
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
        self._use_candidate(None)
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def base_url(self) -> str | None:
        """The URL of the service without a path; None if it is not found yet."""
        if self._finder is None:
            return self._settings.url
        return self._found.base_url if self._found is not None else None

    @property
    def is_outside_virtual_network(self) -> bool:
        """Whether the service was found at another address than that in a virtual network."""
        return self._found is not None and self._found.address != VIRTUAL_NETWORK

    async def read_document(self) -> bytes:
        """Return the body of the Scheduled Events document; see `read_dated_document`."""
        return (await self.read_dated_document()).body

    async def read_dated_document(self) -> DatedBody:
        """Return the body of the Scheduled Events document with the service's time.

        Raises DocumentTooLarge for a body over `MAX_DOCUMENT_BYTES`, and DocumentError for one
        with a Content-Encoding.
        """
        if self._finder is None:
            return await self._read_document_at(self._settings.url)
        if self._found is None or self._must_search_again:
            return await self._search(self._finder)
        try:
            read = await self._read_document_at(self._found.base_url)
            if read.body != self._usable_body:  # another service may answer there by now
                await DocumentReader().parse_body(read.body)
        except SourceError as error:
            if self._failing_since is None and error.status != 429:  # it works, others poll too
                self._failing_since = self._clock.monotonic()
            raise
        self._failing_since, self._usable_body = None, read.body
        return read

    @property
    def _must_search_again(self) -> bool:
        if self._failing_since is None:
            return False
        return self._clock.monotonic() - self._failing_since >= SEARCH_AFTER

    async def _search(self, finder: CandidateFinder) -> DatedBody:
        """Read the document from the first candidate that has it, and call that from now on.

        Raises SourceUnavailable if none has it. What was found before then stays.
        """
        async with self._searching:
            problems = []
            async with contextlib.aclosing(finder.find_candidates()) as candidates:
                async for candidate in candidates:
                    try:
                        read = await self._read_document_at(candidate.base_url, CONNECT_TIMEOUT)
                        parse_document(read.body)
                    except SourceError as error:
                        problems.append(
                            f"{candidate.base_url} ({candidate.reason}): {error.reason}"
                        )
                        continue
                    self._use_candidate(candidate)
                    return read
            self._failing_since = self._clock.monotonic()
        raise SourceUnavailable(
            f"found no metadata service: {'; '.join([*problems, *finder.problems])}"
        )

    def _use_candidate(self, candidate: Candidate | None) -> None:
        """Call this candidate from now on; None: none."""
        self._failing_since = None
        if candidate == self._found:
            return
        if self._found is not None:
            stop_refusing_imds_address(self._found.address)
        if candidate is not None:
            start_refusing_imds_address(candidate.address)
            _log.info("the metadata service is at %s, %s", candidate.base_url, candidate.reason)
        self._found = candidate

    async def _read_document_at(
        self, origin: str, connect_timeout: float | None = None
    ) -> DatedBody:
        # The first call can take two minutes: docs/protocol.md#the-first-call
        timeout = self._settings.timeout if self._has_answered else self._settings.first_timeout
        call = self._new_call(origin)
        call.connect_timeout = connect_timeout
        body = await self._call("GET", _EVENTS_PATH, self._events_query, timeout, call)
        self._has_answered = True
        return DatedBody(body, call.date, call.sent_at, call.sent_monotonic)

    async def send_start_request(
        self, event_ids: Sequence[str], *, seconds_left: Callable[[], float] | None = None
    ) -> None:
        """Ask Azure to start these events now. Return when it answered 200.

        The EventIds are sent in the case in which they are given. Azure answers 200 for every valid
        EventId (docs/protocol.md#startrequests).

        ``seconds_left`` returns how long the request may still be sent. It is asked directly before
        the first byte is written. The call ends when that time is over, and nothing of it is sent
        later: the connection is dropped with what the kernel has not sent yet. Raises
        SourceCallNotSentInTime if nothing was sent.
        """
        body = orjson.dumps({"StartRequests": [{"EventId": event_id} for event_id in event_ids]})
        timeout = self._settings.timeout
        if self.base_url is None:
            raise SourceUnavailable("expected a metadata service, none is found yet")
        call = self._new_call(self.base_url, seconds_left)
        if seconds_left is None:
            await self._call("POST", _EVENTS_PATH, self._events_query, timeout, call, body)
            return
        # This timeout covers the wait for a place in the budget too.
        try:
            async with asyncio.timeout(max(0.0, seconds_left())):
                await self._call("POST", _EVENTS_PATH, self._events_query, timeout, call, body)
        except TimeoutError:
            if not call.sent:
                raise _deadline_passed_error() from None
            raise SourceUnavailable(
                f"expected an answer from {call.origin} before the deadline of the call"
            ) from None

    async def read_instance(self) -> bytes:
        """Return the body of instance metadata. Raises DocumentError as `read_document` does."""
        if self._finder is not None and self._found is None:
            await self._search(self._finder)
        call = self._new_call(self.base_url or self._settings.url)
        timeout = self._settings.timeout
        return await self._call("GET", _INSTANCE_PATH, _INSTANCE_QUERY, timeout, call)

    @property
    def _events_query(self) -> Mapping[str, str]:
        return {"api-version": self._settings.api_version}

    def _new_call(self, origin: str, seconds_left: Callable[[], float] | None = None) -> _Call:
        now, monotonic = self._clock.now(), self._clock.monotonic()
        return _Call(origin, now, monotonic, seconds_left=seconds_left)

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        timeout: float,  # noqa: ASYNC109  # it covers more than one await
        call: _Call,
        body: bytes | None = None,
    ) -> bytes:
        if self._session is None:
            raise RuntimeError("expected ImdsClient to be entered (async with) before it is called")
        headers = {"Content-Type": "application/json"} if body is not None else {}
        await self._reserve_call()
        began = self._clock.now()
        try:
            async with (
                asyncio.timeout(timeout),
                self._session.request(
                    method,
                    f"{call.origin}{path}",
                    params=query,
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=call.connect_timeout),
                    trace_request_ctx=call,
                ) as response,
            ):
                now = self._clock.now()
                self.clock_skew = measure_clock_skew(
                    response.headers.get("Date"), now, elapsed=(now - began).total_seconds()
                )
                call.date = parse_timestamp(response.headers.get("Date"))
                if response.status != 200:
                    raise await self._error_from_response(response)
                return await _read_body(response) if method == "GET" else b""
        except aiohttp.ConnectionTimeoutError as error:
            raise SourceUnavailable(
                f"expected a connection to {call.origin} within {call.connect_timeout:g}s"
            ) from error
        except TimeoutError as error:
            raise SourceUnavailable(
                f"expected a complete answer from {call.origin} within {timeout:g}s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(
                error.__cause__, SourceCallNotSentInTime
            ):  # raised in `_check_deadline_before_sending_body`
                raise _deadline_passed_error() from None
            raise _unavailable_error(error) from error
        finally:
            if not call.sent:
                self._budget.release()
                self._budget_changed.set()

    async def _reserve_call(self) -> None:
        async with self._arrivals:  # first come, first served
            while (delay := self._budget.delay(self._clock.monotonic())) != 0:
                if delay is None:
                    self._budget_changed.clear()
                    await self._budget_changed.wait()
                else:
                    await self._clock.sleep(delay)
            self._budget.reserve_call()

    async def _on_headers_sent(
        self,
        _session: aiohttp.ClientSession,
        context: SimpleNamespace,
        _: aiohttp.TraceRequestHeadersSentParams,
    ) -> None:
        call: _Call = context.trace_request_ctx
        if call.is_too_late:
            raise _deadline_passed_error()
        call.sent = True
        call.sent_at, call.sent_monotonic = self._clock.now(), self._clock.monotonic()
        self._budget.mark_sent(call.sent_monotonic)
        self._budget_changed.set()

    async def _error_from_response(self, response: aiohttp.ClientResponse) -> SourceError:
        status = response.status
        if status == 400:
            text = await _read_error_text(response)
            return SourceRefused(
                "expected 200, got 400: the header, api-version or body of the request is wrong; "
                f"the answer says {text!r}",
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


async def _check_deadline_before_sending_body(
    _session: aiohttp.ClientSession,
    context: SimpleNamespace,
    _: aiohttp.TraceRequestChunkSentParams,
) -> None:
    """Check the time again. aiohttp writes headers and body together, after this call.

    A process can be stopped between the check of the headers and this one: aiohttp writes the body
    in another task.
    """
    call: _Call = context.trace_request_ctx
    if call.is_too_late:
        raise _deadline_passed_error()


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


def _deadline_passed_error() -> SourceCallNotSentInTime:
    return SourceCallNotSentInTime("the deadline of the call passed before it was sent")


def _unavailable_error(error: Exception) -> SourceUnavailable:
    return SourceUnavailable(f"expected an answer, got {type(error).__name__}: {error}")


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise DocumentError(
            f"expected an answer without Content-Encoding, got {encoding[:50]!r}", status=200
        )
    too_large = DocumentTooLarge(
        f"expected an answer of at most {MAX_DOCUMENT_BYTES} bytes (4 MiB), got a larger one",
        status=200,
    )
    # To leave a response before its end closes the connection.
    if (response.content_length or 0) > MAX_DOCUMENT_BYTES:
        raise too_large
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_DOCUMENT_BYTES:
            raise too_large
    return bytes(body)


async def _read_error_text(response: aiohttp.ClientResponse) -> str:
    # A body that does not come must not hide the 400.
    try:
        async with asyncio.timeout(ERROR_BODY_TIMEOUT):
            text = await response.content.read(MAX_ERROR_BYTES)
    except (TimeoutError, aiohttp.ClientError):
        return ""
    return text.decode("utf-8", "replace").strip()
