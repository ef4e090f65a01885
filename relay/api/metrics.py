"""Reads the values of all metrics at one moment, for `/metrics`.

`relay.telemetry.metrics` has the meaning of each metric and its labels. The values come from
the parts of the relay, from the state of the server and from the state file. Nothing is read
before somebody asks: a relay that nobody scrapes pays for plain counters only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from http import HTTPStatus
from typing import Any, get_args

from relay import __version__
from relay.api import Relay
from relay.api.state import ServerState
from relay.approvals.status import ApprovalState, approval_state
from relay.delivery.sink_health import CircuitState
from relay.errors import StoreUnavailable
from relay.events.match import EVENT_TYPES
from relay.store import AttemptOutcome, EntryState, Mode, SinkState
from relay.store.transaction import Transaction
from relay.telemetry.event_counts import (
    CHANGES,
    DECISIONS,
    EVENT_STATUSES,
    OTHER,
    START_RESULTS,
    EventCounts,
    azure_event_status_label,
    azure_event_type_label,
)
from relay.telemetry.metrics import Samples, Value

MAX_EXAMINED = 200
"""Scheduled events whose approval is examined for a scrape. The store waits meanwhile."""
_AMQP_STATUSES = {311, 312, 313, 320, 402, 403, 404, 405, 406, 501, 502, 503, 504, 505, 506, 530}
_STATUSES = {*map(int, HTTPStatus), *_AMQP_STATUSES, 540, 541}
"""The statuses of receivers that have a label of their own: those of HTTP and of AMQP 0-9-1."""
# The type OrderResult has the same names. Its module loads the AMQP libraries.
_ORDER_RESULTS = ["accepted", "refused", "failed", "changed", "stale", "returned", "unanswered"]


class _Samples:
    """Collects values by the name of their metric."""

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[tuple[str, ...], Value]]] = {}

    def add(self, name: str, value: Value | None, *labels: str) -> None:
        """Add a value of a metric, whose name is without the prefix. None: it is not known."""
        if value is not None:
            self.found.setdefault(f"imds_relay_{name}", []).append((labels, value))

    def add_counts(
        self, name: str, counts: Mapping[Any, int], keys: Iterable[str], *labels: str
    ) -> None:
        """Add a value for each key of a fixed set. ``labels`` come before that of the key."""
        for key in keys:
            self.add(name, counts.get(key, 0), *labels, key)

    def add_state(self, name: str, current: str, states: Iterable[str], *labels: str) -> None:
        """Add 1 for the current state and 0 for each other."""
        for state in states:
            self.add(name, float(state == current), *labels, state)


async def read_samples(relay: Relay, server: ServerState) -> Samples:
    """Return the values of all metrics. What the state file cannot say is left out."""
    samples, now = _Samples(), relay.clock.now()
    samples.add("build_info", 1, __version__, relay.origin.scope, relay.origin.relay)
    is_refused = server.reloader is not None and server.reloader.problem is not None
    samples.add("config_last_reload_successful", float(not is_refused))
    samples.add("polls_total", relay.source.polls)
    samples.add("poll_failures", relay.source.failures)
    samples.add("source_lost", float(relay.source.lost))
    samples.add("store_failing", float(relay.store.write_error is not None))
    samples.add("store_commit_duration_seconds", relay.store.commit_seconds)
    if relay.polling is not None:
        samples.add("poll_duration_seconds", relay.polling.poll_seconds)
        samples.add("poll_age_seconds", relay.polling.read_age)
        samples.add("clock_offset_seconds", relay.polling.clock_offset)
    unrecorded = relay.gate.engine.unrecorded_refusals
    _add_event_counts(samples, server.event_counts, unrecorded)
    dead_letters: Mapping[str, int] | None = None
    with suppress(StoreUnavailable):
        async with server.long_reads:
            dead_letters = await relay.store.read(lambda tx: _add_stored(samples, tx, relay, now))
    if relay.approvals_link is not None:
        samples.add("approvals_link_up", float(relay.approvals_link.is_connected))
    _add_sinks(samples, relay, dead_letters)
    samples.add("rejected_calls_total", server.rejection_log.count)
    for status, count in sorted(server.responses_by_status.items()):
        samples.add("http_answers_total", count, str(status))
    _add_hub(samples, relay, now)
    return samples.found


def _add_event_counts(
    samples: _Samples, counts: EventCounts, unrecorded_refusals: Counter[str]
) -> None:
    for change in CHANGES:
        for event_type in (*EVENT_TYPES, OTHER):
            samples.add("events_total", counts.changes[change, event_type], change, event_type)
    samples.add_counts("decisions_total", counts.decisions, DECISIONS)
    samples.add_counts("refusals_total", counts.refusals + unrecorded_refusals, DECISIONS)
    samples.add("grants_total", counts.grants)
    samples.add_counts("start_requests_total", counts.start_requests, START_RESULTS)


def _add_stored(
    samples: _Samples, tx: Transaction, relay: Relay, now: datetime
) -> Mapping[str, int]:
    """Add what the state file says, and return the numbers of dead letters by sink."""
    dead_letters = tx.deliveries.count_dead_letters_by_sink()
    engine, live, missing_votes = relay.gate.engine, Counter[tuple[str, str]](), 0
    for event_type, event_status, count in tx.occurrences.count_live():
        live[azure_event_type_label(event_type), azure_event_status_label(event_status)] += count
    by_approval: Counter[ApprovalState] = Counter()
    next_seconds: dict[ApprovalState, float] = {}
    for occurrence in tx.occurrences.live_scheduled_by_not_before(MAX_EXAMINED):
        status = engine.status(tx, occurrence, now)
        state = approval_state(status)
        by_approval[state] += 1
        missing_votes += status.votes_missing if status.is_startable else 0
        if status.not_before is not None and not status.is_past_not_before:
            next_seconds.setdefault(state, (status.not_before - now).total_seconds())
    samples.add("journal_position", tx.head().position)
    samples.add_state("approvals_mode", engine.effective_approval_mode(tx), get_args(Mode))
    for event_type in (*EVENT_TYPES, OTHER):
        for event_status in (*EVENT_STATUSES, OTHER):
            count = live[event_type, event_status]
            samples.add("live_events", count, event_type, event_status)
    samples.add_counts("scheduled_events", by_approval, get_args(ApprovalState))
    samples.add("missing_votes", missing_votes)
    for state, seconds in next_seconds.items():
        samples.add("next_event_seconds", seconds, state)
    return dead_letters


def _add_sinks(samples: _Samples, relay: Relay, dead_letters: Mapping[str, int] | None) -> None:
    for sink in relay.dispatcher.workers:
        labels = (sink.name, sink.kind)
        samples.add("sink_waiting", sink.waiting, *labels)
        samples.add("sink_oldest_waiting_seconds", sink.oldest_age() or 0.0, *labels)
        samples.add("sink_failing", float(sink.failing), *labels)
        samples.add_state("sink_state", sink.state, get_args(SinkState), *labels)
        samples.add_state("sink_circuit_state", sink.circuit_state, get_args(CircuitState), *labels)
        samples.add("sink_clock_skewed", float(sink.health.is_skewed), *labels)
        tries: Counter[tuple[AttemptOutcome, str]] = Counter()
        for (outcome, status), count in sink.tries.items():
            # A receiver can send any number.
            label = str(status) if status in _STATUSES else OTHER
            tries[outcome, label if status else ""] += count
        for (outcome, label), count in sorted(tries.items()):
            samples.add("sink_tries_total", count, *labels, outcome, label)
        samples.add("sink_try_duration_seconds", sink.try_seconds, *labels)
        ends = [state for state in get_args(EntryState) if state != "waiting"]
        samples.add_counts("sink_deliveries_total", sink.ends, ends, *labels)
        if dead_letters is not None:
            samples.add("sink_dead_letters", dead_letters.get(sink.name, 0), *labels)


def _add_hub(samples: _Samples, relay: Relay, now: datetime) -> None:
    roster = relay.roster
    if roster is not None:
        states = Counter(roster.classify_agent_freshness(agent, now) for agent in roster)
        samples.add_counts("hub_agents", states, ("fresh", "silent", "unknown"))
        wrong_clocks = len(roster.agents_with_wrong_clocks(now))
        samples.add("hub_agents_with_wrong_clock", wrong_clocks)
        silent = len(roster.silent_scopes(now))
        samples.add("hub_scopes", len(roster.scopes) - silent, "fresh")
        samples.add("hub_scopes", silent, "silent")
    if relay.hub is not None:
        samples.add("hub_reports_total", relay.hub.reports)
        samples.add("hub_copies_total", relay.hub.redundant_reports)
        samples.add("hub_pulses_total", relay.hub.pulses)
        samples.add_counts("hub_orders_total", relay.order_results, _ORDER_RESULTS)
