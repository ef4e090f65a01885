"""What the rules say. Pure: everything that is known of an event comes in, a decision with its reason comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from relay.approvals.request import Approval, Rights
from relay.approvals.rules import Rule, Votes, person_of, voters
from relay.events.document import Event
from relay.events.match import covers
from relay.events.moment import rfc3339
from relay.outbox import Decision, Grant, Mode, Occurrence

State = Literal["none", "pending", "held", "granted", "sent", "accepted", "failed"]
Why = Literal["changed", "expired", "ended"]
_OPEN = ("granted", "sent")
_OVER = ("failed", "refused")
HOLD_MEANS = (
    "a hold stops this relay alone: Azure proceeds at NotBefore regardless, and other relays and Azure Resource Manager can approve"
)
"""Every text about a hold says it (contract, section 8)."""


@dataclass(frozen=True, slots=True)
class Standing:
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
    speaks: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)

    @property
    def due(self) -> datetime | None:
        """NotBefore, where it is known."""
        return self.occurrence.event.due

    @property
    def closes(self) -> datetime | None:
        """When voting closes."""
        before = self.asks.close_before if self.asks is not None else 0.0
        try:
            return self.due - timedelta(seconds=before) if self.due is not None else None
        except OverflowError:  # a NotBefore in the year 1, as .NET writes "none"
            return self.due

    @property
    def asks(self) -> Votes | None:
        """The votes that the rule asks for; None where it is automatic or there is none."""
        return self.rule.approve if self.rule is not None and isinstance(self.rule.approve, Votes) else None

    @property
    def open(self) -> bool:
        """Whether the event is in the document, Scheduled and not yet due: nothing else is ever started by us."""
        event = self.occurrence.event
        return self.occurrence.live and _scheduled(event) and (event.due is None or self.now < event.due)

    @property
    def holds(self) -> tuple[Decision, ...]:
        """Holds that hold now."""
        return tuple(one for one in self.decisions if one.decision == "hold" and not self.expired(one))

    @property
    def voted(self) -> tuple[Decision, ...]:
        """Votes that count for the event as it is now, one of each principal who may vote."""
        return tuple(one for one in self.decisions if one.decision == "approve" and self._counts(one))

    @property
    def required(self) -> int:
        """How many votes the rule asks for; 0 when it is automatic or there is none."""
        return self.asks.votes if self.asks is not None else 0

    @property
    def votes(self) -> int:
        """How many people's the rule has got; 0 when it is automatic."""
        return len({self.person(one.principal) for one in self.voted}) if self.required else 0

    @property
    def unspoken(self) -> tuple[str, ...]:
        """The machines for which somebody has yet to speak, where the rule asks for that."""
        if self.asks is None or not self.asks.each_resource:
            return ()
        who = [one.principal for one in self.voted]
        return tuple(name for name in self.occurrence.event.resources if not any(self._speaks(one, name) for one in who))

    @property
    def missing(self) -> int:
        """How many votes are missing at least."""
        return max(0, self.required - self.votes, 1 if self._waits_for_machines else 0)

    @property
    def satisfied(self) -> bool:
        """Whether the rule is satisfied, holds and the switch apart."""
        return self.rule is not None and (self.asks is None or self.missing == 0)

    @property
    def grant(self) -> Grant | None:
        """The grant for the event as it is now that is neither failed nor, when it is serious, a dry run."""
        for one in reversed(self.grants):
            if one.revision == self.occurrence.revision and one.state not in _OVER and one.dry_run == (self.mode == "dry-run"):
                return one
        return None

    @property
    def claimed(self) -> bool:
        """Whether a StartRequest was sent, or is about to be, for this occurrence and was not refused for good."""
        return any(one.state in ("sent", "accepted") for one in self.grants)

    @property
    def refused_by_imds(self) -> bool:
        """Whether IMDS answered 400 to a StartRequest for the event as it is now: another would fare no better."""
        return any(one.state == "refused" and one.revision == self.occurrence.revision for one in self.grants)

    def until(self, decision: Decision) -> datetime | None:
        """How long a decision counts; None: until NotBefore. Of the rule under which a vote was given and that of now the shorter."""
        asks = self.asks if decision.decision == "approve" else None
        by_now = decision.at + timedelta(seconds=asks.expires) if asks is not None and asks.expires is not None else None
        return min((one for one in (decision.expires, by_now) if one is not None), default=None)

    def expired(self, decision: Decision) -> bool:
        """Whether its time is over."""
        until = self.until(decision)
        return until is not None and until <= self.now

    def person(self, principal: str) -> str:
        """Whose principal it is."""
        return person_of(principal, self.people)

    @property
    def _waits_for_machines(self) -> bool:
        # An event that names no machine is spoken for by nobody.
        return self.asks is not None and self.asks.each_resource and (bool(self.unspoken) or not self.occurrence.event.resources)

    def _speaks(self, principal: str, resource: str) -> bool:
        return not self._is_gone(principal) and covers(self.speaks.get(principal), (resource,))

    def _counts(self, vote: Decision) -> bool:
        return (
            vote.revision == self.occurrence.revision
            and not self.expired(vote)
            and (not vote.dry_run or self.mode == "dry-run")
            and (self.asks is None or vote.principal in voters(self.asks, self.groups, self.people))
            and self._may_still(vote.principal)
        )

    def _may_still(self, principal: str) -> bool:
        """Whether one who voted could do so now: rights that were taken away since take the vote along."""
        resources = self.occurrence.event.resources
        if self.asks is not None and self.asks.each_resource:
            return any(self._speaks(principal, one) for one in resources)
        return not self._is_gone(principal) and covers(self.speaks.get(principal), resources)

    def _is_gone(self, principal: str) -> bool:
        return principal.partition(":")[0] in ("client", "mtls") and principal not in self.speaks


