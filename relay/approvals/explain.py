"""How an approval is weighed, for people: which rule decides and why no other, what is missing, and until when. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from relay.approvals.rules import Rule, RuleConditions, eligible_voters
from relay.approvals.status import ApprovalStatus, approval_state
from relay.approvals.transitions import grant_expires_at


@dataclass(frozen=True, slots=True)
class RuleExplanation:
    """One rule. ``unmet`` are the keys of its ``match`` that the event does not meet; ``turns``: when its hours begin or end."""

    name: str
    unmet_conditions: tuple[str, ...]
    decides: bool
    hours_change_at: datetime | None


@dataclass(frozen=True, slots=True)
class ApprovalExplanation:
    """``missing`` votes can come from ``may_vote``; ``unspoken`` machines need somebody to speak for them."""

    state: str
    mode: str
    rules: tuple[RuleExplanation, ...]
    votes: int
    required: int
    missing: int
    may_vote: tuple[str, ...]
    uncovered_resources: tuple[str, ...]
    voting_closes_at: datetime | None
    counted_votes: tuple[tuple[str, datetime | None], ...]
    """Whose votes count, and until when; None: until NotBefore."""
    holds: tuple[tuple[str, datetime | None], ...]
    grant_expires_at: datetime | None
    """When what was granted expires unless it is sent."""


def explain(standing: ApprovalStatus, rules: Sequence[Rule], scope: str) -> ApprovalExplanation:
    """Everything that a person would ask about an event's approval."""
    have = {standing.person(one.principal) for one in standing.counted_votes}
    asks = standing.quorum
    may = (
        eligible_voters(asks, standing.groups, standing.people)
        if asks is not None and standing.is_open
        else frozenset()
    )
    return ApprovalExplanation(
        state=approval_state(standing),
        mode=standing.mode,
        rules=tuple(_weighed(rule, standing, scope) for rule in rules),
        votes=standing.vote_count,
        required=standing.votes_required,
        missing=standing.votes_missing if standing.is_open else 0,
        may_vote=tuple(sorted(one for one in may if standing.person(one) not in have)),
        uncovered_resources=standing.uncovered_resources if standing.is_open else (),
        voting_closes_at=standing.voting_closes_at,
        counted_votes=tuple(
            (one.principal, standing.expires_at(one)) for one in standing.counted_votes
        )
        if asks is not None
        else (),
        holds=tuple((one.principal, one.expires) for one in standing.active_holds),
        grant_expires_at=grant_expires_at(standing.active_grant, standing)
        if standing.active_grant is not None
        else None,
    )


def _weighed(rule: Rule, standing: ApprovalStatus, scope: str) -> RuleExplanation:
    hours = rule.match.time
    return RuleExplanation(
        rule.name,
        tuple(key for key in RuleConditions.model_fields if not _meets(rule, key, standing, scope)),
        standing.rule is not None and rule.name == standing.rule.name,
        hours.next_change(standing.now) if hours is not None else None,
    )


def _meets(rule: Rule, key: str, standing: ApprovalStatus, scope: str) -> bool:
    alone = rule.model_copy(
        update={"match": RuleConditions().model_copy(update={key: getattr(rule.match, key)})}
    )
    return alone.matches(standing.occurrence.data, scope, standing.now)
