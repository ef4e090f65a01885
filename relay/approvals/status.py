"""How an event's approval stands: all that is known of it at one moment, and what follows from that alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from relay.approvals.rules import Quorum, Rule, eligible_voters, person_for
from relay.events.match import covers_all
from relay.events.model import Event
from relay.outbox import Decision, Grant, Mode, Occurrence

ApprovalState = Literal["none", "pending", "held", "granted", "sent", "accepted", "failed"]
OVER = ("failed", "refused")
"""States of a grant that nothing will come of."""


@dataclass(frozen=True, slots=True)
class ApprovalStatus:
    """Everything about one occurrence that a decision rests on, at one moment.

    ``decisions`` are those that count; ``grants`` all that ever were; ``rule`` is the first that matches the event as it is.
    ``people``: whose principals count once; ``speaks``: the clients that may approve, and the resources that each may speak for
    (None: all).
    """

    occurrence: Occurrence
    decisions: tuple[Decision, ...]
    grants: tuple[Grant, ...]
    rule: Rule | None
    groups: Mapping[str, Sequence[str]]
    mode: Mode
    now: datetime
    people: Mapping[str, Sequence[str]] = field(default_factory=dict)
    client_resources: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)

    @property
    def not_before(self) -> datetime | None:
        """NotBefore, where it is known."""
        return self.occurrence.event.not_before_time

    @property
    def voting_closes_at(self) -> datetime | None:
        """When voting closes."""
        before = self.quorum.close_before if self.quorum is not None else 0.0
        try:
            return (
                self.not_before - timedelta(seconds=before) if self.not_before is not None else None
            )
        except OverflowError:  # a NotBefore in the year 1, as .NET writes "none"
            return self.not_before

    @property
    def quorum(self) -> Quorum | None:
        """The votes that the rule asks for; None where it is automatic or there is none."""
        return (
            self.rule.approve
            if self.rule is not None and isinstance(self.rule.approve, Quorum)
            else None
        )

    @property
    def is_open(self) -> bool:
        """Whether the event is in the document, Scheduled and not yet due: nothing else is ever started by us."""
        event = self.occurrence.event
        return (
            self.occurrence.live
            and is_scheduled(event)
            and (event.not_before_time is None or self.now < event.not_before_time)
        )

    @property
    def active_holds(self) -> tuple[Decision, ...]:
        """Holds that hold now; on what has left the document there is nothing to hold."""
        return (
            tuple(
                one for one in self.decisions if one.decision == "hold" and not self.is_expired(one)
            )
            if self.occurrence.live
            else ()
        )

    @property
    def counted_votes(self) -> tuple[Decision, ...]:
        """Votes that count for the event as it is now, one of each principal who may vote."""
        return tuple(
            one for one in self.decisions if one.decision == "approve" and self._counts(one)
        )

    @property
    def votes_required(self) -> int:
        """How many votes the rule asks for; 0 when it is automatic or there is none."""
        return self.quorum.votes if self.quorum is not None else 0

    @property
    def vote_count(self) -> int:
        """How many people's the rule has got; 0 when it is automatic."""
        return (
            len({self.person(one.principal) for one in self.counted_votes})
            if self.votes_required
            else 0
        )

    @property
    def uncovered_resources(self) -> tuple[str, ...]:
        """The machines for which somebody has yet to speak, where the rule asks for that."""
        if self.quorum is None or not self.quorum.each_resource:
            return ()
        who = [one.principal for one in self.counted_votes]
        return tuple(
            name
            for name in self.occurrence.event.resources
            if not any(self._speaks(one, name) for one in who)
        )

    @property
    def votes_missing(self) -> int:
        """How many votes are missing at least."""
        return max(0, self.votes_required - self.vote_count, 1 if self._waits_for_machines else 0)

    @property
    def is_satisfied(self) -> bool:
        """Whether the rule is satisfied, holds and the switch apart."""
        return self.rule is not None and (self.quorum is None or self.votes_missing == 0)

    @property
    def active_grant(self) -> Grant | None:
        """The grant for the event as it is now that is neither failed nor, when it is serious, a dry run."""
        for one in reversed(self.grants):
            if (
                one.revision == self.occurrence.revision
                and one.state not in OVER
                and one.dry_run == (self.mode == "dry-run")
            ):
                return one
        return None

    @property
    def is_claimed(self) -> bool:
        """Whether a StartRequest was sent, or is about to be, for this occurrence and was not refused for good."""
        return any(one.state in ("sent", "accepted") for one in self.grants)

    @property
    def refused_by_imds(self) -> bool:
        """Whether IMDS answered 400 to a StartRequest for the event as it is now: another would fare no better."""
        return any(
            one.state == "refused" and one.revision == self.occurrence.revision
            for one in self.grants
        )

    def expires_at(self, decision: Decision) -> datetime | None:
        """How long a decision counts; None: until NotBefore. Of the rule under which a vote was given and that of now the shorter."""
        asks = self.quorum if decision.decision == "approve" else None
        by_now = (
            decision.at + timedelta(seconds=asks.expires)
            if asks is not None and asks.expires is not None
            else None
        )
        return min((one for one in (decision.expires, by_now) if one is not None), default=None)

    def is_expired(self, decision: Decision) -> bool:
        """Whether its time is over."""
        until = self.expires_at(decision)
        return until is not None and until <= self.now

    def person(self, principal: str) -> str:
        """Whose principal it is."""
        return person_for(principal, self.people)

    @property
    def _waits_for_machines(self) -> bool:
        # An event that names no machine is spoken for by nobody.
        return (
            self.quorum is not None
            and self.quorum.each_resource
            and (bool(self.uncovered_resources) or not self.occurrence.event.resources)
        )

    def _speaks(self, principal: str, resource: str) -> bool:
        return not self._is_gone(principal) and covers_all(
            self.client_resources.get(principal), (resource,)
        )

    def _counts(self, vote: Decision) -> bool:
        return (
            vote.revision == self.occurrence.revision
            and not self.is_expired(vote)
            and (not vote.dry_run or self.mode == "dry-run")
            and (
                self.quorum is None
                or vote.principal in eligible_voters(self.quorum, self.groups, self.people)
            )
            and self._may_still(vote.principal)
        )

    def _may_still(self, principal: str) -> bool:
        """Whether one who voted could do so now: rights that were taken away since take the vote along."""
        resources = self.occurrence.event.resources
        if self.quorum is not None and self.quorum.each_resource:
            return any(self._speaks(principal, one) for one in resources)
        return not self._is_gone(principal) and covers_all(
            self.client_resources.get(principal), resources
        )

    def _is_gone(self, principal: str) -> bool:
        return (
            principal.partition(":")[0] in ("client", "mtls")
            and principal not in self.client_resources
        )


def is_scheduled(event: Event) -> bool:
    """Whether it can be started: a status that Azure may add in future is no leave to start anything."""
    return (event.event_status or "").lower() == "scheduled"


def rule_for(
    rules: Sequence[Rule], occurrence: Occurrence, scope: str, now: datetime
) -> Rule | None:
    """The first rule whose conditions the event meets now: it alone decides."""
    return next((rule for rule in rules if rule.matches(occurrence.data, scope, now)), None)


def approval_state(standing: ApprovalStatus) -> ApprovalState:
    """How an event's approval stands, for people and programs."""
    last = next((grant.state for grant in reversed(standing.grants) if not grant.dry_run), None)
    if last == "sent" or last == "accepted":  # noqa: PLR1714  # mypy narrows the type by == only
        return last
    if standing.is_open and standing.active_holds:
        return "held"
    if standing.is_open and standing.active_grant is not None:
        return "granted"
    if last in OVER and (standing.refused_by_imds or not standing.is_open):
        return "failed"
    if standing.is_open and standing.votes_required and standing.mode != "off":
        return "pending"
    return "none"
