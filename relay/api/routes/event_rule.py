"""`/v1/events/{eventId}/rule`: which rule decides about an event, and what its approval needs."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import cast

from typing_extensions import TypedDict

from relay.api.routes.events import read_event
from relay.api.schema.route import Call, Route
from relay.approvals.admission import hold_notice
from relay.approvals.explain import explain
from relay.approvals.status import ApprovalState
from relay.events.timestamps import format_rfc3339
from relay.outbox import Mode, Occurrence
from relay.outbox.transaction import Transaction


class RuleEvaluation(TypedDict):
    """A rule of approvals.rules. The first rule with met conditions decides."""

    name: str
    unmet: list[str]
    """The keys of its match that the event does not meet now."""
    decides: bool
    turns: str | None
    """RFC 3339: when its hours begin or end next."""


class CountedVoteOrHold(TypedDict):
    """A vote that counts, or a hold that is in force."""

    principal: str
    until: str | None
    """RFC 3339; null: until NotBefore."""


class ApprovalEvaluation(TypedDict):
    """How the rules evaluate the approval of an event now."""

    eventId: str
    revision: str
    notBefore: str | None
    state: ApprovalState
    mode: Mode
    rule: str | None
    rules: list[RuleEvaluation]
    votes: int
    required: int
    missing: int
    mayVote: list[str]
    """The principals whose votes would count towards the missing votes."""
    uncoveredResources: list[str]
    """The machines that no counted vote covers."""
    closes: str | None
    """RFC 3339: when voting closes."""
    voted: list[CountedVoteOrHold]
    holds: list[CountedVoteOrHold]
    holdMeans: str
    lapses: str | None
    """RFC 3339: when the grant expires if no StartRequest is sent."""


async def _find_evaluation(call: Call) -> ApprovalEvaluation:
    return await read_event(call, lambda tx, occurrence: _evaluate(tx, call, occurrence))


async def _show_evaluation(call: Call) -> ApprovalEvaluation:
    evaluation: ApprovalEvaluation = call.resource
    return evaluation


def _evaluate(tx: Transaction, call: Call, occurrence: Occurrence) -> ApprovalEvaluation:
    service = call.relay.gate.engine
    status = service.status(tx, occurrence, call.relay.clock.now())
    explanation = explain(status, service.settings.rules, service.origin.scope)
    return ApprovalEvaluation(
        eventId=occurrence.data["eventId"],
        revision=occurrence.data["revision"],
        notBefore=occurrence.data["notBefore"],
        state=cast("ApprovalState", explanation.state),
        mode=cast("Mode", explanation.mode),
        rule=status.rule.name if status.rule is not None else None,
        rules=[
            RuleEvaluation(
                name=rule.name,
                unmet=list(rule.unmet_conditions),
                decides=rule.decides,
                turns=_format_time(rule.hours_change_at),
            )
            for rule in explanation.rules
        ],
        votes=explanation.votes,
        required=explanation.required,
        missing=explanation.missing,
        mayVote=list(explanation.may_vote),
        uncoveredResources=list(explanation.uncovered_resources),
        closes=_format_time(explanation.voting_closes_at),
        voted=_active_decisions(explanation.counted_votes),
        holds=_active_decisions(explanation.holds),
        holdMeans=hold_notice(status),
        lapses=_format_time(explanation.grant_expires_at),
    )


def _active_decisions(decisions: Iterable[tuple[str, datetime | None]]) -> list[CountedVoteOrHold]:
    return [
        CountedVoteOrHold(principal=principal, until=_format_time(until))
        for principal, until in decisions
    ]


def _format_time(time: datetime | None) -> str | None:
    return None if time is None else format_rfc3339(time)


ROUTES = (
    Route(
        method="GET",
        path="/v1/events/{eventId}/rule",
        summary="which rule decides about an event, what is missing, and until when",
        handler=_show_evaluation,
        needs="read",
        is_large=True,
        find_resource=_find_evaluation,
    ),
)
