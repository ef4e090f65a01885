"""Calls to Azure's metadata service: the document, a StartRequest, and what the service knows of this VM.

Source: Microsoft, "Azure Metadata Service: Scheduled Events" and "Azure Instance Metadata Service". What those pages leave
out (statuses, proxies, redirects, slow first call) is in the tests.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import SimpleNamespace, TracebackType
from typing import Self

import aiohttp
import orjson

from relay import __version__
from relay.clock import Clock
from relay.errors import DocumentError, SourceError, SourceRefused, SourceUnavailable
from relay.events.model import MAX_DOCUMENT_BYTES
from relay.events.timestamps import parse_timestamp
from relay.imds import SourceSettings
from relay.imds.rate_limit import MAX_RETRY_AFTER, CallBudget

_EVENTS = "/metadata/scheduledevents"
_INSTANCE = "/metadata/instance"
_INSTANCE_QUERY = {"api-version": "2021-02-01", "format": "json"}
_HEADERS = {
    "Metadata": "true",
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "User-Agent": f"imds-relay/{__version__}",
}


@dataclass(slots=True)
class _Call:
    """One call under way; ``sent`` once its headers went out."""

    sent: bool = False


class ImdsClient:
    """An async context manager over one session. Calls may overlap; the budget of calls is kept for all of them together.

    Every method waits for its place in the budget, in order of arrival, then takes no longer than the timeout for the whole
    call. Each raises SourceUnavailable where a later call may work, SourceRefused for a 400. No call is repeated here.
    """

    def __init__(self, settings: SourceSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._budget = CallBudget()
        self._arrivals = asyncio.Lock()
        self._place_freed = asyncio.Event()
        self._answered = False
        self._session: aiohttp.ClientSession | None = None
        self.clock_offset: float | None = None
        """Seconds that the service's clock is ahead of ours for certain, by the ``Date`` of its last answer; None: unknown."""

    async def __aenter__(self) -> Self:
        tracing = aiohttp.TraceConfig()
        tracing.on_request_headers_sent.append(self._on_sent)
        self._session = aiohttp.ClientSession(
            self._settings.url,
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,  # a proxy would answer for another machine, or not at all (docs/protocol.md#no-proxies)
            timeout=aiohttp.ClientTimeout(
                total=None
            ),  # one timeout of our own covers the whole call
            trace_configs=[tracing],
            middlewares=(_once,),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def read_document(self) -> bytes:
        """The bytes of the Scheduled Events document, as a 200 gave them.

        Raises DocumentError for an answer over `MAX_DOCUMENT_BYTES` bytes (not read to its end) or an encoded one.
        """
        # Azure switches the service on at the first call, and answers it up to two minutes later (docs/protocol.md#the-first-call).
        seconds = self._settings.timeout if self._answered else self._settings.first_timeout
        body = await self._call(
            "GET", _EVENTS, {"api-version": self._settings.api_version}, seconds
        )
        self._answered = True
        return body

    async def send_start_request(self, event_ids: Sequence[str]) -> None:
        """Ask Azure to start these events now; returns when it answered 200.

        It answers 200 for every valid id (docs/protocol.md#startrequests).

        The EventIds go out in the case they are given in.
        """
        body = orjson.dumps({"StartRequests": [{"EventId": event_id} for event_id in event_ids]})
        await self._call(
            "POST",
            _EVENTS,
            {"api-version": self._settings.api_version},
            self._settings.timeout,
            body,
        )

    async def read_instance(self) -> bytes:
        """The JSON of instance metadata, as a 200 gave it. Raises DocumentError as ``read`` does."""
        return await self._call("GET", _INSTANCE, _INSTANCE_QUERY, self._settings.timeout)

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        seconds: float,
        body: bytes | None = None,
    ) -> bytes:
        if self._session is None:
            raise RuntimeError("expected ImdsClient to be entered (async with) before it is called")
        headers = {"Content-Type": "application/json"} if body is not None else {}
        await self._take_place()
        call = _Call()
        began = self._clock.now()
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.request(
                    method,
                    path,
                    params=query,
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    trace_request_ctx=call,
                ) as answer,
            ):
                self.clock_offset = measure_clock_offset(answer.headers.get("Date"), began, self._clock.now())
                if answer.status != 200:
                    raise await self._failure(answer)
                return await _body(answer) if method == "GET" else b""
        except TimeoutError as error:
            raise SourceUnavailable(
                f"expected an answer from {self._settings.url} within {seconds:g}s, none came whole"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _unavailable(error) from error
        finally:
            if not call.sent:
                self._budget.release()
                self._place_freed.set()

    async def _take_place(self) -> None:
        async with self._arrivals:  # first come, first served
            while (delay := self._budget.delay(self._clock.monotonic())) != 0:
                if delay is None:
                    self._place_freed.clear()
                    await self._place_freed.wait()
                else:
                    await self._clock.sleep(delay)
            self._budget.reserve()

    async def _on_sent(
        self,
        _session: aiohttp.ClientSession,
        context: SimpleNamespace,
        _: aiohttp.TraceRequestHeadersSentParams,
    ) -> None:
        call: _Call = context.trace_request_ctx
        call.sent = True
        self._budget.mark_sent(self._clock.monotonic())
        self._place_freed.set()

    async def _failure(self, answer: aiohttp.ClientResponse) -> SourceError:
        if answer.status == 400:
            said = await _said(answer)
            return SourceRefused(
                f"expected 200, got 400: our header, api-version or body is wrong; the answer says {said!r}",
                status=400,
            )
        if 300 <= answer.status < 400:
            # The query may hold what is not ours to log.
            target = answer.headers.get("Location", "nowhere").partition("?")[0][:200]
            return SourceUnavailable(
                f"expected 200, got {answer.status}: a redirect to {target}, never followed",
                status=answer.status,
            )
        asked = parse_retry_after(answer.headers.get("Retry-After"), self._clock.now())
        got = f"{answer.status} {answer.reason or ''}".rstrip()
        return SourceUnavailable(
            f"expected 200, got {got}", status=answer.status, retry_after=asked
        )


def measure_clock_offset(date: str | None, began: datetime, ended: datetime) -> float | None:
    """How many seconds another clock is ahead for certain, which wrote ``date`` between these moments; negative: it is behind.

    A ``Date`` has lost its fraction of a second (RFC 9110, 6.6.1). None where it cannot be read.
    """
    said = parse_timestamp(date)
    if said is None:
        return None
    earliest, latest = (said - ended).total_seconds(), (said - began).total_seconds() + 1
    return earliest if earliest > 0 else min(latest, 0.0)


def parse_retry_after(text: str | None, now: datetime) -> float | None:
    """Seconds from a Retry-After header, as a number or a date, between 0 and `MAX_RETRY_AFTER`; None where it cannot be read."""
    if text is None:
        return None
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text.strip(), re.ASCII):
        seconds = float(text)
    elif moment := parse_timestamp(text):
        seconds = (moment - now).total_seconds()
    else:
        return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER)


async def _once(
    request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    # aiohttp sends a GET a second time when a kept-alive connection breaks: a call that no budget would know of.
    try:
        return await send(request)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise _unavailable(error) from error


def _unavailable(error: Exception) -> SourceUnavailable:
    return SourceUnavailable(f"expected an answer, got {type(error).__name__}: {error}")


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    encoding = answer.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise DocumentError(
            f"expected an answer without Content-Encoding, got {encoding[:50]!r}", status=200
        )
    too_large = DocumentError(
        f"expected an answer of at most {MAX_DOCUMENT_BYTES} bytes, got a larger one", status=200
    )
    # Leaving an answer that was not read to its end closes the connection.
    if (answer.content_length or 0) > MAX_DOCUMENT_BYTES:
        raise too_large
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > MAX_DOCUMENT_BYTES:
            raise too_large
    return bytes(body)


async def _said(answer: aiohttp.ClientResponse) -> str:
    # The beginning is enough to tell what Azure minds; a body that does not come must not hide the 400.
    try:
        async with asyncio.timeout(1):
            said = await answer.content.read(200)
    except (TimeoutError, aiohttp.ClientError):
        return ""
    return said.decode("utf-8", "replace").strip()