def _scheduled(event: Event) -> bool:
    # A status that Azure may add in future is no leave to start anything.
    return (event.event_status or "").lower() == "scheduled"


def rule_for(rules: Sequence[Rule], occurrence: Occurrence, scope: str, now: datetime) -> Rule | None:
    """The first rule whose conditions the event meets now: it alone decides."""
    return next((rule for rule in rules if rule.matches(occurrence.data, scope, now)), None)


# --- what somebody asks


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not accepted. ``status`` is that of HTTP; ``field`` is what to correct, where that would help."""

    status: int
    reason: str
    field: str | None = None


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
    if not _may_speak(approval, rights, standing):
        return Refusal(403, "the event concerns resources that you may not speak for; every one must be yours")
    if approval.decision != "approve":
        return None
    if standing.rule is None:
        return Refusal(403, "no rule of approvals.rules allows this event to be approved")
    if standing.asks is not None and approval.caller.principal not in voters(standing.asks, standing.groups, standing.people):
        return Refusal(403, f"rule {standing.rule.name} takes votes from others only")
    return None


def _may_speak(approval: Approval, rights: Rights, standing: Standing) -> bool:
    resources = standing.occurrence.event.resources
    if approval.decision == "approve" and standing.asks is not None and standing.asks.each_resource:
        return any(covers(rights.resources, (one,)) for one in resources)  # others speak for the rest
    return covers(rights.resources, resources)


def _lacking(approval: Approval, rights: Rights, standing: Standing) -> str | None:
    if approval.decision != "release":
        return None if approval.decision in rights.can else f"you may not {approval.decision}: it is not in your rights (can)"
    if "operate" in rights.can:
        return None
    if "hold" not in rights.can:
        return "you may not release: neither hold nor operate is in your rights (can)"
    own = any(standing.person(hold.principal) == standing.person(approval.caller.principal) for hold in standing.holds)
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
    if standing.expired(vote) or (standing.due is not None and standing.now >= standing.due):
        return "expired"
    # The votes of an approval that waited too long to be sent are not to grant it anew.
    lapsed = any(grant.revision == vote.revision and _has_lapsed(grant, standing) for grant in standing.grants)
    return "expired" if lapsed and not vote.dry_run else None


def _expiries(standing: Standing) -> list[Effect]:
    if not standing.occurrence.live:
        return []
    return [Expire(one) for one in standing.decisions if one.decision == "hold" and standing.expired(one)]


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
    if _has_lapsed(grant, standing):
        return "the approval was not sent within its execution_expires"
    if not standing.satisfied:
        return f"the approval expired, or the rules changed, before a StartRequest was accepted{unknown}"
    return None


def lapses(grant: Grant, standing: Standing) -> datetime | None:
    """When an approval that is granted and has not been sent expires; None: never."""
    if grant.state != "granted" or grant.dry_run or standing.asks is None or standing.asks.execution_expires is None:
        return None
    return grant.granted_at + timedelta(seconds=standing.asks.execution_expires)


def _has_lapsed(grant: Grant, standing: Standing) -> bool:
    moment = lapses(grant, standing)
    return moment is not None and standing.now >= moment


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
    moments = [moment for one in standing.decisions if (moment := standing.until(one)) is not None]
    if standing.due is not None and (standing.decisions or any(grant.state in _OPEN for grant in standing.grants)):
        moments.append(standing.due)
    moments.extend(moment for grant in standing.grants if (moment := lapses(grant, standing)) is not None)
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
    if last in _OVER and (standing.refused_by_imds or not standing.open):
        return "failed"
    if standing.open and standing.required and standing.mode != "off":
        return "pending"
    return "none"
