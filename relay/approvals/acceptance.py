"""What an accepted request becomes: a decision, the decisions that it ends, and an answer. Pure."""

from __future__ import annotations

from datetime import timedelta

from relay.approvals.authorize import SENT_BEFORE_NOTICE
from relay.approvals.request import DecisionAnswer, DecisionRequest
from relay.approvals.status import ApprovalStatus
from relay.outbox import Decision


def find_same_decision(request: DecisionRequest, status: ApprovalStatus) -> Decision | None:
    """Return the decision in force that the request only repeats."""
    wanted = (request.decision, request.caller.principal, request.revision)
    for decision in (*status.counted_votes, *status.active_holds):
        if (decision.decision, decision.principal, decision.revision) == wanted:
            return decision
    return None


def build_decision(
    request: DecisionRequest, status: ApprovalStatus, *, approval_id: str, hold_expires: float
) -> Decision:
    """Return the decision of a request. ``hold_expires`` is in seconds."""
    lifetime: float | None = None
    if request.decision == "hold":
        lifetime = hold_expires
    elif request.decision == "approve" and status.quorum is not None:
        lifetime = status.quorum.expires
    return Decision(
        approval_id=approval_id,
        occurrence=status.occurrence.id,
        decision=request.decision,
        principal=request.caller.principal,
        channel=request.caller.channel,
        revision=request.revision,
        reason=request.reason,
        at=request.at,
        expires=request.at + timedelta(seconds=lifetime) if lifetime is not None else None,
        dry_run=status.mode == "dry-run",
        counts=request.decision != "release",
        recorded_event_id="",
        message_id=request.message_id,
    )


def find_ended_decisions(request: DecisionRequest, status: ApprovalStatus) -> list[Decision]:
    """Return the decisions that the request replaces or releases.

    A principal has one hold, and one vote for each revision. A release ends the holds of the
    caller, or all holds if the caller may ``operate``. In a dry run it ends those of dry runs only.
    """
    dry_run = status.mode == "dry-run"
    return [
        decision
        for decision in status.decisions
        if _ends(request, decision, status) and (decision.dry_run or not dry_run)
    ]


def _ends(request: DecisionRequest, decision: Decision, status: ApprovalStatus) -> bool:
    caller = request.caller
    if request.decision == "release":
        may_release = "operate" in caller.rights.can or (
            status.person(decision.principal) == status.person(caller.principal)
        )
        return may_release and decision in status.active_holds
    if (decision.decision, decision.principal) != (request.decision, caller.principal):
        return False
    return decision.decision == "hold" or decision.revision == request.revision


def build_answer(
    request: DecisionRequest, decision: Decision, status: ApprovalStatus
) -> DecisionAnswer:
    """Return the answer to an accepted request. ``status`` is that after the decision."""
    return DecisionAnswer(
        202,
        {
            "approvalId": decision.approval_id,
            "eventId": status.occurrence.event.event_id,
            "decision": request.decision,
            "state": _answer_state(request, status),
            **status.vote_summary,
            **sent_before_notice(request.decision, status),
        },
    )


def sent_before_notice(decision: str, status: ApprovalStatus) -> dict[str, str]:
    """Return ``notice`` for the answer to a hold, and for its event, if it may come too late."""
    is_late = decision == "hold" and status.may_have_been_started
    return {"notice": SENT_BEFORE_NOTICE} if is_late else {}


def _answer_state(request: DecisionRequest, status: ApprovalStatus) -> str:
    if status.active_holds:
        return "held"
    if status.active_grant is not None:
        return "granted"
    if request.decision == "release" and not status.vote_count:
        return "released"
    return "pending"
