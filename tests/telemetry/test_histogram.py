"""Durations are counted in the bucket whose bounds they lie between, and shown cumulatively."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from relay.histogram import Histogram
from relay.telemetry.metrics import MetricsCollector


def test_a_bucket_includes_its_bound_and_all_below() -> None:
    histogram = Histogram((0.5, 1.0))
    for seconds in (0.0, 0.5, 0.75, 1.0, 7.0):
        histogram.observe(seconds)
    registry = CollectorRegistry()
    registry.register(
        MetricsCollector({"imds_relay_store_commit_duration_seconds": [((), histogram)]})
    )
    lines = generate_latest(registry).decode().splitlines()
    name = "imds_relay_store_commit_duration_seconds"
    assert lines[1:] == [
        f"# TYPE {name} histogram",
        f'{name}_bucket{{le="0.5"}} 2.0',
        f'{name}_bucket{{le="1.0"}} 4.0',
        f'{name}_bucket{{le="+Inf"}} 5.0',
        f"{name}_count 5.0",
        f"{name}_sum 9.25",
    ]
