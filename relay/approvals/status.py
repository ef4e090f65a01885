"""How the approval of one event stands at one moment. Pure.

`ApprovalStatus` holds every fact that a decision depends on and derives from them what counts now.
`admission` and `transitions` decide by it. Nothing here decides or changes anything.

An occurrence is one stay of an EventId in the document. Its revision is a digest of its state, so
it changes with each ``event.updated``, and votes count for the revision that the voter saw. A grant
says that the rule allows this relay to start one revision. It is ``granted`` first. It is claimed,
in the state ``sent``, before each StartRequest. The answer of IMDS makes it ``accepted`` or
``refused`` (400). It is ``failed`` if the relay gave up without a final answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from relay.approvals.principals import (
    can_mean_machine_in_scope,
    is_any_of,
    is_chat_principal,
    is_machine,
    is_pattern,
    machine_principal,
    own_resources,
)
from relay.approvals.rules import Quorum, Rule, clients_of_same_person, eligible_voters, person_of
from relay.approvals.standing_holds import hold_summaries, is_in_force
from relay.events.data_types import LimitWait
from relay.events.match import covers_all_resources
from relay.events.model import relay_word
from relay.events.timestamps import format_rfc3339
from relay.store import Decision, Grant, GrantState, Mode, StandingHold, TrackedEvent

ApprovalState = Literal[
    "none", "pending", "held", "waiting", "granted", "sent", "accepted", "failed"
]
"""waiting: only a limit keeps this relay from starting the event."""
FAILED_GRANT_STATES = ("failed", "refused")
"""States of a grant for which no StartRequest will be sent any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalStatus:
    """Every fact about one occurrence that a decision depends on, at the moment ``now``."""

    occurrence: TrackedEvent
    decisions: tuple[Decision, ...]
    """The votes and holds that were not replaced, released or voided, oldest first."""
    grants: tuple[Grant, ...]
    rule: Rule | None
    groups: Mapping[str, Sequence[str]]
    """The members of each group of ``approvals.groups``."""
    mode: Mode
    now: datetime
    people: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The principals of each person of ``approvals.people``."""
    resources_by_client: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    """The clients that may approve, and the resources each may decide for (None: all)."""
    in_flight: frozenset[tuple[int, int]] = frozenset()
    """The StartRequests that are being sent now: the id of each grant, and which attempt it is."""
    waiting_for: tuple[LimitWait, ...] = ()
    """The limits that alone keep the event from being granted, or from being sent."""
    standing_holds: tuple[StandingHold, ...] = ()
    """The standing holds about the event that are not over, also those that do not apply yet."""
    is_reminded: bool = False
    """Whether a reminder was recorded for the current revision."""
    damage: str | None = None
    """Why the journal's rows about the event cannot be trusted. Then ``mode`` is off."""

    @property
    def not_before(self) -> datetime | None:
        return self.occurrence.event.not_before_time

    @property
    def voting_closes_at(self) -> datetime | None:
        quorum, not_before = self.quorum, self.not_before
        if quorum is None or not_before is None:
            return not_before
        return not_before - timedelta(seconds=quorum.close_before)

    @property
    def is_past_voting_close_time(self) -> bool:
        return self.voting_closes_at is not None and self.now >= self.voting_closes_at

    @property
    def quorum(self) -> Quorum | None:
        """The votes that the rule asks for; None without a rule or where it is automatic."""
        approve = self.rule.approve if self.rule is not None else None
        return approve if isinstance(approve, Quorum) else None

    @property
    def eligible_voters(self) -> frozenset[str]:
        """Who may vote; nobody without a rule or where it is automatic."""
        if self.quorum is None:
            return frozenset()
        return eligible_voters(self.quorum, self.groups, self.people)

    @property
    def is_startable(self) -> bool:
        """Whether it is in the document, Scheduled and before NotBefore: others are not started."""
        return (
            self.occurrence.live
            and self.occurrence.event.is_scheduled
            and not self.is_past_not_before
        )

    @property
    def is_past_not_before(self) -> bool:
        return self.not_before is not None and self.now >= self.not_before

    @property
    def active_holds(self) -> tuple[Decision, ...]:
        """The holds in force. An event that left the document has none."""
        if not self.occurrence.live:
            return ()
        return tuple(
            decision
            for decision in self.decisions
            if decision.decision == "hold" and not self.is_decision_expired(decision)
        )

    @property
    def active_standing_holds(self) -> tuple[StandingHold, ...]:
        """The standing holds that apply now; none once it has started, ended or was accepted."""
        is_over = not self.occurrence.live or self.occurrence.event.is_started
        if not self.standing_holds or is_over or self.is_accepted_by_imds:
            return ()
        return tuple(hold for hold in self.standing_holds if is_in_force(hold, self.now))

    @property
    def is_held(self) -> bool:
        return bool(self.active_holds or self.active_standing_holds)

    @property
    def counted_votes(self) -> tuple[Decision, ...]:
        eligible = self.eligible_voters
        return tuple(
            decision
            for decision in self.decisions
            if decision.decision == "approve" and self._is_counted(decision, eligible)
        )

    @property
    def votes_required(self) -> int:
        """How many people must vote; 0 without a rule or where it is automatic."""
        return self.quorum.votes if self.quorum is not None else 0

    @property
    def vote_count(self) -> int:
        """How many people have voted; 0 where the rule asks for no votes."""
        if self.quorum is None:
            return 0
        return len({self.person_of_voter(vote.principal) for vote in self.counted_votes})

    @property
    def voters_without_vote(self) -> tuple[str, ...]:
        """Whose vote would count and has not come, sorted; patterns over machines of the scope."""
        people_who_voted = {self.person_of_voter(vote.principal) for vote in self.counted_votes}
        return tuple(
            voter
            for voter in sorted(self.eligible_voters)
            if self.person_of_voter(voter) not in people_who_voted
            and (
                can_mean_machine_in_scope(voter, self.occurrence.scope)
                if is_pattern(voter)
                else self._has_right_to_vote(voter)
            )
        )

    @property
    def vote_count_fields(self) -> dict[str, Any]:
        """``votes``, ``required`` and ``rule``, as events and API answers have them."""
        return {
            "votes": self.vote_count,
            "required": self.votes_required,
            "rule": self.rule.name if self.rule is not None else None,
        }

    @property
    def uncovered_resources(self) -> tuple[str, ...]:
        """The resources for which nobody has voted yet, where the rule says ``each_resource``."""
        if self.quorum is None or not self.quorum.each_resource:
            return ()
        voters = {vote.principal for vote in self.counted_votes}
        return tuple(
            resource
            for resource in self.occurrence.event.resources
            if not any(self._may_decide_for(voter, (resource,)) for voter in voters)
        )

    @property
    def votes_missing(self) -> int:
        """How many more votes are needed at least.

        With ``each_resource``, no vote counts for an event that names no resource.
        """
        return max(0, self.votes_required - self.vote_count, int(bool(self.uncovered_resources)))

    @property
    def is_rule_satisfied(self) -> bool:
        """Whether the rule allows the event to start, apart from holds and the mode."""
        return self.rule is not None and self.votes_missing == 0

    @property
    def active_grant(self) -> Grant | None:
        """The grant for the current revision that has not failed."""
        for grant in reversed(self.grants):
            is_current = grant.revision == self.occurrence.revision
            if is_current and grant.state not in FAILED_GRANT_STATES:
                return grant
        return None

    @property
    def is_grantable(self) -> bool:
        """Whether the event can be granted now, apart from the limits and a dry run."""
        if self.mode == "off" or not self.is_startable or self.is_held:
            return False
        if self.active_grant is not None or self.is_refused_by_imds:
            return False
        return self.is_rule_satisfied and not any(grant.state == "sent" for grant in self.grants)

    @property
    def is_granted(self) -> bool:
        """Whether this revision has a grant that has not failed, or a dry run keeps it from one."""
        would_be = self.mode == "dry-run" and self.is_grantable and not self.waiting_for
        return would_be or self.active_grant is not None

    @property
    def is_granted_or_claimed(self) -> bool:
        """Whether a StartRequest will be sent, or was, unless a hold or a dry run prevents it."""
        return self.is_granted or self.is_grant_sent_or_accepted

    @property
    def is_grant_sent_or_accepted(self) -> bool:
        """Whether a grant is being sent, had no answer, waits for its next try or was accepted."""
        return any(grant.state in ("sent", "accepted") for grant in self.grants)

    def is_grant_in_flight(self, grant: Grant) -> bool:
        """Whether a StartRequest for this grant was claimed and is being sent now."""
        return not grant.is_answered and (grant.id, grant.attempts) in self.in_flight

    @property
    def _states(self) -> list[GrantState]:  # for the current revision
        return [each.state for each in self.grants if each.revision == self.occurrence.revision]

    @property
    def is_accepted_by_imds(self) -> bool:
        """Whether IMDS accepted a StartRequest for the current revision."""
        return "accepted" in self._states

    @property
    def may_be_accepted_by_imds(self) -> bool:
        """Whether IMDS may have accepted a StartRequest, also one that got no answer."""
        return any(grant.may_have_been_accepted for grant in self.grants)

    @property
    def is_refused_by_imds(self) -> bool:
        """Whether IMDS answered 400 for the current revision: the next would get the same."""
        return "refused" in self._states

    def decision_expires_at(self, decision: Decision) -> datetime | None:
        """When it expires; None: with voting. The shorter of the rule then and now applies."""
        expiries = [decision.expires]
        if decision.decision == "approve" and self.quorum is not None and self.quorum.expires:
            expiries.append(decision.at + timedelta(seconds=self.quorum.expires))
        return min((expiry for expiry in expiries if expiry is not None), default=None)

    def is_decision_expired(self, decision: Decision) -> bool:
        expiry = self.decision_expires_at(decision)
        return expiry is not None and expiry <= self.now

    def person_of_voter(self, principal: str) -> str:
        """Return whose vote it is. A machine that has several names votes once, as its resource."""
        person = person_of(principal, self.people)
        own = min(self.resources_of_machine(person), default=None)
        if own is None:
            return person
        machine = machine_principal(self.occurrence.scope, relay_word(own))
        return person_of(machine, self.people)

    def _is_counted(self, vote: Decision, eligible: frozenset[str]) -> bool:
        if vote.revision != self.occurrence.revision or self.is_decision_expired(vote):
            return False
        if vote.dry_run and self.mode != "dry-run":
            return False
        if self.quorum is not None and not is_any_of(eligible, vote.principal):
            return False
        return self._has_right_to_vote(vote.principal)  # otherwise it does not count any more

    def _has_right_to_vote(self, principal: str) -> bool:
        resources = self.occurrence.event.resources
        if self.quorum is not None and self.quorum.each_resource:
            return any(self._may_decide_for(principal, (name,)) for name in resources)
        return self._may_decide_for(principal, resources)

    def resources_of_machine(self, machine: str) -> frozenset[str]:
        """The resources of the event that name a machine. It may decide for no others."""
        return own_resources(machine, self.occurrence.scope, self.occurrence.event.resources)

    def _may_decide_for(self, principal: str, resources: tuple[str, ...]) -> bool:
        if is_machine(principal):
            return bool(resources) and self.resources_of_machine(principal).issuperset(resources)
        clients: tuple[str, ...] = ()
        if principal.startswith(("client:", "mtls:")):
            clients = (principal,)
        elif is_chat_principal(principal):
            clients = clients_of_same_person(principal, self.people)
        # A client that is not there was removed, or may not approve any more.
        return all(
            client in self.resources_by_client
            and covers_all_resources(self.resources_by_client[client], resources)
            for client in clients
        )


