"""Hands values of metrics to the Prometheus client, which writes them as text for ``/metrics``.

`relay.api.metric_values` reads all values at one moment, for each call, and makes `Samples` of
them. `relay.telemetry.definitions` says what each metric is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from typing_extensions import override

from relay.histogram import Histogram
from relay.telemetry.definitions import METRICS, Metric

Value: TypeAlias = float | Histogram
Samples: TypeAlias = Mapping[str, Sequence[tuple[tuple[str, ...], Value]]]
"""By the name of the metric: values, each with its labels in the order of the definition."""


@dataclass(frozen=True, eq=False, slots=True)
class MetricsCollector(Collector):
    """The values of all metrics. A metric without values is left out."""

    samples: Samples

    @override
    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            if metric.name in self.samples:
                yield _family(metric, self.samples[metric.name])


def _family(metric: Metric, samples: Sequence[tuple[tuple[str, ...], Value]]) -> Family:
    labels = list(metric.labels)
    match metric.kind:
        case "histogram":
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
            for values, value in samples:
                if isinstance(value, Histogram):
                    histogram.add_metric(values, _cumulative_bucket_counts(value), value.sum)
            return histogram
        case "info":
            info = InfoMetricFamily(metric.name.removesuffix("_info"), metric.help)
            for values, _ in samples:
                info.add_metric((), dict(zip(labels, values, strict=True)))
            return info
        case "counter" | "gauge":
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=labels)
            for values, value in samples:
                if not isinstance(value, Histogram):
                    family.add_metric(values, value)
            return family


def _cumulative_bucket_counts(histogram: Histogram) -> list[tuple[str, float]]:
    """Return the buckets with their counts, each of which includes those below."""
    bounds = [*map(repr, map(float, histogram.bounds)), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
