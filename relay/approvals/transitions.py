"""What follows from how an event's approval stands: from time, from the document and from what was decided. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from relay.approvals.rules import Rule
from relay.approvals.status import ApprovalStatus
from relay.outbox import Decision, Grant

VoidReason = Literal["changed", "expired", "ended"]
_OPEN = ("granted", "sent")


@dataclass(frozen=True, slots=True)
class VoidVotes:
    """These votes count no more. ``why`` is None when they served their purpose, and nothing is told."""

    decisions: tuple[Decision, ...]
    why: VoidReason | None


@dataclass(frozen=True, slots=True)
class ExpireHold:
    """This hold has expired: it counts as released."""

    hold: Decision


@dataclass(frozen=True, slots=True)
class FailGrant:
    """Give this grant up, for this reason."""

    grant: Grant
    reason: str


@dataclass(frozen=True, slots=True)
class CreateGrant:
    """The rule is satisfied and nothing stands in the way: grant it."""

    rule: Rule


Transition = VoidVotes | ExpireHold | FailGrant | CreateGrant


def next_transitions(
    standing: ApprovalStatus, in_flight: frozenset[int] = frozenset()
) -> list[Transition]:
    """What has to be done about an event now; nothing when it was done already.

    ``in_flight`` are grants whose StartRequest is being sent at this moment: what becomes of them is for its answer to say.
    """
    return [
        *_discounts(standing, in_flight),
        *_expiries(standing),
        *_failures(standing, in_flight),
        *_allowance(standing),
    ]


def _discounts(standing: ApprovalStatus, in_flight: frozenset[int]) -> list[Transition]:
    undecided = {grant.revision for grant in standing.grants if grant.id in in_flight}
    votes = [
        one
        for one in standing.decisions
        if one.decision == "approve" and one.revision not in undecided
    ]
    spent = {grant.revision for grant in standing.grants if grant.state == "accepted"}
    by_reason: dict[VoidReason | None, list[Decision]] = {}
    for vote in votes:
        why = _why_void(vote, standing)
        if why is not None:
            by_reason.setdefault(None if vote.revision in spent else why, []).append(vote)
    if not standing.occurrence.live:
        # Until then they hold: the same EventId may come back.
        by_reason.setdefault(None, []).extend(
            one for one in standing.decisions if one.decision == "hold" and standing.is_expired(one)
        )
    return [VoidVotes(tuple(found), why) for why, found in by_reason.items() if found]


def _why_void(vote: Decision, standing: ApprovalStatus) -> VoidReason | None:
    if not standing.occurrence.live:
        return "ended"
    if vote.revision != standing.occurrence.revision:
        return "changed"
    if standing.is_expired(vote) or (
        standing.not_before is not None and standing.now >= standing.not_before
    ):
        return "expired"
    # The votes of an approval that waited too long to be sent are not to grant it anew.
    lapsed = any(
        grant.revision == vote.revision and _has_lapsed(grant, standing)
        for grant in standing.grants
    )
    return "expired" if lapsed and not vote.dry_run else None


def _expiries(standing: ApprovalStatus) -> list[Transition]:
    if not standing.occurrence.live:
        return []
    return [
        ExpireHold(one)
        for one in standing.decisions
        if one.decision == "hold" and standing.is_expired(one)
    ]


def _failures(standing: ApprovalStatus, in_flight: frozenset[int]) -> list[Transition]:
    effects: list[Transition] = []
    for grant in standing.grants:
        if grant.state in _OPEN and grant.id not in in_flight:
            reason = failure_reason(grant, standing)
            if reason is not None:
                effects.append(FailGrant(grant, reason))
    return effects


def failure_reason(grant: Grant, standing: ApprovalStatus) -> str | None:
    """Why a grant that has not been accepted never will be, or None."""
    occurrence, sent = standing.occurrence, grant.state == "sent"
    unknown = "; whether IMDS took the StartRequest is not known" if sent else ""
    if not occurrence.live:
        return f"the event ended before a StartRequest was accepted{unknown}"
    if occurrence.event.started:
        return f"the event started before a StartRequest was accepted{unknown}"
    if grant.revision != occurrence.revision:
        return f"the event changed before a StartRequest was accepted{unknown}"
    if standing.not_before is not None and standing.now >= standing.not_before:
        return f"NotBefore passed before a StartRequest was accepted{unknown}"
    if _has_lapsed(grant, standing):
        return "the approval was not sent within its execution_expires"
    if not standing.is_satisfied:
        return f"the approval expired, or the rules changed, before a StartRequest was accepted{unknown}"
    return None


def grant_expires_at(grant: Grant, standing: ApprovalStatus) -> datetime | None:
    """When an approval that is granted and has not been sent expires; None: never."""
    if (
        grant.state != "granted"
        or grant.dry_run
        or standing.quorum is None
        or standing.quorum.execution_expires is None
    ):
        return None
    return grant.granted_at + timedelta(seconds=standing.quorum.execution_expires)


def _has_lapsed(grant: Grant, standing: ApprovalStatus) -> bool:
    moment = grant_expires_at(grant, standing)
    return moment is not None and standing.now >= moment


def _allowance(standing: ApprovalStatus) -> list[Transition]:
    allowed = (
        standing.is_open
        and standing.mode != "off"
        and standing.rule is not None
        and standing.is_satisfied
        and not standing.active_holds
        and standing.active_grant is None
        and not any(grant.state == "sent" for grant in standing.grants)
        and not standing.refused_by_imds
    )
    return [CreateGrant(standing.rule)] if allowed and standing.rule is not None else []


def can_claim(grant: Grant, standing: ApprovalStatus) -> bool:
    """The last check before the POST: switch, hold, revision, expiry and quorum, all again."""
    return (
        standing.mode == "on"
        and not grant.dry_run
        and standing.is_open
        and not standing.active_holds
        and failure_reason(grant, standing) is None
    )


def next_change_at(standing: ApprovalStatus) -> datetime | None:
    """When time alone will change something about an event; None: never."""
    moments = [
        moment for one in standing.decisions if (moment := standing.expires_at(one)) is not None
    ]
    if standing.not_before is not None and (
        standing.decisions or any(grant.state in _OPEN for grant in standing.grants)
    ):
        moments.append(standing.not_before)
    moments.extend(
        moment
        for grant in standing.grants
        if (moment := grant_expires_at(grant, standing)) is not None
    )
    return min((moment for moment in moments if moment > standing.now), default=None)
