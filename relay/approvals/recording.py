"""Writes what was decided about an event into the journal: the CloudEvent of each decision.

`engine` decides, and makes a `Recording` inside one transaction of the store. The rows of the
journal are the state: what they say is folded by `relay.store.approvals`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from relay.approvals.admission import told_of_decision
from relay.approvals.request import HOLD_NOTICE, DecisionRequest
from relay.approvals.standing_holds import is_about, standing_hold_to_json_object
from relay.approvals.status import ApprovalStatus
from relay.approvals.transitions import (
    CreateGrant,
    ExpireHold,
    FailGrant,
    Remind,
    Transition,
    VoidVotes,
)
from relay.events.build import Origin, approval_or_startrequest_event, standing_hold_event
from relay.events.data_types import NO_REMARKS, EventData, LimitWait
from relay.events.timestamps import format_rfc3339
from relay.store import Decision, Grant, GrantState, StandingHold, TrackedEvent
from relay.store.transaction import Transaction

_NO_VOTES: dict[str, Any] = {"votes": 0, "required": 0, "rule": None}
_UNKNOWN_EVENT: dict[str, Any] = dict.fromkeys(EventData.__annotations__)
"""The ``data`` of an event that the store does not know, apart from its EventId: all null."""


def new_approval_id() -> str:
    """Return 128 random bits in hexadecimal digits."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Recording:
    tx: Transaction
    origin: Origin
    occurrence: TrackedEvent
    at: datetime

    def decision(
        self, decision: Decision, status: ApprovalStatus, cause: str, ended: Sequence[Decision]
    ) -> None:
        """``status`` is that after it, which replaces or releases the decisions ``ended``."""
        details = {
            "approvalId": decision.approval_id,
            "decision": decision.decision,
            "principal": decision.principal,
            "channel": decision.channel,
            **decision.remarks,
            **status.vote_count_fields,
            "expires": format_rfc3339(decision.expires) if decision.expires is not None else None,
            **_ended_field(ended),
            **told_of_decision(decision.decision, status),
        }
        if decision.dry_run:
            details["dryRun"] = True
        self._event("approval.recorded", details, cause)

    def transition(
        self, transition: Transition, status: ApprovalStatus, waited_for: Sequence[LimitWait] = ()
    ) -> None:
        """``waited_for`` are the limits for which the event waited until its votes expired."""
        match transition:
            case VoidVotes(votes, reason):
                cause = self.occurrence.last_event_id
                if reason == "expired":
                    cause = votes[-1].recorded_event_id
                details: dict[str, Any] = {"why": reason, **_ended_field(votes)}
                if waited_for:
                    details["waitedFor"] = list(waited_for)
                self._event("approval.voided", details, cause)
            case ExpireHold(hold):
                self._expired_hold(hold, status)
            case FailGrant(grant, reason):
                self.start_answer(grant, "failed", http_status=None, reason=reason)
            case CreateGrant():
                self._grant(status)
            case Remind():
                self._reminder(status)

    def claim(self, grant: Grant, status: ApprovalStatus, agent: str | None) -> None:
        """Record that a StartRequest may be sent (`relay.store.audit` follows it back)."""
        note = {
            "eventId": self.occurrence.event.event_id,
            "revision": grant.revision,
            "rule": grant.rule,
            "approvalId": grant.approval_id,
            "granted": grant.id,
            "attempt": grant.attempts + 1,
            "required": status.votes_required,
            "votes": status.vote_count,
            "recorded": [vote.position for vote in status.counted_votes if status.quorum],
        }
        if agent is not None:
            note["agent"] = agent
        self.tx.journal.append_non_event_row(self.at, "claim", note, event_key=self.occurrence.key)

    def start_answer(
        self, grant: Grant, state: GrantState, *, http_status: int | None, reason: str | None
    ) -> None:
        """Record what became of a grant. ``sent`` is not final: it is sent again."""
        tx, occurrence = self.tx, self.occurrence
        if state == "sent":
            note = {"granted": grant.id, "state": state, "status": http_status}
            tx.note(self.at, "answer", note, occurrence.key)
            return
        details = {
            "approvalId": grant.approval_id,
            "status": grant.status if http_status is None else http_status,
            "attempts": grant.attempts,
            "reason": reason,
        }
        name = "startrequest.accepted" if state == "accepted" else "startrequest.failed"
        self._event(name, details, grant.cause)

    def _expired_hold(self, hold: Decision, status: ApprovalStatus) -> None:
        reason = f"the hold of {hold.principal} expired; {HOLD_NOTICE}"
        release = Decision(
            approval_id=new_approval_id(),
            decision="release",
            principal="relay",
            channel="relay",
            revision=self.occurrence.revision,
            remarks={**NO_REMARKS, "reason": reason},
            at=self.at,
            expires=None,
            dry_run=status.mode == "dry-run",
            message_id=None,
        )
        self.decision(release, status, hold.recorded_event_id, [hold])

    def _grant(self, status: ApprovalStatus) -> None:
        vote = status.counted_votes[-1] if status.quorum is not None else None
        # If this transaction has recorded no decision, the newest vote causes a grant by votes.
        deciding = self._newest_decision() or vote
        cause_id = self.occurrence.last_event_id
        if deciding is not None:
            cause_id = deciding.message_id or deciding.recorded_event_id
        counted = status.vote_count_fields
        details = {
            "approvalId": vote.approval_id if vote is not None else new_approval_id(),
            "decision": "approve",
            "principal": vote.principal if vote is not None else f"rule:{counted['rule']}",
            "channel": vote.channel if vote is not None else "rule",
            **(vote.remarks if vote is not None else NO_REMARKS),
            **counted,
        }
        self._event("approval.granted", details, cause_id)

    def _newest_decision(self) -> Decision | None:
        """Return the last decision about the event that this piece of work has recorded."""
        newest = self.tx.approvals.decisions_about(self.occurrence, limit=1)
        recorded = self.tx.recorded
        is_new = newest and recorded and newest[0].position >= recorded[0].position
        return newest[0] if is_new else None

    def _reminder(self, status: ApprovalStatus) -> None:
        closes_at = status.voting_closes_at
        assert closes_at is not None  # noqa: S101  # without NotBefore nobody is reminded
        details = {
            **status.vote_count_fields,
            "missing": status.votes_missing,
            "mayVote": list(status.voters_without_vote),
            "uncoveredResources": list(status.uncovered_resources),
            "closes": format_rfc3339(closes_at),
            "runbook": status.rule.runbook if status.rule is not None else None,
        }
        self._event("approval.reminder", details, self.occurrence.last_event_id)

    def _event(self, name: str, details: Mapping[str, Any], cause: str) -> None:
        event = approval_or_startrequest_event(
            name,
            self.origin.copy_for_scope(self.occurrence.scope),
            self.at,
            event=self.occurrence.data,
            added=details,
            cause=cause,
            head=str(self.tx.head()),
        )
        self.tx.record(event, self.at)