def first_matching_rule(
    rules: Sequence[Rule], occurrence: TrackedEvent, now: datetime
) -> Rule | None:
    """The first rule whose conditions the event meets now; only this rule decides."""
    for rule in rules:
        if rule.applies_to(occurrence.data, occurrence.scope, now):
            return rule
    return None


def approval_state(status: ApprovalStatus) -> ApprovalState:
    """The state as the API and messages show it. What IMDS accepted stays accepted."""
    newest_state = status.grants[-1].state if status.grants else None
    if newest_state == "accepted":
        return "accepted"
    if status.is_startable and status.is_held:
        return "held"
    if newest_state == "sent":
        return "sent"
    if status.is_startable and status.waiting_for:
        return "waiting"
    if status.is_startable and status.is_granted:
        return "granted"
    if newest_state in FAILED_GRANT_STATES and (
        status.is_refused_by_imds or not status.is_startable
    ):
        return "failed"
    if status.is_startable and status.quorum is not None and status.mode != "off":
        return "pending"
    return "none"


def approval_json_fields(status: ApprovalStatus) -> dict[str, Any]:
    closes_at = status.voting_closes_at
    return {
        "state": approval_state(status),
        **status.vote_count_fields,
        "missing": status.votes_missing if status.is_startable else 0,
        "closes": format_rfc3339(closes_at) if closes_at is not None else None,
        "waitingFor": list(status.waiting_for),
        "standingHolds": hold_summaries(status.active_standing_holds),
        "runbook": status.rule.runbook if status.rule is not None else None,
    }
