"""What the rules say. Pure: everything that is known of an event comes in, a decision with its reason comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from relay.approvals import Rule, Votes, voters
from relay.approvals.request import Approval, Rights
from relay.events.document import Event
from relay.events.match import covers, matches
from relay.events.moment import rfc3339
from relay.outbox import Decision, Grant, Mode, Occurrence

State = Literal["none", "pending", "held", "granted", "sent", "accepted", "failed"]
Why = Literal["changed", "expired", "ended"]
_OPEN = ("granted", "sent")
HOLD_MEANS = (
    "a hold stops this relay alone: Azure proceeds at NotBefore regardless, and other relays and Azure Resource Manager can approve"
)
"""Every text about a hold says it (contract, section 8)."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Everything about one occurrence that a decision rests on, at one moment.

    ``decisions`` are those that count; ``grants`` all that ever were; ``rule`` is the first that matches the event as it is.
    """

    occurrence: Occurrence
    decisions: tuple[Decision, ...]
    grants: tuple[Grant, ...]
    rule: Rule | None
    groups: Mapping[str, Sequence[str]]
    mode: Mode
    now: datetime

    @property
    def due(self) -> datetime | None:
        """NotBefore, where it is known."""
        return self.occurrence.event.due

    @property
    def closes(self) -> datetime | None:
        """When voting closes."""
        before = self.rule.approve.close_before if self.rule is not None and isinstance(self.rule.approve, Votes) else 0.0
        try:
            return self.due - timedelta(seconds=before) if self.due is not None else None
        except OverflowError:  # a NotBefore in the year 1, as .NET writes "none"
            return self.due

    @property
    def open(self) -> bool:
        """Whether the event is in the document, Scheduled and not yet due: nothing else is ever started by us."""
        event = self.occurrence.event
        return self.occurrence.live and _scheduled(event) and (event.due is None or self.now < event.due)

    @property
    def holds(self) -> tuple[Decision, ...]:
        """Holds that hold now."""
        return tuple(one for one in self.decisions if one.decision == "hold" and not _expired(one, self.now))

    @property
    def voted(self) -> tuple[Decision, ...]:
        """Votes that count for the event as it is now, one of each principal who may vote."""
        return tuple(one for one in self.decisions if one.decision == "approve" and self._counts(one))

    @property
    def required(self) -> int:
        """How many votes the rule asks for; 0 when it is automatic or there is none."""
        return self.rule.approve.votes if self.rule is not None and isinstance(self.rule.approve, Votes) else 0

    @property
    def votes(self) -> int:
        """How many the rule has got; 0 when it is automatic."""
        return len({one.principal for one in self.voted}) if self.required else 0

    @property
    def satisfied(self) -> bool:
        """Whether the rule is satisfied, holds and the switch apart."""
        return self.rule is not None and (self.rule.approve == "automatic" or self.votes >= self.required)

    @property
    def grant(self) -> Grant | None:
        """The grant for the event as it is now that is neither failed nor, when it is serious, a dry run."""
        for one in reversed(self.grants):
            if one.revision == self.occurrence.revision and one.state != "failed" and one.dry_run == (self.mode == "dry-run"):
                return one
        return None

    @property
    def claimed(self) -> bool:
        """Whether a StartRequest was sent, or is about to be, for this occurrence and was not refused for good."""
        return any(one.state in ("sent", "accepted") for one in self.grants)

    @property
    def refused_by_imds(self) -> bool:
        """Whether IMDS answered 400 to a StartRequest for the event as it is now: another would fare no better."""
        return any(one.state == "failed" and one.status == 400 and one.revision == self.occurrence.revision for one in self.grants)  # HTTP

    def _counts(self, vote: Decision) -> bool:
        approve = self.rule.approve if self.rule is not None else None
        return (
            vote.revision == self.occurrence.revision
            and not _expired(vote, self.now)
            and (not vote.dry_run or self.mode == "dry-run")
            and (not isinstance(approve, Votes) or vote.principal in voters(approve, self.groups))
        )


def _expired(decision: Decision, now: datetime) -> bool:
    return decision.expires is not None and decision.expires <= now


def _scheduled(event: Event) -> bool:
    # A status that Azure may add in future is no leave to start anything.
    return (event.event_status or "").lower() == "scheduled"


def rule_for(rules: Sequence[Rule], occurrence: Occurrence, scope: str) -> Rule | None:
    """The first rule whose conditions the event meets: it alone decides."""
    return next((rule for rule in rules if matches(rule.match, occurrence.data, scope)), None)


# --- what somebody asks


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not accepted. ``status`` is that of HTTP."""

    status: int
    reason: str


