"""The metrics: what each of them means, and how values become text for ``/metrics``.

`METRICS` defines them; docs/metrics.md follows from it. `relay.api.metrics` reads all values
at one moment, for each call of ``/metrics``, and makes `Samples` of them. `MetricsCollector` hands
these to the Prometheus client. The values of every label are from a fixed set, or are names in the
configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Literal, TypeAlias

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

Value: TypeAlias = float | Histogram
Samples: TypeAlias = Mapping[str, Sequence[tuple[tuple[str, ...], Value]]]
"""By the name of the metric: values, each with its labels in the order of the definition."""
MetricKind = Literal["counter", "gauge", "histogram", "info"]


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of a metric. ``labels`` has the meaning of each label.

    ``only`` says which relays have the metric; empty: all of them.
    """

    kind: MetricKind
    name: str
    help: str
    labels: Mapping[str, str] = field(default_factory=dict)
    only: str = ""

    @property
    def unit(self) -> str:
        """The unit, for docs/metrics.md; empty for plain numbers."""
        return "seconds" if self.name.endswith("_seconds") else ""


_EVENT_TYPE = {"event_type": "the EventType of Azure, `other` for an unknown one"}
_APPROVAL = {
    "approval": "`none`, `pending`, `held`, `waiting` (for a limit), `granted`, `sent`, "
    "`accepted` or `failed`"
}
_DECISION = {"decision": "`approve`, `hold` or `release`"}
_SINK = {"sink": "the name in the configuration", "kind": "such as `webhook`"}
_WITH_POLLS = "not on a hub"
_ON_HUB = "on a hub"

_counter = partial(Metric, "counter")
_gauge = partial(Metric, "gauge")
_histogram = partial(Metric, "histogram")
_info = partial(Metric, "info")