def record_refusal(
    tx: Transaction,
    origin: Origin,
    request: DecisionRequest,
    status: ApprovalStatus | None,
    reason: str,
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
    cause, data = request.message_id, {**_UNKNOWN_EVENT, "eventId": request.event_id}
    if status is not None:
        origin = origin.copy_for_scope(status.occurrence.scope)
        cause, data = cause or status.occurrence.last_event_id, status.occurrence.data
    name, head = "approval.refused", str(tx.head())
    event = approval_or_startrequest_event(
        name, origin, request.at, event=data, added=details, cause=cause, head=head
    )
    tx.record(event, request.at)


def record_standing_hold(
    tx: Transaction,
    origin: Origin,
    name: str,
    hold: StandingHold,
    at: datetime,
    **added: str | None,
) -> dict[str, Any]:
    """Record an event about a standing hold, and return its data; messages of events become due."""
    data = {**standing_hold_to_json_object(hold), **added}
    tx.record(standing_hold_event(name, origin, at, data=data, head=str(tx.head())), at)
    live = tx.occurrences.live_occurrences()
    about = [occurrence.id for occurrence in live if is_about(hold, occurrence)]
    tx.messages.refresh_about(about, at)
    return data


def _ended_field(decisions: Sequence[Decision]) -> dict[str, list[str]]:
    ids = [decision.approval_id for decision in decisions]
    return {"ended": ids} if ids else {}