def judge(approval: Approval, standing: Standing | None) -> Refusal | None:
    """Whether a request is refused: 404, then 409, then 403, then 503 (contract, section 8). None: it is accepted.

    ``standing`` is None when the EventId is unknown or the scope is another.
    """
    if standing is None:
        return Refusal(404, "no such event in this scope; see GET /v1/events")
    refusal = _too_late(approval, standing) or _not_allowed(approval, standing)
    if refusal is None and standing.mode == "off":
        refusal = Refusal(503, "approvals are off; an operator can turn them on: imds-relay approvals on")
    return refusal


def _too_late(approval: Approval, standing: Standing) -> Refusal | None:
    occurrence, event = standing.occurrence, standing.occurrence.event
    if not occurrence.live:
        return Refusal(409, "the event has ended")
    if event.started:
        return Refusal(409, "the event has started already")
    if approval.decision == "release":
        return Refusal(409, f"no hold is on this event; {HOLD_MEANS}") if not standing.holds else None
    closes = standing.closes if approval.decision == "approve" else standing.due
    if closes is not None and standing.now >= closes:
        return Refusal(409, f"too late: it closed at {rfc3339(closes)}, it is {rfc3339(standing.now)}")
    if approval.decision == "hold":
        return Refusal(409, f"too late: the StartRequest is on its way; {HOLD_MEANS}") if standing.claimed else None
    if approval.revision != occurrence.revision:
        return Refusal(409, f"the event has changed since that revision; the current one is {occurrence.revision}")
    if not _scheduled(event):
        return Refusal(409, f"only a Scheduled event can be approved, this one is {event.event_status or 'without a status'}")
    if standing.refused_by_imds:
        return Refusal(409, "IMDS refused the StartRequest for this event (400)")
    return None


def _not_allowed(approval: Approval, standing: Standing) -> Refusal | None:
    rights = approval.caller.rights
    lacking = _lacking(approval, rights, standing)
    if lacking is not None:
        return Refusal(403, lacking)
    if not covers(rights.resources, standing.occurrence.event.resources):
        return Refusal(403, "the event concerns resources that you may not speak for; every one must be yours")
    if approval.decision != "approve":
        return None
    if standing.rule is None:
        return Refusal(403, "no rule of approvals.rules allows this event to be approved")
    approve = standing.rule.approve
    if isinstance(approve, Votes) and approval.caller.principal not in voters(approve, standing.groups):
        return Refusal(403, f"rule {standing.rule.name} takes votes from others only")
    return None


def _lacking(approval: Approval, rights: Rights, standing: Standing) -> str | None:
    if approval.decision != "release":
        return None if approval.decision in rights.can else f"you may not {approval.decision}: it is not in your rights (can)"
    if "operate" in rights.can:
        return None
    if "hold" not in rights.can:
        return "you may not release: neither hold nor operate is in your rights (can)"
    own = any(hold.principal == approval.caller.principal for hold in standing.holds)
    return None if own else f"the hold is another's; its holder, or one who may operate, can release it; {HOLD_MEANS}"


# --- what follows from time, from the document and from what was decided


@dataclass(frozen=True, slots=True)
class Discount:
    """These votes count no more. ``why`` is None when they served their purpose, and nothing is told."""

    decisions: tuple[Decision, ...]
    why: Why | None


@dataclass(frozen=True, slots=True)
class Expire:
    """This hold has expired: it counts as released."""

    hold: Decision


@dataclass(frozen=True, slots=True)
class Fail:
    """Give this grant up, for this reason."""

    grant: Grant
    reason: str


@dataclass(frozen=True, slots=True)
class Allow:
    """The rule is satisfied and nothing stands in the way: grant it."""

    rule: Rule


Effect = Discount | Expire | Fail | Allow