METRICS = (
    _info(
        "imds_relay_build_info",
        "The running relay",
        {"version": "of imds-relay", "scope": "of the relay", "relay": "the name of the relay"},
    ),
    _gauge(
        "imds_relay_config_last_reload_successful",
        "1 unless the last reload was refused, so that an earlier configuration is in force",
    ),
    _counter(
        "imds_relay_polls_total", "Polls of the metadata service; on a hub messages of agents"
    ),
    _gauge(
        "imds_relay_poll_failures",
        "Polls in a row without a usable response; on a hub failed connections in a row",
    ),
    _histogram(
        "imds_relay_poll_duration_seconds",
        "Time until the metadata service had answered with a document",
        only=_WITH_POLLS,
    ),
    _gauge(
        "imds_relay_poll_age_seconds",
        "Time since the last good poll; missing before the first one",
        only=_WITH_POLLS,
    ),
    _gauge(
        "imds_relay_source_lost",
        "1 while the metadata service gives no usable response; on a hub while it is not "
        "connected to RabbitMQ",
    ),
    _gauge(
        "imds_relay_clock_offset_seconds",
        "How far the clock is certainly ahead of that of the metadata service; negative if "
        "it is behind, missing if it is not known",
        only=_WITH_POLLS,
    ),
    _gauge("imds_relay_store_failing", "1 while the state file cannot be written"),
    _histogram(
        "imds_relay_store_commit_duration_seconds",
        "Duration of transactions on the state file, with all work in them",
    ),
    _gauge("imds_relay_journal_position", "Position of the journal's last row"),
    _counter(
        "imds_relay_events_total",
        "Changes of scheduled events that were recorded",
        {"change": "`scheduled`, `updated`, `started` or `ended`", **_EVENT_TYPE},
    ),
    _gauge(
        "imds_relay_live_events",
        "Scheduled events that are in the document",
        {**_EVENT_TYPE, "status": "`Scheduled`, `Started` or `other`"},
    ),
    _gauge(
        "imds_relay_scheduled_events",
        "Events with the status Scheduled by the state of their approval; of more than 200, "
        "those with the earliest NotBefore",
        _APPROVAL,
    ),
    _gauge(
        "imds_relay_next_event_seconds",
        "Time until the earliest NotBefore of these events that is still to come; missing if "
        "there is none",
        _APPROVAL,
    ),
    _gauge("imds_relay_missing_votes", "Votes that these events need and do not have yet"),
    _gauge(
        "imds_relay_approvals_mode",
        "1 for the mode of approvals",
        {"mode": "`on`, `dry-run` or `off`"},
    ),
    _gauge(
        "imds_relay_approvals_link_up",
        "1 while the relay is connected to RabbitMQ to take approvals",
        only="with `approvals.amqp`",
    ),
    _counter(
        "imds_relay_decisions_total", "Votes, holds and releases that were accepted", _DECISION
    ),
    _counter(
        "imds_relay_refusals_total",
        "Votes, holds and releases of known callers that were refused",
        _DECISION,
    ),
    _counter("imds_relay_grants_total", "Events whose start was granted, dry runs included"),
    _counter(
        "imds_relay_start_requests_total",
        "Grants that ended",
        {
            "result": "`accepted` by Azure, `refused` by Azure (400), or `failed`: the relay gave "
            "up, for example because the event changed"
        },
    ),
    _gauge("imds_relay_sink_waiting", "Deliveries that wait for the sink", _SINK),
    _gauge(
        "imds_relay_sink_oldest_waiting_seconds",
        "Age of the oldest delivery that waits for the sink; 0 if none waits",
        _SINK,
    ),
    _gauge("imds_relay_sink_failing", "1 while deliveries to the sink fail", _SINK),
    _gauge(
        "imds_relay_sink_state",
        "1 for the state of the sink",
        {**_SINK, "state": "`on`, `paused` or `disabled`"},
    ),
    _gauge(
        "imds_relay_sink_circuit_state",
        "1 for the state of the sink's circuit breaker",
        {
            **_SINK,
            "state": "`closed`; while the sink fails `open`, or `half-open` when it may be tried",
        },
    ),
    _gauge(
        "imds_relay_sink_clock_skewed",
        "1 while the clocks of the receiver and of the relay differ by more than 30 seconds",
        _SINK,
    ),
    # An unrouted message that RabbitMQ returned counts as delivered, with status 312.
    _counter(
        "imds_relay_sink_tries_total",
        "Delivery attempts",
        {
            **_SINK,
            "outcome": "`delivered`, `deferred`, `parked` (the receiver rejected the event for "
            "good), or `error` (the code of the sink failed)",
            "status": "of HTTP or AMQP, empty without one, `other` for an unknown one",
        },
    ),
    _histogram("imds_relay_sink_try_duration_seconds", "Duration of delivery attempts", _SINK),
    _counter(
        "imds_relay_sink_deliveries_total",
        "Deliveries that ended",
        {**_SINK, "result": "`delivered`, `superseded` or `parked` (a dead letter)"},
    ),
    _gauge(
        "imds_relay_sink_dead_letters", "Dead letters of the sink that the state file holds", _SINK
    ),
    _counter(
        "imds_relay_rejected_calls_total",
        "Calls without valid credentials, and AMQP messages that could not be used",
    ),
    _counter("imds_relay_http_answers_total", "Responses of the API", {"status": "of HTTP"}),
    _gauge(
        "imds_relay_hub_agents",
        "Agents of the fleet",
        {"state": "`fresh`, `silent`, or `unknown` while the hub has not listened for long enough"},
        only=_ON_HUB,
    ),
    _gauge(
        "imds_relay_hub_agents_with_wrong_clock",
        "Fresh agents whose clock is wrong by more than 2 seconds, so that they get no orders",
        only=_ON_HUB,
    ),
    _gauge(
        "imds_relay_hub_scopes",
        "Scopes that have agents",
        {"state": "`silent` if all agents of the scope are silent, else `fresh`"},
        only=_ON_HUB,
    ),
    _counter(
        "imds_relay_hub_reports_total",
        "Reports about events that were read, copies included",
        only=_ON_HUB,
    ),
    _counter("imds_relay_hub_copies_total", "Reports that said nothing new", only=_ON_HUB),
    _counter("imds_relay_hub_pulses_total", "Pulses that were read", only=_ON_HUB),
    _counter(
        "imds_relay_hub_orders_total",
        "Start orders to agents that ended",
        {
            "result": "`accepted` or `refused` by Azure, `failed` without a final answer of Azure, "
            "`changed` or `stale` (the agent sent nothing), `returned` (the agent is not "
            "connected), or `unanswered`"
        },
        only=_ON_HUB,
    ),
)
"""Every metric, in the order of `/metrics`."""


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
