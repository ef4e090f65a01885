"""`/v1/events`: scheduled events with the state of their approval, votes and deliveries.

An occurrence is one time that an EventId was in the document of a scope. A path names an event by
its EventId, or on a hub by `<EventId>@<scope>`, and means its newest occurrence. `…/rule` is for
people who ask why an event is not approved: each rule of approvals.rules with the conditions that
the event does not meet, then the votes, holds and limits that count now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar, cast

import orjson
from pydantic import with_config
from typing_extensions import TypedDict

from relay.api.calls import MAX_DETAIL_ROWS, PAGE_SIZE, Call, Cursor, Scope, flag, get_page
from relay.api.responses import Problem, rfc3339_or_null
from relay.approvals.admission import UNKNOWN_EVENT, ambiguous_scope_refusal, hold_caveat
from relay.approvals.request import DecisionKind
from relay.approvals.rules import Rule
from relay.approvals.status import ApprovalState, ApprovalStatus, approval_json_fields
from relay.approvals.transitions import remind_at
from relay.chat.cards.card import decisions_available_to_caller
from relay.events.cloudevent import CloudEvent
from relay.events.data_types import EventData, LimitWait, Remarks, StandingHoldInForce
from relay.events.timestamps import format_rfc3339
from relay.sentences import LIMIT_NOTICE, event_outcome_text, impact_text, said
from relay.store import Decision, Mode, TrackedEvent
from relay.store.deliveries import DeliverySummary
from relay.store.rows import PageLimit
from relay.store.transaction import Transaction
from relay.telemetry.lines import OTHER, azure_event_type_label

T = TypeVar("T")


class VoteInForce(TypedDict):
    """A vote that counts, or a hold that is in force."""

    principal: str
    until: str | None
    """RFC 3339; null: until NotBefore."""


class ApprovalNow(TypedDict):
    """Where the approval of an event stands."""

    state: ApprovalState
    rule: str | None
    votes: int
    required: int
    missing: int
    closes: str | None
    """RFC 3339: when voting closes."""
    waitingFor: list[LimitWait]
    """The limits that alone keep this relay from starting the event."""
    standingHolds: list[StandingHoldInForce]
    """The standing holds that keep this relay from starting the event."""
    runbook: str | None
    voted: list[VoteInForce]
    """The votes that count."""
    mayVote: list[str]
    """The principals, or patterns over machines, whose votes are missing and would count."""
    holds: list[VoteInForce]


class ApprovalSummary(ApprovalNow):
    """The state of an event's approval."""

    decisions: list[DecisionKind]
    """What the caller may decide about the event now."""


class EventSummary(EventData):
    """A scheduled event."""

    scope: str
    """The group of VMs that read the document with this event."""
    occurrence: int
    """How often this EventId has been in the document of its scope, this time included."""
    outcome: Literal["completed", "canceled", "unknown"] | None
    """null while it is in the document."""
    firstSeen: str  # noqa: N815
    lastChanged: str  # noqa: N815
    means: str
    """What it does to its machines, or how it ended, in a sentence for people."""
    approval: ApprovalSummary


@with_config({"extra": "allow"})
class CloudEventDocument(TypedDict):
    """A CloudEvent; `imds-relay schema` has the schema of each type."""

    specversion: str
    id: str
    type: str
    source: str
    time: str
    data: dict[str, Any]


class RecordedDecision(Remarks, TypedDict):
    """A vote, hold or release that was accepted."""

    approvalId: str
    decision: DecisionKind
    principal: str
    channel: str
    revision: str
    at: str
    counts: bool


class EventDetails(EventSummary):
    """A scheduled event with its history."""

    history: list[CloudEventDocument]
    """The newest events, oldest first."""
    said: list[str]
    """What each of these events says, in a sentence for people."""
    votes: list[RecordedDecision]
    """The newest decisions, oldest first."""
    deliveries: list[DeliverySummary]
    """The newest deliveries, newest first."""
    next: str | None
    """The cursor of the history before; null: there is none."""


class EventPage(TypedDict):
    """A page of events, the newest first."""

    items: list[EventSummary]
    next: str | None


_LIVE = flag("live", "true: only events in Azure's document now; false: only those that ended")


async def _read_event(
    call: Call, reference: str, scope: str | None, read: Callable[[Transaction, TrackedEvent], T]
) -> T:
    """Return what `read` finds of a path's event. Raises Problem 404, or 422 for several scopes."""

    def work(tx: Transaction) -> T:
        occurrences = tx.occurrences.find_occurrences_by_reference(reference, scope)
        if len(occurrences) == 1:
            return read(tx, occurrences[0])
        refusal = ambiguous_scope_refusal(occurrences) if occurrences else UNKNOWN_EVENT
        raise Problem(refusal.status, **refusal.body)

    return await call.run_long_read(work)


@get_page("/v1/events", "current and recent events")
async def list_events(
    call: Call, cursor: Cursor, scope: Scope, live: Annotated[bool | None, _LIVE]
) -> EventPage:
    def read(tx: Transaction) -> EventPage:
        page, has_more = tx.occurrences.occurrence_page(
            cursor, PageLimit(PAGE_SIZE), scope=scope, live=live
        )
        return EventPage(
            items=[_event_summary(tx, call, row) for row in page],
            next=str(page[-1].id) if has_more else None,
        )

    return await call.run_long_read(read)