def step(standing: Standing, in_flight: frozenset[int] = frozenset()) -> list[Effect]:
    """What has to be done about an event now; nothing when it was done already.

    ``in_flight`` are grants whose StartRequest is being sent at this moment: what becomes of them is for its answer to say.
    """
    return [*_discounts(standing, in_flight), *_expiries(standing), *_failures(standing, in_flight), *_allowance(standing)]


def _discounts(standing: Standing, in_flight: frozenset[int]) -> list[Effect]:
    undecided = {grant.revision for grant in standing.grants if grant.id in in_flight}
    votes = [one for one in standing.decisions if one.decision == "approve" and one.revision not in undecided]
    spent = {grant.revision for grant in standing.grants if grant.state == "accepted"}
    by_reason: dict[Why | None, list[Decision]] = {}
    for vote in votes:
        why = _why_void(vote, standing)
        if why is not None:
            by_reason.setdefault(None if vote.revision in spent else why, []).append(vote)
    if not standing.occurrence.live:
        by_reason.setdefault(None, []).extend(one for one in standing.decisions if one.decision == "hold")
    return [Discount(tuple(found), why) for why, found in by_reason.items() if found]


def _why_void(vote: Decision, standing: Standing) -> Why | None:
    if not standing.occurrence.live:
        return "ended"
    if vote.revision != standing.occurrence.revision:
        return "changed"
    if _expired(vote, standing.now) or (standing.due is not None and standing.now >= standing.due):
        return "expired"
    return None


def _expiries(standing: Standing) -> list[Effect]:
    if not standing.occurrence.live:
        return []
    return [Expire(one) for one in standing.decisions if one.decision == "hold" and _expired(one, standing.now)]


def _failures(standing: Standing, in_flight: frozenset[int]) -> list[Effect]:
    effects: list[Effect] = []
    for grant in standing.grants:
        if grant.state in _OPEN and grant.id not in in_flight:
            reason = why_failed(grant, standing)
            if reason is not None:
                effects.append(Fail(grant, reason))
    return effects


def why_failed(grant: Grant, standing: Standing) -> str | None:
    """Why a grant that has not been accepted never will be, or None."""
    occurrence, sent = standing.occurrence, grant.state == "sent"
    unknown = "; whether IMDS took the StartRequest is not known" if sent else ""
    if not occurrence.live:
        return f"the event ended before a StartRequest was accepted{unknown}"
    if occurrence.event.started:
        return f"the event started before a StartRequest was accepted{unknown}"
    if grant.revision != occurrence.revision:
        return f"the event changed before a StartRequest was accepted{unknown}"
    if standing.due is not None and standing.now >= standing.due:
        return f"NotBefore passed before a StartRequest was accepted{unknown}"
    if not standing.satisfied:
        return f"the approval expired, or the rules changed, before a StartRequest was accepted{unknown}"
    return None


def _allowance(standing: Standing) -> list[Effect]:
    allowed = (
        standing.open
        and standing.mode != "off"
        and standing.rule is not None
        and standing.satisfied
        and not standing.holds
        and standing.grant is None
        and not any(grant.state == "sent" for grant in standing.grants)
        and not standing.refused_by_imds
    )
    return [Allow(standing.rule)] if allowed and standing.rule is not None else []


def claimable(grant: Grant, standing: Standing) -> bool:
    """The last check before the POST: switch, hold, revision, expiry and quorum, all again."""
    return standing.mode == "on" and not grant.dry_run and standing.open and not standing.holds and why_failed(grant, standing) is None


def next_moment(standing: Standing) -> datetime | None:
    """When time alone will change something about an event; None: never."""
    moments = [one.expires for one in standing.decisions if one.expires is not None]
    if standing.due is not None and (standing.decisions or any(grant.state in _OPEN for grant in standing.grants)):
        moments.append(standing.due)
    return min((moment for moment in moments if moment > standing.now), default=None)


def state_of(standing: Standing) -> State:
    """How an event's approval stands, for people and programs."""
    last = next((grant.state for grant in reversed(standing.grants) if not grant.dry_run), None)
    if last == "sent" or last == "accepted":  # noqa: PLR1714  # mypy narrows the type by == only
        return last
    if standing.open and standing.holds:
        return "held"
    if standing.open and standing.grant is not None:
        return "granted"
    if last == "failed" and (standing.refused_by_imds or not standing.open):
        return "failed"
    if standing.open and standing.required and standing.mode != "off":
        return "pending"
    return "none"
