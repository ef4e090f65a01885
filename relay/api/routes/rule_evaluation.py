"""`/v1/events/{eventId}/rule`: which rule decides about an event, and what its approval needs.

For people who ask why an event is not approved: each rule of approvals.rules with the conditions
that the event does not meet, then the votes, holds and limits that count now. The answer is read
as in `relay.api.routes.events`.
"""

from __future__ import annotations

from typing import cast

from typing_extensions import TypedDict

from relay.api.routes.events import (
    SCOPE,
    VoteInForce,
    describe_votes_or_holds_with_expiry,
    parse_scope_name,
    run_read_about_event_in_path,
)
from relay.api.schema.responses import rfc3339_or_null
from relay.api.schema.route import Call, Route
from relay.approvals.admission import hold_caveat
from relay.approvals.limits import LIMIT_NOTICE
from relay.approvals.rules import Rule
from relay.approvals.standing_holds import hold_summaries
from relay.approvals.status import ApprovalState, ApprovalStatus, approval_state
from relay.approvals.transitions import remind_at
from relay.events.data_types import LimitWait, StandingHoldInForce
from relay.store import Mode, TrackedEvent
from relay.store.transaction import Transaction


class EvaluatedRule(TypedDict):
    """A rule of approvals.rules. The first rule with met conditions decides."""

    name: str
    unmet: list[str]
    """The keys of its match that the event does not meet now."""
    decides: bool
    turns: str | None
    """RFC 3339: when its hours begin or end next."""


class ApprovalEvaluation(TypedDict):
    """How the rules evaluate the approval of an event now."""

    eventId: str
    revision: str
    notBefore: str | None
    state: ApprovalState
    mode: Mode
    rule: str | None
    rules: list[EvaluatedRule]
    votes: int
    required: int
    missing: int
    mayVote: list[str]
    """The principals, or patterns over machines, whose votes would count."""
    uncoveredResources: list[str]
    """The machines that no counted vote covers."""
    closes: str | None
    """RFC 3339: when voting closes."""
    voted: list[VoteInForce]
    holds: list[VoteInForce]
    standingHolds: list[StandingHoldInForce]
    """The standing holds that keep this relay from starting the event."""
    holdMeans: str
    waitingFor: list[LimitWait]
    """The limits that alone keep this relay from starting the event."""
    limitMeans: str
    reminder: str | None
    """RFC 3339: when people are reminded of missing votes; null: they are not, or were already."""
    runbook: str | None
    """The runbook of the rule."""


async def _show_evaluation(call: Call) -> ApprovalEvaluation:
    scope: str | None = call.parameters
    return await run_read_about_event_in_path(
        call, scope, lambda tx, occurrence: _make_approval_evaluation(tx, call, occurrence)
    )


def _make_approval_evaluation(
    tx: Transaction, call: Call, occurrence: TrackedEvent
) -> ApprovalEvaluation:
    approvals, data = call.relay.gate.engine, occurrence.data
    status = approvals.status(tx, occurrence, call.relay.clock.now())
    return ApprovalEvaluation(
        eventId=data["eventId"],
        revision=data["revision"],
        notBefore=data["notBefore"],
        state=approval_state(status),
        mode=status.mode,
        rule=status.rule.name if status.rule is not None else None,
        rules=[_evaluated_rule(rule, status) for rule in approvals.settings.rules],
        votes=status.vote_count,
        required=status.votes_required,
        missing=status.votes_missing if status.is_startable else 0,
        mayVote=list(status.voters_without_vote) if status.is_startable else [],
        uncoveredResources=list(status.uncovered_resources) if status.is_startable else [],
        closes=rfc3339_or_null(status.voting_closes_at),
        voted=describe_votes_or_holds_with_expiry(
            status.counted_votes if status.quorum is not None else (), status
        ),
        holds=describe_votes_or_holds_with_expiry(status.active_holds, status),
        standingHolds=cast(
            "list[StandingHoldInForce]", hold_summaries(status.active_standing_holds)
        ),
        holdMeans=hold_caveat(status),
        waitingFor=[cast("LimitWait", wait.to_json()) for wait in status.waiting_for],
        limitMeans=LIMIT_NOTICE,
        reminder=rfc3339_or_null(remind_at(status)),
        runbook=status.runbook,
    )


def _evaluated_rule(rule: Rule, status: ApprovalStatus) -> EvaluatedRule:
    occurrence, hours = status.occurrence, rule.match.time
    return EvaluatedRule(
        name=rule.name,
        unmet=rule.unmet_conditions(occurrence.data, occurrence.scope, status.now),
        decides=status.rule is not None and status.rule.name == rule.name,
        turns=rfc3339_or_null(hours.next_change(status.now) if hours is not None else None),
    )


ROUTES = (
    Route(
        method="GET",
        path="/v1/events/{eventId}/rule",
        summary="which rule decides about an event, what is missing, and until when",
        handler=_show_evaluation,
        needs="read",
        is_large=True,
        problem_statuses=(404,),
        parameters=(SCOPE,),
        parse_parameters=parse_scope_name,
    ),
)
