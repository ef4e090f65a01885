"""Sends spans to a collector, as OTLP over HTTP.

The libraries of OpenTelemetry encode them. The relay sends them itself, as it sends to webhooks: no
metadata address, no redirects, no proxy of the environment, and never for longer than a timeout.
This module needs the extra ``otel``, so it is imported only where traces are on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import aiohttp
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from relay import __version__
from relay.clock import Clock
from relay.errors import Deferred
from relay.events.tracing import Span, SpanContext
from relay.log_fields import log_extra
from relay.net.backoff import exponential_backoff_without_jitter
from relay.net.http import ProxyAndTlsOptions, Request, open_session, post, status_text
from relay.telemetry import TracesSettings

MAX_WAITING = 4096
"""Spans that wait for the collector. Of more, the oldest are lost."""
MAX_BATCH = 512
BATCH_PAUSE = 1.0
"""Seconds that the first span of a batch waits for others."""
MAX_PAUSE = 60.0
"""Seconds: the longest pause after a failure."""
FINAL_TIMEOUT = 1.0
"""Seconds that the end of the relay waits for the last spans."""
_RETRYABLE = frozenset({408, 429, 502, 503, 504})
"""Statuses after which the same spans are sent again, by the OTLP specification."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SCOPE = InstrumentationScope("imds-relay", __version__)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a collector did not take spans. ``lost``: how many; None: they are sent again."""

    reason: str
    lost: int | None


class SpanExporter:
    """Keeps spans and sends them in batches. A collector that is away costs one line of the log."""

    def __init__(
        self,
        settings: TracesSettings,
        session: aiohttp.ClientSession,
        clock: Clock,
        instance: str,
    ) -> None:
        """``instance`` names the relay that sends the spans."""
        self.lost = 0
        """Spans that were lost since the start."""
        self.failures = 0
        """Failed requests in a row."""
        self._settings = settings
        self._session = session
        self._clock = clock
        # What the operator says in OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME comes first.
        self._resource = Resource(
            {
                "service.name": "imds-relay",
                "service.version": __version__,
                "service.instance.id": instance,
            }
        ).merge(OTELResourceDetector().detect())
        self._tls = settings.tls.reloading_context() if settings.tls is not None else None
        self._waiting: deque[Span] = deque()
        self._news = asyncio.Event()
        self._lost_before = 0

    def record(self, span: Span) -> None:
        """Keep a span until it is sent."""
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self.lost += 1
        self._waiting.append(span)
        self._news.set()

    async def run(self) -> None:
        """Send spans until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            await self._clock.sleep(BATCH_PAUSE)
            while self._waiting:
                if not await self._send_batch(self._settings.timeout):
                    pause = exponential_backoff_without_jitter(
                        self.failures, first=1.0, maximum=MAX_PAUSE
                    )
                    await self._clock.sleep(pause)

    async def finish(self) -> None:
        """Try once to send what is left."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FINAL_TIMEOUT):
                while self._waiting and await self._send_batch(FINAL_TIMEOUT):
                    pass
        if self._waiting:
            _log.info("%d spans of traces were not exported before the end", len(self._waiting))

    async def _send_batch(self, timeout: float) -> bool:  # noqa: ASYNC109  # of the request
        """Send the oldest spans; return False if they have to be sent again."""
        batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
        try:
            failure = await self._post(batch, timeout)
        except BaseException:
            self._put_back(batch)
            raise
        if failure is None:
            self._note_success()
            return True
        if failure.lost is None:
            self._put_back(batch)
        else:
            self.lost += failure.lost
        self._note_failure(failure)
        return failure.lost is not None

    def _put_back(self, batch: Sequence[Span]) -> None:
        self._waiting.extendleft(reversed(batch))
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self.lost += 1

    async def _post(self, batch: Sequence[Span], seconds: float) -> _Failure | None:
        """Send spans once. Return None if the collector took all of them."""
        try:
            headers = self._settings.extra_headers()
            request = Request(
                url=self._settings.collector_url(),
                headers={**headers, "Content-Type": "application/x-protobuf"},
                body=encode_spans(
                    [self._to_readable_span(span) for span in batch]
                ).SerializeToString(),
                secrets=tuple(headers.values()),
            )
        except ValueError as error:
            return _Failure(f"its url or headers cannot be used any more: {error}", None)
        except Exception as error:  # noqa: BLE001  # a span that cannot be encoded ends no relay
            _log.exception("internal error: spans could not be encoded")
            return _Failure(f"they could not be encoded: {type(error).__name__}", len(batch))
        tls = self._tls.get() if self._tls is not None else None
        try:
            response = await post(
                self._session, request, seconds=seconds, transport=ProxyAndTlsOptions(tls=tls)
            )
        except Deferred as error:
            return _Failure(error.reason, None)
        if not 200 <= response.status <= 299:
            is_final = response.status not in _RETRYABLE
            reason = f"expected 2xx, got {status_text(response.status)}"
            return _Failure(reason, len(batch) if is_final else None)
        rejected = max(0, min(_rejected_spans(response.body), len(batch)))
        return _Failure(f"it rejected {rejected} of {len(batch)}", rejected) if rejected else None

    def _note_failure(self, failure: _Failure) -> None:
        self.failures += 1
        if self.failures == 1:
            again = f"; it is tried again, and the newest {MAX_WAITING} spans are kept"
            _log.warning(
                "the collector did not take spans of traces: %s%s",
                failure.reason,
                again if failure.lost is None else "",
                extra=log_extra(reason=failure.reason),
            )

    def _note_success(self) -> None:
        if self.failures:
            lost, self._lost_before = self.lost - self._lost_before, self.lost
            _log.info("the collector takes traces again; %d spans were lost", lost)
        self.failures = 0

    def _to_readable_span(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_otel_span_context(span.context),
            parent=_otel_span_context(span.parent) if span.parent is not None else None,
            resource=self._resource,
            attributes={
                name: value for name, value in span.attributes.items() if value is not None
            },
            links=[trace.Link(_otel_span_context(link, is_remote=True)) for link in span.links],
            kind=trace.SpanKind[span.kind.upper()],
            status=(
                trace.Status(trace.StatusCode.ERROR, span.error)
                if span.error is not None
                else trace.Status()
            ),
            start_time=_nanoseconds(span.began),
            end_time=_nanoseconds(max(span.began, span.ended)),
            instrumentation_scope=_SCOPE,
        )


def _otel_span_context(context: SpanContext, *, is_remote: bool = False) -> trace.SpanContext:
    return trace.SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=is_remote,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )


def _nanoseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1000


def _rejected_spans(body: bytes) -> int:
    """Return how many spans a collector says that it did not take."""
    try:
        answer = ExportTraceServiceResponse.FromString(body)
    except Exception:  # noqa: BLE001  # the answer is no protobuf, and 2xx decides
        return 0
    return int(answer.partial_success.rejected_spans)


@asynccontextmanager
async def running_span_exporter(
    settings: TracesSettings, clock: Clock, instance: str
) -> AsyncIterator[SpanExporter]:
    """Send spans of a relay for the time of this context, and the last ones at its end."""
    async with open_session() as session:
        exporting = SpanExporter(settings, session, clock, instance)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(exporting.run(), name="traces")
            try:
                yield exporting
            finally:
                running.cancel()
        await exporting.finish()
