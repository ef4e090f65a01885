"""What must happen next to the votes, holds and grants of one event. Pure.

Time, the document, the mode and decisions all change an `ApprovalStatus`. `due_transitions` alone
says what follows, whatever changed. `engine` asks for it after each change and when the time has
come, and `recording` writes the transitions into the journal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from relay.approvals.status import ApprovalStatus
from relay.store import Decision, Grant

VoidReason = Literal["changed", "expired", "ended"]


@dataclass(frozen=True, slots=True)
class VoidVotes:
    """These decisions no longer count."""

    decisions: tuple[Decision, ...]
    reason: VoidReason


@dataclass(frozen=True, slots=True)
class ExpireHold:
    """This hold has expired and counts as released."""

    hold: Decision


@dataclass(frozen=True, slots=True)
class FailGrant:
    """No StartRequest will be sent for this grant any more."""

    grant: Grant
    reason: str


@dataclass(frozen=True, slots=True)
class CreateGrant:
    """The rule is satisfied and nothing prevents the grant."""


@dataclass(frozen=True, slots=True)
class Remind:
    """Votes are missing, and NotBefore is near: people are reminded once for each revision."""


Transition = VoidVotes | ExpireHold | FailGrant | CreateGrant | Remind


def due_transitions(status: ApprovalStatus) -> list[Transition]:
    """Return the transitions that are due, in the order in which to apply them.

    Only the answer of IMDS decides about a grant whose StartRequest is being sent, and its votes.
    """
    found: list[Transition] = [*_voided_votes(status)]
    if status.occurrence.live:  # holds outlive the event: the same EventId can come back
        found += [
            ExpireHold(each)
            for each in status.decisions
            if each.decision == "hold" and status.is_decision_expired(each)
        ]
    for grant in status.grants:
        reason = open_grant_failure_reason(grant, status)
        if grant.is_open and reason is not None and not status.is_grant_in_flight(grant):
            found.append(FailGrant(grant, reason))
    if status.mode == "on" and status.is_grantable and not status.waiting_for:
        found.append(CreateGrant())
    moment = remind_at(status)
    if moment is not None and moment <= status.now:
        found.append(Remind())
    return found


def _voided_votes(status: ApprovalStatus) -> Iterator[VoidVotes]:
    # Nobody needs to hear of votes that an accepted StartRequest has used.
    used = {
        grant.revision
        for grant in status.grants
        if grant.state == "accepted" or status.is_grant_in_flight(grant)
    }
    by_reason: dict[VoidReason, list[Decision]] = {}
    for vote in status.decisions:
        if vote.decision != "approve" or vote.revision in used:
            continue
        if not status.occurrence.live:
            by_reason.setdefault("ended", []).append(vote)
        elif vote.revision != status.occurrence.revision:
            by_reason.setdefault("changed", []).append(vote)
        elif status.is_decision_expired(vote) or status.is_past_not_before:
            by_reason.setdefault("expired", []).append(vote)
    for reason, votes in by_reason.items():
        yield VoidVotes(tuple(votes), reason)


def open_grant_failure_reason(grant: Grant, status: ApprovalStatus) -> str | None:
    """Return why an open grant cannot be accepted any more, or None if it still can."""
    occurrence = status.occurrence
    if not occurrence.live:
        problem = "the event ended"
    elif occurrence.event.is_started:
        problem = "the event started"
    elif grant.revision != occurrence.revision:
        problem = "the event changed"
    elif status.is_past_not_before:
        problem = "NotBefore passed"
    elif not status.is_rule_satisfied:
        problem = "the approval expired, or the rules changed,"
    else:
        return None
    problem += " before a StartRequest was accepted"
    if grant.state != "sent":
        return problem
    return f"{problem}; whether IMDS took the StartRequest is not known"


def remind_at(status: ApprovalStatus) -> datetime | None:
    """Return when people are reminded of missing votes; None if nothing calls for it now."""
    quorum = status.quorum
    if quorum is None or quorum.remind is None or status.not_before is None:
        return None
    is_decided = status.is_held or status.is_granted_or_claimed or status.is_refused_by_imds
    if status.is_reminded or is_decided or status.mode == "off":
        return None
    if not status.is_startable or status.is_past_voting_close_time or not status.votes_missing:
        return None
    return status.not_before - timedelta(seconds=quorum.remind)


def can_unsent_grant_keep_slot(grant: Grant, status: ApprovalStatus) -> bool:
    """Whether a grant that was never sent takes slots: not if it cannot be sent now."""
    return (
        grant.state == "granted"
        and status.is_startable
        and not status.is_held
        and open_grant_failure_reason(grant, status) is None
    )


def can_claim_grant(grant: Grant, status: ApprovalStatus) -> bool:
    """Whether it may be sent now: the last check before the POST, of every condition."""
    return (
        status.mode == "on"
        and grant.is_open  # the event can have changed, and changed back, since this was asked for
        and status.is_startable
        and status.occurrence.revision == status.occurrence.event.revision
        and not status.is_held
        and not status.waiting_for
        and open_grant_failure_reason(grant, status) is None
    )


def next_change_at(status: ApprovalStatus) -> datetime | None:
    """When a transition can become due by time alone; None: never."""
    moments = [status.decision_expires_at(decision) for decision in status.decisions]
    if status.decisions or any(grant.is_open for grant in status.grants):
        moments.append(status.not_before)
    ahead = [each for each in (*moments, remind_at(status)) if each and each > status.now]
    return min(ahead, default=None)
