"""The metrics for Prometheus, as a collector of values that were read at one moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from relay import __version__
from relay.outbox import AttemptOutcome, Mode, SinkState


class SinkValues(Protocol):
    """The values of one sink."""

    @property
    def name(self) -> str:
        """The name in the configuration."""

    @property
    def kind(self) -> str:
        """Such as webhook."""

    @property
    def state(self) -> SinkState:
        """Whether the sink is on, paused or disabled."""

    @property
    def failing(self) -> bool:
        """Whether deliveries fail now."""

    @property
    def waiting(self) -> int:
        """The number of waiting deliveries."""

    @property
    def tries(self) -> Mapping[tuple[AttemptOutcome, int | None], int]:
        """The number of attempts by outcome and status of the receiver."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class MetricsCollector(Collector):
    """The values of all metrics."""

    scope: str
    relay: str
    polls: int
    poll_failures: int
    is_source_lost: bool
    is_store_failing: bool
    journal_position: int
    approvals_mode: Mode
    sinks: Sequence[SinkValues]
    rejected_calls: int
    responses_by_status: Mapping[int, int]

    @override
    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(
            "imds_relay_build",
            "The running relay",
            {"version": __version__, "scope": self.scope, "relay": self.relay},
        )
        yield CounterMetricFamily("imds_relay_polls", "Polls of the metadata service", self.polls)
        yield GaugeMetricFamily(
            "imds_relay_poll_failures",
            "Polls in a row without a usable response",
            self.poll_failures,
        )
        yield GaugeMetricFamily(
            "imds_relay_source_lost",
            "1 while the metadata service gives no usable response",
            float(self.is_source_lost),
        )
        yield GaugeMetricFamily(
            "imds_relay_store_failing",
            "1 while the state file cannot be written",
            float(self.is_store_failing),
        )
        yield GaugeMetricFamily(
            "imds_relay_journal_position",
            "Position of the journal's last row",
            self.journal_position,
        )
        yield self._approvals_mode()
        yield from self._sink_metrics()
        yield CounterMetricFamily(
            "imds_relay_rejected_calls",
            "Calls without valid credentials, and AMQP messages that could not be used",
            self.rejected_calls,
        )
        yield self._response_metrics()

    def _approvals_mode(self) -> Metric:
        modes = GaugeMetricFamily(
            "imds_relay_approvals_mode", "1 for the mode of approvals", labels=["mode"]
        )
        for mode in get_args(Mode):
            modes.add_metric([mode], float(mode == self.approvals_mode))
        return modes

    def _sink_metrics(self) -> Iterator[Metric]:
        labels = ["sink", "kind"]
        waiting = GaugeMetricFamily(
            "imds_relay_sink_waiting", "Deliveries that wait for the sink", labels=labels
        )
        failing = GaugeMetricFamily(
            "imds_relay_sink_failing", "1 while deliveries to the sink fail", labels=labels
        )
        states = GaugeMetricFamily(
            "imds_relay_sink_state", "1 for the state of the sink", labels=[*labels, "state"]
        )
        # An unrouted message that RabbitMQ returned counts as delivered, with status 312.
        attempts = CounterMetricFamily(
            "imds_relay_sink_tries", "Delivery attempts", labels=[*labels, "outcome", "status"]
        )
        for sink in self.sinks:
            waiting.add_metric([sink.name, sink.kind], sink.waiting)
            failing.add_metric([sink.name, sink.kind], float(sink.failing))
            for state in get_args(SinkState):
                is_current = float(state == sink.state)
                states.add_metric([sink.name, sink.kind, state], is_current)
            for (outcome, status), count in sink.tries.items():
                attempts.add_metric([sink.name, sink.kind, outcome, str(status or "")], count)
        yield from (waiting, failing, states, attempts)

    def _response_metrics(self) -> Metric:
        responses = CounterMetricFamily(
            "imds_relay_http_answers", "Responses of the API", labels=["status"]
        )
        for status, count in sorted(self.responses_by_status.items()):
            responses.add_metric([str(status)], count)
        return responses
