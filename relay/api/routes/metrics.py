"""`/metrics`: the relay's metrics for Prometheus, read at each call."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from relay.api.schema.responses import raw_response
from relay.api.schema.route import Call, Route
from relay.outbox import Mode
from relay.outbox.transaction import Transaction
from relay.telemetry.metrics import MetricsCollector


async def _show_metrics(call: Call) -> web.Response:
    relay, server = call.relay, call.server

    def read(tx: Transaction) -> tuple[Mode, int]:
        return relay.gate.service.mode(tx), tx.head().position

    mode, position = await relay.store.read(read)
    registry = CollectorRegistry()
    registry.register(
        MetricsCollector(
            scope=relay.origin.scope,
            relay=relay.origin.relay,
            polls=relay.source.polls,
            poll_failures=relay.source.failures,
            is_source_lost=relay.source.lost,
            is_store_failing=relay.store.failing is not None,
            journal_position=position,
            approvals_mode=mode,
            sinks=relay.dispatcher.status(),
            rejected_calls=server.rejections.count,
            responses_by_status=server.responses_by_status,
        )
        yield CounterMetricFamily(
            "imds_relay_polls", "Polls of the metadata service", self.relay.source.polls
        )
        yield GaugeMetricFamily(
            "imds_relay_poll_failures",
            "Polls in a row without a usable answer",
            self.relay.source.failures,
        )
        yield GaugeMetricFamily(
            "imds_relay_source_lost",
            "1 while the metadata service is lost",
            float(self.relay.source.lost),
        )
        yield GaugeMetricFamily(
            "imds_relay_store_failing",
            "1 while the state file cannot be written",
            float(self.relay.store.write_error is not None),
        )
        yield GaugeMetricFamily(
            "imds_relay_journal_position", "Position of the journal's last row", self.position
        )
        yield _one_of(
            "imds_relay_approvals_mode",
            "The switch of the approvals, as it holds",
            "mode",
            self.mode,
        )
        yield from self._sinks()
        yield CounterMetricFamily(
            "imds_relay_strangers",
            "Calls without good credentials, and messages that could not be used",
            self.strangers,
        )
        answers = CounterMetricFamily(
            "imds_relay_http_answers", "Answers of the API", labels=["status"]
        )
        for status, count in sorted(self.answered.items()):
            answers.add_metric([str(status)], count)
        yield answers

    def _sinks(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(
            "imds_relay_sink_waiting", "Entries that wait for the sink", labels=["sink", "kind"]
        )
        failing = GaugeMetricFamily(
            "imds_relay_sink_failing",
            "1 while deliveries to the sink fail",
            labels=["sink", "kind"],
        )
        states = GaugeMetricFamily(
            "imds_relay_sink_state",
            "1 for the state that the sink is in",
            labels=["sink", "kind", "state"],
        )
        # A message that RabbitMQ returned for want of a queue is delivered, with status 312.
        tries = CounterMetricFamily(
            "imds_relay_sink_tries",
            "Tries to deliver",
            labels=["sink", "kind", "outcome", "status"],
        )
        for sink in self.relay.dispatcher.status():
            for (outcome, status), count in sink.tries.items():
                tries.add_metric([sink.name, sink.kind, outcome, str(status or "")], count)
            waiting.add_metric([sink.name, sink.kind], sink.waiting)
            failing.add_metric([sink.name, sink.kind], float(sink.failing))
            for state in get_args(SinkState):
                states.add_metric([sink.name, sink.kind, state], float(state == sink.state))
        yield from (waiting, failing, states, tries)


def _one_of(name: str, text: str, label: str, value: Mode) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for one in get_args(Mode):
        family.add_metric([one], float(one == value))
    return family


def routes(desk: RequestPipeline) -> tuple[Route, ...]:
    """What can be called."""

    async def scrape(call: Call) -> web.StreamResponse:
        relay = call.relay

        def work(tx: Transaction) -> tuple[Mode, int]:
            return relay.gate.service.mode(tx), tx.head().position

        mode, position = await relay.store.read(work)
        registry = CollectorRegistry()
        registry.register(
            _Facts(relay, mode, position, desk.rejections.count, desk.responses_by_status)
        )
        encode, media = choose_encoder(call.request.headers.get("Accept", ""))
        return raw_response(200, encode(registry), media)

    return (
        Route(
            "GET",
            "/metrics",
            "for Prometheus; from this machine itself no credentials are needed",
            scrape,
            {200: str},
            access="key or loopback",
            needs="read",
            media=("text/plain", "application/openmetrics-text"),
        ),
    )
    encode, content_type = choose_encoder(call.request.headers.get("Accept", ""))
    return raw_response(200, encode(registry), content_type)


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
