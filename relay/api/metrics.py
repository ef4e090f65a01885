"""Every metric: its name, its meaning, and how its value is read for `/metrics`.

`read_metrics` reads all values at one moment, from the parts of the relay, the state of the server
and the state file. Nothing is read before somebody asks: a relay that nobody scrapes pays for plain
counters only, and does not load this module. docs/metrics.md has a table of all metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from itertools import accumulate
from typing import Any, get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from typing_extensions import override

from relay import __version__
from relay.api.state import Relay, ServerState
from relay.approvals.status import ApprovalState, approval_state
from relay.clock import Histogram
from relay.delivery.sink_health import CircuitState
from relay.delivery.worker import Worker
from relay.errors import StoreUnavailable
from relay.events.match import EVENT_TYPES
from relay.store import AttemptOutcome, EntryState, Mode, SinkState
from relay.store.transaction import Transaction
from relay.telemetry.lines import (
    CHANGES,
    DECISIONS,
    EVENT_STATUSES,
    OTHER,
    EventCounts,
    azure_event_status_label,
    azure_event_type_label,
)

MAX_EXAMINED = 200
"""Scheduled events whose approval is examined for a scrape. The store waits meanwhile."""
_AMQP_STATUSES = {311, 312, 313, 320, 402, 403, 404, 405, 406, 501, 502, 503, 504, 505, 506, 530}
_STATUSES = {*map(int, HTTPStatus), *_AMQP_STATUSES, 540, 541}
"""The statuses of receivers that have a label of their own: those of HTTP and of AMQP 0-9-1."""


_MEANINGS = {
    "config_last_reload_successful": (
        "1 unless the last reload was refused, so that an earlier configuration is in force"
    ),
    "polls_total": "Polls of the metadata service; on a hub messages of agents",
    "poll_failures": (
        "Polls in a row without a usable response; on a hub failed connections in a row"
    ),
    "poll_duration_seconds": "Time until the metadata service had answered with a document",
    "poll_age_seconds": "Time since the last good poll; missing before the first one",
    "clock_offset_seconds": (
        "How far the clock is certainly ahead of that of the metadata service; negative if it is "
        "behind, missing if it is not known"
    ),
    "source_lost": (
        "1 while the metadata service gives no usable response; on a hub while it is not connected "
        "to RabbitMQ"
    ),
    "store_failing": "1 while the state file cannot be written",
    "store_commit_duration_seconds": (
        "Duration of transactions on the state file, with all work in them"
    ),
    "journal_position": "Position of the journal's last row",
    "events_total": "Changes of scheduled events that were recorded",
    "live_events": "Scheduled events that are in the document",
    "scheduled_events": (
        "Events with the status Scheduled by the state of their approval; of more than 200, those "
        "with the earliest NotBefore"
    ),
    "next_event_seconds": (
        "Time until the earliest NotBefore of these events that is still to come; missing if there "
        "is none"
    ),
    "missing_votes": "Votes that these events need and do not have yet",
    "approvals_mode": "1 for the mode of approvals",
    "approvals_link_up": "1 while the relay is connected to RabbitMQ to take approvals",
    "decisions_total": "Votes, holds and releases that were accepted",
    "refusals_total": "Votes, holds and releases of known callers that were refused",
    "grants_total": "Events whose start was granted",
    "start_requests_total": "Grants that ended",
    "sink_waiting": "Deliveries that wait for the sink",
    "sink_oldest_waiting_seconds": (
        "Age of the oldest delivery that waits for the sink; 0 if none waits"
    ),
    "sink_failing": "1 while deliveries to the sink fail",
    "sink_state": "1 for the state of the sink",
    "sink_circuit_state": "1 for the state of the sink's circuit breaker",
    "sink_clock_skewed": (
        "1 while the clocks of the receiver and of the relay differ by more than 30 seconds"
    ),
    "sink_tries_total": "Delivery attempts",
    "sink_try_duration_seconds": "Duration of delivery attempts",
    "sink_deliveries_total": "Deliveries that ended",
    "sink_dead_letters": "Dead letters of the sink that the state file holds",
    "rejected_calls_total": (
        "Calls without valid credentials, and AMQP messages that could not be used"
    ),
    "http_answers_total": "Responses of the API",
    "hub_agents": "Agents of the fleet",
    "hub_agents_with_wrong_clock": (
        "Fresh agents whose clock is wrong by more than 2 seconds, so that they get no orders"
    ),
    "hub_scopes": "Scopes that have agents",
    "hub_reports_total": "Reports about events that were read, copies included",
    "hub_copies_total": "Reports that said nothing new",
    "hub_pulses_total": "Pulses that were read",
    "hub_orders_total": "Start orders to agents that ended",
}
"""Every metric but `build_info`. A counter ends in ``_total``, as Prometheus recommends."""


@dataclass(frozen=True, eq=False, slots=True)
class Metrics(Collector):
    """The values of all metrics at one moment, in the order in which they are first added.

    A metric without values is left out: its value is not known, or the relay has no such part.
    The values of every label are from a fixed set, or are names in the configuration.
    """

    families: dict[str, Any] = field(default_factory=dict)

    @override
    def collect(self) -> Iterator[Family]:
        yield from self.families.values()

    def add(self, name: str, value: float | Histogram | None, **labels: str) -> None:
        if value is None:
            return
        kind: Callable[..., Family] = GaugeMetricFamily
        sample: tuple[Any, ...] = (value,)
        if isinstance(value, Histogram):  # Prometheus counts in each bucket those below it, too
            kind = HistogramMetricFamily
            bounds = [*map(repr, map(float, value.bounds)), "+Inf"]
            sample = (list(zip(bounds, accumulate(value.counts), strict=True)), value.sum)
        elif name.endswith("_total"):
            kind = CounterMetricFamily
        if name not in self.families:
            self.families[name] = kind(f"imds_relay_{name}", _MEANINGS[name], labels=[*labels])
        self.families[name].add_metric([*labels.values()], *sample)

    def add_each(self, name: str, label: str, values: Mapping[str, float], **labels: str) -> None:
        for key, value in values.items():
            self.add(name, value, **labels, **{label: key})


async def read_metrics(relay: Relay, server: ServerState) -> Metrics:
    """Return the values of all metrics. What the state file cannot say is left out."""
    metrics, now, source = Metrics(), relay.clock.now(), relay.source
    info = InfoMetricFamily("imds_relay_build", "The running relay")
    origin = {"scope": relay.origin.scope, "relay": relay.origin.relay}
    info.add_metric((), {"version": __version__, **origin})
    metrics.families["build_info"] = info
    is_refused = server.reloader is not None and server.reloader.problem is not None
    metrics.add("config_last_reload_successful", not is_refused)
    metrics.add("polls_total", source.polls)
    metrics.add("poll_failures", source.failures)
    metrics.add("poll_duration_seconds", source.poll_seconds)
    metrics.add("poll_age_seconds", source.read_age)
    metrics.add("clock_offset_seconds", source.clock_offset)
    metrics.add("source_lost", source.lost)
    metrics.add("store_failing", relay.store.write_error is not None)
    metrics.add("store_commit_duration_seconds", relay.store.commit_seconds)
    # Before the file is read: what is counted is also stored.
    _add_recorded(metrics, server.event_counts, relay.gate.engine.unrecorded_refusals)
    dead_letters: Mapping[str, int] | None = None
    with suppress(StoreUnavailable):
        async with server.long_reads:
            stored, dead_letters = await relay.store.read(lambda tx: _read_stored(tx, relay, now))
        metrics.families.update(stored.families)
    if relay.approvals_link is not None:
        metrics.add("approvals_link_up", relay.approvals_link.is_connected)
    for worker in relay.dispatcher.workers:
        parked = None if dead_letters is None else dead_letters.get(worker.name, 0)
        _add_sink(metrics, worker, parked)
    metrics.add("rejected_calls_total", server.rates.rejections.count)
    answers = {str(status): count for status, count in sorted(server.responses_by_status.items())}
    metrics.add_each("http_answers_total", "status", answers)
    _add_hub(metrics, relay, now)
    return metrics


def _add_recorded(metrics: Metrics, counts: EventCounts, unrecorded: Mapping[str, int]) -> None:
    for change in CHANGES:
        changes = {each: counts.changes[change, each] for each in (*EVENT_TYPES, OTHER)}
        metrics.add_each("events_total", "event_type", changes, change=change)
    for decision in DECISIONS:
        refusals = counts.refusals[decision] + unrecorded.get(decision, 0)
        metrics.add("decisions_total", counts.decisions[decision], decision=decision)
        metrics.add("refusals_total", refusals, decision=decision)
    metrics.add("grants_total", counts.grants)
    metrics.add_each("start_requests_total", "result", counts.start_requests)


def _read_stored(tx: Transaction, relay: Relay, now: datetime) -> tuple[Metrics, Mapping[str, int]]:
    """Return what the state file says, and the numbers of dead letters by sink."""
    metrics = Metrics()
    dead_letters = tx.deliveries.count_by_sink("parked")
    engine, live, missing_votes = relay.gate.engine, Counter[tuple[str, str]](), 0
    for event_type, event_status, count in tx.occurrences.count_live():
        live[azure_event_type_label(event_type), azure_event_status_label(event_status)] += count
    by_approval: Counter[ApprovalState] = Counter()
    next_seconds: dict[str, float] = {}
    for occurrence in tx.occurrences.live_scheduled_by_not_before(MAX_EXAMINED):
        status = engine.status(tx, occurrence, now)
        state = approval_state(status)
        by_approval[state] += 1
        missing_votes += status.votes_missing if status.is_startable else 0
        if status.not_before is not None and not status.is_past_not_before:
            next_seconds.setdefault(state, (status.not_before - now).total_seconds())
    metrics.add("journal_position", tx.head().position)
    for event_type in (*EVENT_TYPES, OTHER):
        by_status = {each: live[event_type, each] for each in (*EVENT_STATUSES, OTHER)}
        metrics.add_each("live_events", "status", by_status, event_type=event_type)
    for state in get_args(ApprovalState):
        metrics.add("scheduled_events", by_approval[state], approval=state)
    metrics.add_each("next_event_seconds", "approval", next_seconds)
    metrics.add("missing_votes", missing_votes)
    mode = engine.effective_approval_mode(tx)
    metrics.add_each("approvals_mode", "mode", _one_of(get_args(Mode), mode))
    return metrics, dead_letters


def _add_sink(metrics: Metrics, worker: Worker, dead_letters: int | None) -> None:
    labels = {"sink": worker.name, "kind": worker.kind}
    metrics.add("sink_waiting", worker.waiting, **labels)
    metrics.add("sink_oldest_waiting_seconds", worker.oldest_age() or 0.0, **labels)
    metrics.add("sink_failing", worker.failing, **labels)
    state = _one_of(get_args(SinkState), worker.state)
    metrics.add_each("sink_state", "state", state, **labels)
    circuit = _one_of(get_args(CircuitState), worker.health.circuit)
    metrics.add_each("sink_circuit_state", "state", circuit, **labels)
    metrics.add("sink_clock_skewed", worker.health.is_skewed, **labels)
    tries: Counter[tuple[AttemptOutcome, str]] = Counter()
    for (outcome, status), count in worker.tries.items():
        # A receiver can send any number.
        label = str(status) if status in _STATUSES else OTHER
        tries[outcome, label if status else ""] += count
    for (outcome, label), count in sorted(tries.items()):
        metrics.add("sink_tries_total", count, **labels, outcome=outcome, status=label)
    metrics.add("sink_try_duration_seconds", worker.try_seconds, **labels)
    ends = {end: worker.ends[end] for end in get_args(EntryState) if end != "waiting"}
    metrics.add_each("sink_deliveries_total", "result", ends, **labels)
    metrics.add("sink_dead_letters", dead_letters, **labels)


def _add_hub(metrics: Metrics, relay: Relay, now: datetime) -> None:
    roster, hub = relay.roster, relay.hub
    if roster is not None:
        states = Counter[str](roster.freshness(agent, now) for agent in roster)
        agents = {state: states[state] for state in ("fresh", "silent", "unknown")}
        metrics.add_each("hub_agents", "state", agents)
        metrics.add("hub_agents_with_wrong_clock", len(roster.agents_with_wrong_clocks(now)))
        silent = len(roster.silent_scopes(now))
        scopes = {"fresh": len(roster.scopes) - silent, "silent": silent}
        metrics.add_each("hub_scopes", "state", scopes)
    if hub is not None:
        metrics.add("hub_reports_total", hub.reports)
        metrics.add("hub_copies_total", hub.merger.copies)
        metrics.add("hub_pulses_total", hub.pulses)
        # The module loads the AMQP libraries, which a hub has loaded.
        from relay.fleet.hub.start_orders import OrderResult  # noqa: PLC0415

        orders = {result: hub.orders.results[result] for result in get_args(OrderResult)}
        metrics.add_each("hub_orders_total", "result", orders)


def _one_of(states: Iterable[str], now: str) -> dict[str, float]:
    return {state: state == now for state in states}
