"""The calls of the relay to the metadata service, and the search for the service.

The poller reads the document of events, the `StartRequestPort` sends StartRequests, and the start
of the relay reads instance metadata, all with one `ImdsClient`. A call is sent once or not at all,
never after its deadline, and its answer is bounded. Each failure is a SourceError. With
``source.url: discover`` the client also finds out where the service is, with the candidates of
`relay.imds.discover`. Sources: the events page and the IMDS page
(docs/protocol.md#imds-scheduled-events).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import struct
import sys
from collections.abc import Callable
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
from relay.imds import DISCOVER, SourceSettings
from relay.imds.calls import MAX_RETRY_AFTER, CallBudget
from relay.imds.discover import VIRTUAL_NETWORK, Candidate, CandidateFinder
from relay.imds.document import parse_document
from relay.ingest import DatedRead
from relay.net.egress import discovered_imds
from relay.net.http import measure_clock_skew, parse_retry_after

CONNECT_TIMEOUT = 5.0
"""Seconds to connect to a place where the service may be."""
SEARCH_AFTER = 15.0
"""Seconds without a usable answer after which a service that was found is searched again."""
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
_DISCARD_UNSENT = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
"""SO_LINGER with no seconds: a close discards what the kernel has not sent yet."""

_log = logging.getLogger(__name__)


class ImdsClient:
    """An async context manager over one HTTP session. Its calls may overlap, and share a budget.

    Every method waits until it may call, in order of arrival. The timeout of the settings covers
    the whole call after that. Every method raises SourceRefused for a 400, DocumentTooLarge for a
    body over `MAX_DOCUMENT_BYTES`, DocumentError for one with a Content-Encoding, and
    SourceUnavailable if a later call may work.

    With ``source.url: discover`` the first read searches the service: the first candidate of
    ``finder`` that answers with a document. It is searched again after `SEARCH_AFTER` seconds
    without a usable answer. While it is known, no sink can connect to its address.
    """

    def __init__(
        self, settings: SourceSettings, clock: Clock, finder: CandidateFinder | None = None
    ) -> None:
        self.clock_skew: float | None = None
        """Seconds that the service's clock is certainly ahead of ours; None if it is not known."""
        self._settings = settings
        self._clock = clock
        self._budget = CallBudget(clock)
        self._session: aiohttp.ClientSession
        self._finder = finder or CandidateFinder(clock) if settings.url == DISCOVER else None
        self._found: Candidate | None = None
        self._failing_since = math.inf  # monotonic
        self._has_answered = False

    def use_source_settings(self, settings: SourceSettings) -> None:
        self._settings = settings

    async def __aenter__(self) -> Self:
        tracing = aiohttp.TraceConfig()
        tracing.on_request_headers_sent.append(_before_write)
        tracing.on_request_chunk_sent.append(_before_write)
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
        self._use_candidate_endpoint(None)
        await self._session.close()

    @property
    def base_url(self) -> str | None:
        if self._finder is None:
            return self._settings.url
        return self._found.base_url if self._found is not None else None

    @property
    def is_outside_virtual_network(self) -> bool:
        """Whether the service was found at another address than that in a virtual network."""
        return self._found is not None and self._found.address != VIRTUAL_NETWORK

    async def read_document(self) -> DatedRead[bytes]:
        """Return the body of the Scheduled Events document with the service's time."""
        if self._finder is None:
            return await self._read_from(self._settings.url)
        failing = self._clock.monotonic() - self._failing_since
        if self._found is None or failing >= SEARCH_AFTER:
            return await self._search(self._finder)
        try:
            read = await self._read_from(self._found.base_url)
            parse_document(read.content)  # another service may answer at that address by now
        except SourceError as error:
            if error.status != 429:  # it works, others poll too
                self._failing_since = min(self._failing_since, self._clock.monotonic())
            raise
        self._failing_since = math.inf
        return read

    async def _search(self, finder: CandidateFinder) -> DatedRead[bytes]:
        """Use the first candidate that has a document. Raises SourceUnavailable if none has."""
        problems = []
        async with contextlib.aclosing(finder.candidates()) as candidates:
            async for candidate in candidates:
                try:
                    read = await self._read_from(candidate.base_url, CONNECT_TIMEOUT)
                    parse_document(read.content)
                except SourceError as error:
                    problems.append(f"{candidate.base_url} ({candidate.reason}): {error.reason}")
                    continue
                self._use_candidate_endpoint(candidate)
                return read
        self._failing_since = self._clock.monotonic()
        raise SourceUnavailable(
            f"found no metadata service: {'; '.join([*problems, *finder.problems])}"
        )

    def _use_candidate_endpoint(self, candidate: Candidate | None) -> None:
        self._failing_since = math.inf
        if candidate == self._found:
            return
        if self._found is not None:
            discovered_imds.discard(self._found.address)
        if candidate is not None:
            discovered_imds.add(candidate.address)
            _log.info("the metadata service is at %s, %s", candidate.base_url, candidate.reason)
        self._found = candidate

    async def _read_from(
        self, origin: str, connect_timeout: float | None = None
    ) -> DatedRead[bytes]:
        # The first call can take two minutes: docs/protocol.md#the-first-call
        seconds = self._settings.timeout if self._has_answered else self._settings.first_timeout
        read = await self._call(origin, self._events_path, seconds, connect_timeout=connect_timeout)
        self._has_answered = True
        return read

    @property
    def _events_path(self) -> str:
        return f"/metadata/scheduledevents?api-version={self._settings.api_version}"

    async def send_start_request(
        self, event_id: str, *, seconds_left: Callable[[], float] | None = None
    ) -> None:
        """Ask Azure to start an event now. Return when it answered 200.

        The EventId is sent in the case in which it is given. Azure answers 200 for every valid one
        (docs/protocol.md#startrequests). ``seconds_left`` returns how long the call may still be
        sent: the call ends when that time is over, and nothing of it is sent later. Raises
        SourceCallNotSentInTime if nothing was sent.
        """
        if self.base_url is None:
            raise SourceUnavailable("expected a metadata service, none is found yet")
        await self._call(
            self.base_url,
            self._events_path,
            self._settings.timeout,
            content={"StartRequests": [{"EventId": event_id}]},
            seconds_left=seconds_left,
        )

    async def read_instance_metadata_body(self) -> bytes:
        if self._finder is not None and self._found is None:
            await self._search(self._finder)
        path = "/metadata/instance?api-version=2021-02-01&format=json"
        origin = self.base_url or self._settings.url
        return (await self._call(origin, path, self._settings.timeout)).content

    async def _call(
        self,
        origin: str,
        path: str,
        seconds: float,
        *,
        connect_timeout: float | None = None,
        content: object = None,
        seconds_left: Callable[[], float] | None = None,
    ) -> DatedRead[bytes]:
        """Make one call, and return the body of the answer; of the answer to a POST nothing.

        ``seconds`` are from when the call may be made until the whole answer is there. With
        ``content`` it is a POST of this JSON.
        """
        sent: list[tuple[datetime, float]] = []  # when, by both clocks; empty: it is not

        def before_write() -> None:
            if seconds_left is not None and seconds_left() <= 0:
                raise SourceCallNotSentInTime(_TOO_LATE)
            if not sent:
                sent.append((self._clock.now(), self._clock.monotonic()))
                mark_sent(sent[0][1])

        # It covers the wait for a place in the budget, too.
        deadline = asyncio.timeout(None if seconds_left is None else max(0.0, seconds_left()))
        try:
            async with (
                deadline,
                self._budget.place() as mark_sent,
                asyncio.timeout(seconds),
                self._session.request(
                    "GET" if content is None else "POST",
                    f"{origin}{path}",
                    json=content,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout),
                    trace_request_ctx=before_write,
                ) as response,
            ):
                now, date = self._clock.now(), response.headers.get("Date")
                elapsed = (now - sent[0][0]).total_seconds()
                self.clock_skew = measure_clock_skew(date, now, elapsed=elapsed)
                body = await _read_answer(response, now)
                return DatedRead(body, parse_timestamp(date), *sent[0])
        except aiohttp.ConnectionTimeoutError as error:
            reason = f"expected a connection to {origin} within {connect_timeout:g}s"
            raise SourceUnavailable(reason) from error
        except TimeoutError as error:
            if not deadline.expired():
                reason = f"expected a complete answer from {origin} within {seconds:g}s"
                raise SourceUnavailable(reason) from error
            if not sent:
                raise SourceCallNotSentInTime(_TOO_LATE) from None
            reason = f"expected an answer from {origin} before the deadline of the call"
            raise SourceUnavailable(reason) from None
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error.__cause__, SourceCallNotSentInTime):  # raised in `before_write`
                raise SourceCallNotSentInTime(_TOO_LATE) from None
            raise _unavailable_error(error) from error


async def _before_write(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _params: object
) -> None:
    """Check the time. aiohttp writes headers and body together, after it said so of both.

    A process can be stopped between the two: aiohttp writes the body in another task.
    """
    context.trace_request_ctx()


async def _error_from_response(response: aiohttp.ClientResponse, now: datetime) -> SourceError:
    status = response.status
    if status == 400:
        text = b""
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):  # must not hide the 400
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
    return SourceUnavailable(
        f"expected 200, got {status} {response.reason or ''}".rstrip(),
        status=status,
        retry_after=parse_retry_after(
            response.headers.get("Retry-After"), now, maximum=MAX_RETRY_AFTER
        ),
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


async def _read_answer(response: aiohttp.ClientResponse, now: datetime) -> bytes:
    if response.status != 200:
        raise await _error_from_response(response, now)
    if response.method == "POST":
        return b""
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
