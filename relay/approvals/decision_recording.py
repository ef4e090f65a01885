"""Writes decisions and transitions into the journal: the CloudEvent of each.

`engine` decides, and calls these functions inside one transaction of the store. The caller names
the cause of each event; it becomes ``causationid``. The rows of the journal are the state: what
they say is folded by `relay.store.approvals`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from relay.approvals.admission import HOLD_NOTICE, late_hold_field
from relay.approvals.limits import WaitingFor, waits_field
from relay.approvals.request import DecisionRequest
from relay.approvals.standing_holds import standing_holds_field
from relay.approvals.status import ApprovalStatus
from relay.approvals.transitions import (
    CreateGrant,
    ExpireHold,
    FailGrant,
    Remind,
    Transition,
    VoidVotes,
)
from relay.events.build import Origin, approval_or_startrequest_event
from relay.events.remarks import NO_REMARKS
from relay.events.timestamps import format_rfc3339
from relay.store import Decision, Grant, GrantState, Mode, RecordedEvent, TrackedEvent
from relay.store.transaction import Transaction

_NO_VOTES: dict[str, Any] = {"votes": 0, "required": 0, "rule": None}
_UNKNOWN_EVENT_DATA: dict[str, Any] = dict.fromkeys(
    (
        "eventType",
        "eventStatus",
        "resourceType",
        "resources",
        "notBefore",
        "description",
        "eventSource",
        "durationSeconds",
        "documentIncarnation",
        "revision",
    )
)
"""The ``data`` of an event that the store does not know, apart from its EventId: all null."""


def new_approval_id() -> str:
    """Return 128 random bits in hexadecimal digits."""
    return secrets.token_hex(16)


def record_decision(
    tx: Transaction,
    origin: Origin,
    decision: Decision,
    status: ApprovalStatus,
    *,
    cause: str,
    ended: Sequence[Decision] = (),
    waiting_for: Sequence[WaitingFor] = (),
) -> Decision:
    """Store a decision with its ``approval.recorded``; return it as the journal has it.

    ``ended`` are the decisions that it replaces or releases. ``waiting_for``: the limits for which
    the event waits after it.
    """
    status_with_decision = replace(status, decisions=(*status.decisions, decision))
    details = {
        "approvalId": decision.approval_id,
        "decision": decision.decision,
        "principal": decision.principal,
        "channel": decision.channel,
        **decision.remarks,
        **status_with_decision.vote_count_fields,
        **late_hold_field(decision.decision, status),
        "expires": format_rfc3339(decision.expires) if decision.expires is not None else None,
        **_ended_decisions_field(ended),
        **waits_field("waitingFor", waiting_for),
        **standing_holds_field(status.active_standing_holds),
    }
    dry_run, at = decision.dry_run, decision.at
    event = _record_about(
        tx, origin, status.occurrence, "approval.recorded", details, cause, at, dry_run=dry_run
    )
    return replace(decision, recorded_event_id=event.id, position=event.position)


def record_refusal(
    tx: Transaction,
    origin: Origin,
    request: DecisionRequest,
    status: ApprovalStatus | None,
    *,
    reason: str,
    mode: Mode,
) -> None:
    """Record ``approval.refused``. ``status`` is None if the request names no known event."""
    details = {
        "approvalId": new_approval_id(),
        "decision": request.decision,
        "principal": request.caller.principal,
        "channel": request.caller.channel,
        **request.remarks,
        **(_NO_VOTES if status is None else status.vote_count_fields),
        "refusal": reason,
    }
    name, at, dry_run = "approval.refused", request.at, mode == "dry-run"
    if status is not None:
        cause = request.message_id or status.occurrence.last_event_id
        _record_about(tx, origin, status.occurrence, name, details, cause, at, dry_run=dry_run)
    else:
        unknown = {"eventId": request.event_id, **_UNKNOWN_EVENT_DATA}
        _record(tx, origin, name, unknown, details, request.message_id, at, dry_run=dry_run)


def record_transition(
    tx: Transaction,
    origin: Origin,
    transition: Transition,
    status: ApprovalStatus,
    cause: Decision | None,
) -> Decision | None:
    """Store one transition with its event; return the decision that causes the next transition.

    ``cause`` is the decision of this transaction that led to the transition. It is None if time,
    the document or the mode did.
    """
    match transition:
        case VoidVotes():
            _void_votes(tx, origin, transition, status)
        case ExpireHold(hold):
            return _release_expired_hold(tx, origin, hold, status)
        case FailGrant(grant, reason):
            record_start_answer(
                tx, origin, grant, "failed", http_status=None, reason=reason, at=status.now
            )
        case CreateGrant():
            _create_grant(tx, origin, transition, status, cause)
        case Remind():
            _record_reminder(tx, origin, status)
    return cause


def record_start_answer(
    tx: Transaction,
    origin: Origin,
    grant: Grant,
    state: GrantState,
    *,
    http_status: int | None,
    reason: str | None,
    at: datetime,
) -> None:
    """Record what became of a grant: a final answer as ``startrequest.accepted`` or ``.failed``.

    ``sent`` is not final: the StartRequest will be sent again. That, and the end of a grant of a
    dry run, is an ``answer`` in the journal.
    """
    occurrence = tx.occurrences.require_occurrence(grant.occurrence)
    if grant.dry_run or state == "sent":
        note = {"granted": grant.id, "state": state, "status": http_status}
        tx.note(at, "answer", note, occurrence.key)
        return
    # If the rows of the event were damaged meanwhile, no grant is known.
    known = tx.approvals.of_occurrence(occurrence).grants
    answered = next((each for each in known if each.id == grant.id), grant)
    details = {
        "approvalId": grant.approval_id,
        "status": answered.status if http_status is None else http_status,
        "attempts": answered.attempts,
        "reason": reason,
    }
    name = "startrequest.accepted" if state == "accepted" else "startrequest.failed"
    _record_about(tx, origin, occurrence, name, details, grant.cause, at)


def _void_votes(
    tx: Transaction, origin: Origin, transition: VoidVotes, status: ApprovalStatus
) -> None:
    decisions, reason = transition.decisions, transition.reason
    occurrence = status.occurrence
    cause = decisions[-1].recorded_event_id if reason == "expired" else occurrence.last_event_id
    details = {
        "why": reason,
        **_ended_decisions_field(decisions),
        **waits_field("waitedFor", transition.waited_for),
    }
    dry_run = all(vote.dry_run for vote in decisions)
    _record_about(
        tx, origin, occurrence, "approval.voided", details, cause, status.now, dry_run=dry_run
    )


def _release_expired_hold(
    tx: Transaction, origin: Origin, hold: Decision, status: ApprovalStatus
) -> Decision:
    release = Decision(
        approval_id=new_approval_id(),
        decision="release",
        principal="relay",
        channel="relay",
        revision=status.occurrence.revision,
        remarks={**NO_REMARKS, "reason": f"the hold of {hold.principal} expired; {HOLD_NOTICE}"},
        at=status.now,
        expires=None,
        dry_run=status.mode == "dry-run",
        message_id=None,
    )
    return record_decision(tx, origin, release, status, cause=hold.recorded_event_id, ended=[hold])


def _record_reminder(tx: Transaction, origin: Origin, status: ApprovalStatus) -> None:
    """Record the only reminder for this revision of the event."""
    occurrence, closes_at = status.occurrence, status.voting_closes_at
    assert closes_at is not None  # noqa: S101  # without NotBefore nobody is reminded
    details = {
        **status.vote_count_fields,
        "missing": status.votes_missing,
        "mayVote": list(status.voters_without_vote),
        "uncoveredResources": list(status.uncovered_resources),
        "closes": format_rfc3339(closes_at),
        "runbook": status.runbook,
    }
    name, cause, dry_run = "approval.reminder", occurrence.last_event_id, status.mode == "dry-run"
    _record_about(tx, origin, occurrence, name, details, cause, status.now, dry_run=dry_run)


def _create_grant(
    tx: Transaction,
    origin: Origin,
    transition: CreateGrant,
    status: ApprovalStatus,
    cause: Decision | None,
) -> None:
    rule = transition.rule
    vote = status.counted_votes[-1] if status.quorum is not None else None
    # If this transaction has recorded no decision, the newest vote causes a grant by votes.
    deciding = cause or vote
    message_id, recorded_id = None, status.occurrence.last_event_id
    if deciding is not None:
        message_id, recorded_id = deciding.message_id, deciding.recorded_event_id
    details = {
        "approvalId": vote.approval_id if vote is not None else new_approval_id(),
        "decision": "approve",
        "principal": vote.principal if vote is not None else f"rule:{rule.name}",
        "channel": vote.channel if vote is not None else "rule",
        **(vote.remarks if vote is not None else NO_REMARKS),
        **status.vote_count_fields,
    }
    name, cause_id, dry_run = (
        "approval.granted",
        message_id or recorded_id,
        status.mode == "dry-run",
    )
    _record_about(
        tx, origin, status.occurrence, name, details, cause_id, status.now, dry_run=dry_run
    )


def _record_about(
    tx: Transaction,
    origin: Origin,
    occurrence: TrackedEvent,
    name: str,
    details: Mapping[str, Any],
    cause: str | None,
    at: datetime,
    *,
    dry_run: bool = False,
) -> RecordedEvent:
    """Record an ``approval.*`` or ``startrequest.*`` about an event of Azure; return it."""
    origin = origin.copy_for_scope(occurrence.scope)
    return _record(tx, origin, name, occurrence.data, details, cause, at, dry_run=dry_run)


def _record(
    tx: Transaction,
    origin: Origin,
    name: str,
    event_data: Mapping[str, Any],
    details: Mapping[str, Any],
    cause: str | None,
    at: datetime,
    *,
    dry_run: bool,
) -> RecordedEvent:
    if dry_run:
        details = {**details, "dryRun": True}
    event = approval_or_startrequest_event(
        name, origin, at, event=event_data, added=details, cause=cause, head=str(tx.head())
    )
    tx.record(event, at)
    return tx.recorded[-1]


def _ended_decisions_field(decisions: Sequence[Decision]) -> dict[str, list[str]]:
    """Return ``ended`` of an event: the decisions that count no more because of it."""
    ids = [decision.approval_id for decision in decisions]
    return {"ended": ids} if ids else {}
