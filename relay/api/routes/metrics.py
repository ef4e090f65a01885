"""`/metrics`: the relay's metrics for Prometheus, read at each call."""

from __future__ import annotations

from aiohttp import web

from relay.api.schema.responses import make_bytes_http_response
from relay.api.schema.route import Call, Route


async def _show_metrics(call: Call) -> web.Response:
    # A relay that nobody scrapes does without the library's megabyte of memory.
    from prometheus_client import CollectorRegistry  # noqa: PLC0415
    from prometheus_client.exposition import choose_encoder  # noqa: PLC0415

    from relay.api.metric_values import read_samples  # noqa: PLC0415
    from relay.telemetry.metrics import MetricsCollector  # noqa: PLC0415

    samples = await read_samples(call.relay, call.server)
    registry = CollectorRegistry()
    registry.register(MetricsCollector(samples))
    encode, content_type = choose_encoder(call.request.headers.get("Accept", ""))
    return make_bytes_http_response(200, encode(registry), content_type)


ROUTES = (
    Route(
        method="GET",
        path="/metrics",
        summary="for Prometheus; programs on this machine need no credentials",
        handler=_show_metrics,
        media_types=("text/plain", "application/openmetrics-text"),
        access="key or loopback",
        needs="read",
    ),
)
