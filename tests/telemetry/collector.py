"""A collector of traces: it decodes OTLP/HTTP with the protobufs of OpenTelemetry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """A span as the collector has decoded it."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it is a root."""
    links: tuple[str, ...]
    """The trace ids of linked spans."""
    began: int
    ended: int
    """Nanoseconds since 1970."""
    failed: bool
    attributes: Mapping[str, Any]
    resource: Mapping[str, Any]


@dataclass(slots=True)
class Collector:
    """What arrived, and how the collector answers."""

    url: str = ""
    status: int = 200
    hangs: bool = False
    rejects: int = 0
    """How many spans it says that it rejected."""
    spans: list[ReceivedSpan] = field(default_factory=list)
    requests: int = 0
    headers: list[Mapping[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def named(self, name: str) -> list[ReceivedSpan]:
        """Return the spans of a name, in their order."""
        return [span for span in self.spans if span.name == name]

    async def receive(self, request: web.Request) -> web.Response:
        """Decode and keep the spans."""
        body = await request.read()
        self.requests += 1
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        if self.hangs:
            await asyncio.Event().wait()
        if self.status == 200:
            assert request.content_type == "application/x-protobuf"
            self.spans += _decode(body)
        answer = ExportTraceServiceResponse()
        answer.partial_success.rejected_spans = self.rejects
        return web.Response(
            status=self.status,
            body=answer.SerializeToString(),
            content_type="application/x-protobuf",
            headers={"Location": "http://127.0.0.1:1/"},
        )


def _decode(body: bytes) -> list[ReceivedSpan]:
    return [
        ReceivedSpan(
            name=span.name,
            kind=WireSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            links=tuple(link.trace_id.hex() for link in span.links),
            began=span.start_time_unix_nano,
            ended=span.end_time_unix_nano,
            failed=span.status.code == 2,
            attributes=_values(span.attributes),
            resource=_values(of_resource.resource.attributes),
        )
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@asynccontextmanager
async def collector(port: int = 0) -> AsyncIterator[Collector]:
    """Run a collector on a loopback port."""
    running = Collector()
    application = web.Application()
    application.router.add_post("/{path:.*}", running.receive)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    running.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield running
    finally:
        await runner.cleanup()