@get_page(
    "/v1/events/{eventId}", "one event with its history, votes and deliveries, the newest of each"
)
async def show_event(call: Call, reference: str, cursor: Cursor, scope: Scope) -> EventDetails:
    def read(tx: Transaction, occurrence: TrackedEvent) -> EventDetails:
        rows, has_more = tx.journal.history_page(
            occurrence.key, occurrence.position, cursor, PageLimit(MAX_DETAIL_ROWS)
        )
        bodies = [row.body for row in reversed(rows)]
        told = map(CloudEvent.parse, bodies)
        is_dry_run = call.relay.gate.engine.effective_approval_mode(tx) == "dry-run"
        in_force = {
            each.approval_id
            for each in tx.approvals.of_occurrence(occurrence).decisions
            if is_dry_run or each.decision == "hold" or not each.dry_run
        }
        return EventDetails(
            **_event_summary(tx, call, occurrence),
            # The stored JSON is sent unchanged.
            history=[cast("CloudEventDocument", orjson.Fragment(body)) for body in bodies],
            said=[said(event.name, event.data) for event in told],
            votes=[
                RecordedDecision(
                    approvalId=decision.approval_id,
                    decision=decision.decision,
                    principal=decision.principal,
                    channel=decision.channel,
                    revision=decision.revision,
                    **decision.remarks,
                    at=format_rfc3339(decision.at),
                    counts=decision.approval_id in in_force,
                )
                for decision in tx.approvals.decisions_about(occurrence, limit=MAX_DETAIL_ROWS)
            ],
            deliveries=[
                delivery
                for delivery in tx.deliveries.page(event_key=occurrence.key, limit=MAX_DETAIL_ROWS)
                if delivery["recorded"] >= occurrence.first_seen
            ],
            next=str(rows[-1].position) if has_more else None,
        )

    return await _read_event(call, reference, scope, read)


def _event_summary(tx: Transaction, call: Call, occurrence: TrackedEvent) -> EventSummary:
    status = call.relay.gate.engine.status(tx, occurrence, call.relay.clock.now())
    decisions = decisions_available_to_caller(call.caller, status)
    approval = ApprovalSummary(**_approval_now(status), decisions=decisions)
    if not status.votes_missing:
        approval["mayVote"] = []
    data = cast("EventData", occurrence.data)
    means = event_outcome_text(occurrence.outcome)
    if occurrence.live:
        means = impact_text(data["eventType"], data["durationSeconds"], len(data["resources"]))
        if azure_event_type_label(data["eventType"]) == OTHER:
            means = data["description"] or means
    return EventSummary(
        **data,
        scope=occurrence.scope,
        occurrence=occurrence.number,
        outcome=cast("Literal['completed', 'canceled', 'unknown'] | None", occurrence.outcome),
        firstSeen=occurrence.first_seen,
        lastChanged=occurrence.last_changed,
        means=means,
        approval=approval,
    )


def _approval_now(status: ApprovalStatus) -> ApprovalNow:
    def in_force(decisions: Iterable[Decision]) -> list[VoteInForce]:
        return [
            VoteInForce(
                principal=decision.principal,
                until=rfc3339_or_null(status.decision_expires_at(decision)),
            )
            for decision in decisions
        ]

    lists = {
        "voted": in_force(status.counted_votes if status.quorum is not None else ()),
        "mayVote": list(status.voters_without_vote) if status.is_startable else [],
        "holds": in_force(status.active_holds),
    }
    return cast("ApprovalNow", approval_json_fields(status) | lists)


class EvaluatedRule(TypedDict):
    """A rule of approvals.rules. The first rule with met conditions decides."""

    name: str
    unmet: list[str]
    """The keys of its match that the event does not meet now."""
    decides: bool
    turns: str | None
    """RFC 3339: when its hours begin or end next."""


class ApprovalEvaluation(ApprovalNow):
    """How the rules evaluate the approval of an event now."""

    eventId: str
    revision: str
    notBefore: str | None
    mode: Mode
    rules: list[EvaluatedRule]
    uncoveredResources: list[str]
    """The machines that no counted vote covers."""
    holdMeans: str
    limitMeans: str
    reminder: str | None
    """RFC 3339: when people are reminded of missing votes; null: they are not, or were already."""


@get_page(
    "/v1/events/{eventId}/rule",
    "which rule decides about an event, what is missing, and until when",
)
async def show_rule(call: Call, reference: str, scope: Scope) -> ApprovalEvaluation:
    def evaluate(tx: Transaction, occurrence: TrackedEvent) -> ApprovalEvaluation:
        engine, data = call.relay.gate.engine, occurrence.data
        status = engine.status(tx, occurrence, call.relay.clock.now())
        return ApprovalEvaluation(
            **_approval_now(status),
            eventId=data["eventId"],
            revision=data["revision"],
            notBefore=data["notBefore"],
            mode=status.mode,
            rules=[_evaluated_rule(rule, status) for rule in engine.settings.rules],
            uncoveredResources=list(status.uncovered_resources) if status.is_startable else [],
            holdMeans=hold_caveat(status),
            limitMeans=LIMIT_NOTICE,
            reminder=rfc3339_or_null(remind_at(status)),
        )

    return await _read_event(call, reference, scope, evaluate)


def _evaluated_rule(rule: Rule, status: ApprovalStatus) -> EvaluatedRule:
    occurrence, hours = status.occurrence, rule.match.time
    return EvaluatedRule(
        name=rule.name,
        unmet=rule.unmet_conditions(occurrence.data, occurrence.scope, status.now),
        decides=status.rule is not None and status.rule.name == rule.name,
        turns=rfc3339_or_null(hours.next_change(status.now) if hours is not None else None),
    )
