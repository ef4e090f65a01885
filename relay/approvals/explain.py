"""How an approval is weighed, for people: which rule decides and why no other, what is missing, and until when. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from relay.approvals.rules import Conditions, Rule, voters
from relay.approvals.status import Standing, state_of
from relay.approvals.transitions import lapses


@dataclass(frozen=True, slots=True)
class RuleWeighed:
    """One rule. ``unmet`` are the keys of its ``match`` that the event does not meet; ``turns``: when its hours begin or end."""

    name: str
    unmet: tuple[str, ...]
    decides: bool
    turns: datetime | None


@dataclass(frozen=True, slots=True)
class Weighed:
    """``missing`` votes can come from ``may_vote``; ``unspoken`` machines need somebody to speak for them."""

    state: str
    mode: str
    rules: tuple[RuleWeighed, ...]
    votes: int
    required: int
    missing: int
    may_vote: tuple[str, ...]
    unspoken: tuple[str, ...]
    closes: datetime | None
    voted: tuple[tuple[str, datetime | None], ...]
    """Whose votes count, and until when; None: until NotBefore."""
    holds: tuple[tuple[str, datetime | None], ...]
    lapses: datetime | None
    """When what was granted expires unless it is sent."""


def weigh(standing: Standing, rules: Sequence[Rule], scope: str) -> Weighed:
    """Everything that a person would ask about an event's approval."""
    have = {standing.person(one.principal) for one in standing.voted}
    asks = standing.asks
    may = voters(asks, standing.groups, standing.people) if asks is not None and standing.open else frozenset()
    return Weighed(
        state=state_of(standing),
        mode=standing.mode,
        rules=tuple(_weighed(rule, standing, scope) for rule in rules),
        votes=standing.votes,
        required=standing.required,
        missing=standing.missing if standing.open else 0,
        may_vote=tuple(sorted(one for one in may if standing.person(one) not in have)),
        unspoken=standing.unspoken if standing.open else (),
        closes=standing.closes,
        voted=tuple((one.principal, standing.until(one)) for one in standing.voted) if asks is not None else (),
        holds=tuple((one.principal, one.expires) for one in standing.holds),
        lapses=lapses(standing.grant, standing) if standing.grant is not None else None,
    )


def _weighed(rule: Rule, standing: Standing, scope: str) -> RuleWeighed:
    hours = rule.match.time
    return RuleWeighed(
        rule.name,
        tuple(key for key in Conditions.model_fields if not _meets(rule, key, standing, scope)),
        standing.rule is not None and rule.name == standing.rule.name,
        hours.turns(standing.now) if hours is not None else None,
    )


def _meets(rule: Rule, key: str, standing: Standing, scope: str) -> bool:
    alone = rule.model_copy(update={"match": Conditions().model_copy(update={key: getattr(rule.match, key)})})
    return alone.matches(standing.occurrence.data, scope, standing.now)
