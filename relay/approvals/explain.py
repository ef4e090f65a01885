"""An event's approval, explained for people: who decides, what is missing, and until when. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from relay.approvals.rules import Rule, RuleConditions
from relay.approvals.status import ApprovalStatus, approval_state
from relay.approvals.transitions import grant_expires_at
from relay.events.timestamps import format_rfc3339
from relay.outbox import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleExplanation:
    """Whether one rule decides about the event."""

    name: str
    unmet_conditions: tuple[str, ...]
    """The keys of ``match`` that the event does not meet."""
    decides: bool
    hours_change_at: datetime | None
    """When the rule's hours begin or end next; None: the rule has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalExplanation:
    """Everything that a person may ask about the approval of one event."""

    state: str
    mode: str
    rules: tuple[RuleExplanation, ...]
    votes: int
    required: int
    missing: int
    may_vote: tuple[str, ...]
    """The principals whose vote would count and is missing."""
    uncovered_resources: tuple[str, ...]
    """The resources that no voter covers yet."""
    voting_closes_at: datetime | None
    counted_votes: tuple[tuple[str, datetime | None], ...]
    """The principal of each vote, and when the vote expires (None: at NotBefore)."""
    holds: tuple[tuple[str, datetime | None], ...]
    """The principal of each hold, and when the hold expires."""
    grant_expires_at: datetime | None
    """When the grant expires if it is not sent before."""


def explain(status: ApprovalStatus, rules: Sequence[Rule], scope: str) -> ApprovalExplanation:
    """Explain an approval. ``rules`` are those of ``approvals.rules``, in their order."""
    grant = status.active_grant
    votes = status.counted_votes if status.quorum is not None else ()
    return ApprovalExplanation(
        state=approval_state(status),
        mode=status.mode,
        rules=tuple(_explain_rule(rule, status, scope) for rule in rules),
        votes=status.vote_count,
        required=status.votes_required,
        missing=status.votes_missing if status.is_open else 0,
        may_vote=status.missing_voters if status.is_open else (),
        uncovered_resources=status.uncovered_resources if status.is_open else (),
        voting_closes_at=status.voting_closes_at,
        counted_votes=_with_expiry(votes, status),
        holds=_with_expiry(status.active_holds, status),
        grant_expires_at=grant_expires_at(grant, status) if grant is not None else None,
    )


def approval_summary(status: ApprovalStatus) -> dict[str, Any]:
    """``approval`` of an event, as the API gives it."""
    closes_at = status.voting_closes_at
    return {
        "state": approval_state(status),
        **status.vote_summary,
        "missing": status.votes_missing if status.is_open else 0,
        "closes": format_rfc3339(closes_at) if closes_at is not None else None,
    }


def _with_expiry(
    decisions: Sequence[Decision], status: ApprovalStatus
) -> tuple[tuple[str, datetime | None], ...]:
    return tuple((decision.principal, status.expires_at(decision)) for decision in decisions)


def _explain_rule(rule: Rule, status: ApprovalStatus, scope: str) -> RuleExplanation:
    hours = rule.match.time
    return RuleExplanation(
        name=rule.name,
        unmet_conditions=tuple(
            key for key in RuleConditions.model_fields if not _is_met(rule, key, status, scope)
        ),
        decides=status.rule is not None and status.rule.name == rule.name,
        hours_change_at=hours.next_change(status.now) if hours is not None else None,
    )


def _is_met(rule: Rule, key: str, status: ApprovalStatus, scope: str) -> bool:
    condition = RuleConditions().model_copy(update={key: getattr(rule.match, key)})
    single_condition_rule = rule.model_copy(update={"match": condition})
    return single_condition_rule.applies_to(status.occurrence.data, scope, status.now)
