"""Whether a request is refused or accepted, and which decision it becomes. Pure.

`find_decision_refusal` says who may decide what about an event, and when it is too late. `engine`
asks it before it records a decision. Rules and quorums are counted elsewhere (`status`,
`transitions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from relay.approvals.principals import is_any_of, is_machine
from relay.approvals.request import HOLD_NOTICE, DecisionAnswer, DecisionRequest, refuse
from relay.approvals.standing_holds import hold_summaries, latest_ending_holds
from relay.approvals.status import ApprovalStatus
from relay.events.match import covers_all_resources
from relay.events.timestamps import format_rfc3339
from relay.settings import join_names
from relay.store import Decision, TrackedEvent

DRY_RUN_NOTICE = "approvals are a dry run: nothing is sent to Azure"
SENT_BEFORE_NOTICE = (
    "a StartRequest was sent before, and Azure may have accepted it: "
    "the event can start at any moment; no further StartRequest is sent while it is held"
)
"""Part of every text about a hold that was taken after an earlier StartRequest."""


UNKNOWN_EVENT = refuse(
    404, "no such event in this scope; see GET /v1/events, or `imds-relay events`"
)
REUSED_ID = refuse(409, "this id came before with another body; give each request an id of its own")


def ambiguous_scope_refusal(occurrences: Sequence[TrackedEvent]) -> DecisionAnswer:
    scopes = ", ".join(sorted(occurrence.scope for occurrence in occurrences))
    return refuse(
        422, f"expected the scope, because this EventId is known in several: {scopes}", "scope"
    )


def hold_caveat(status: ApprovalStatus) -> str:
    """Return what a hold on this event does not stop."""
    return f"{SENT_BEFORE_NOTICE}; {HOLD_NOTICE}" if status.may_be_accepted_by_imds else HOLD_NOTICE


def find_decision_refusal(
    request: DecisionRequest, status: ApprovalStatus | None
) -> DecisionAnswer | None:
    """Return why a request is refused, or None if it is accepted.

    404 comes before 409, 409 before 403, and 403 before 503
    (docs/guarantees.md#refusals-have-one-order). ``status`` is None if the EventId is unknown or
    the request names another scope.
    """
    if status is None:
        return UNKNOWN_EVENT
    if status.damage is not None:
        return refuse(
            503, f"{status.damage}: approvals of this event are off; see imds-relay audit verify"
        )
    conflict = _conflict_reason(request, status)
    if conflict is not None:
        return refuse(409, conflict)
    missing_permission = _permission_refusal_reason(request, status)
    if missing_permission is not None:
        return refuse(403, missing_permission)
    if status.mode == "off":
        off = "approvals are off; an operator can turn them on: imds-relay approvals on"
        return refuse(503, off, is_transient=True)
    return None


def _conflict_reason(request: DecisionRequest, status: ApprovalStatus) -> str | None:
    if not status.occurrence.live:
        return "the event has ended"
    if status.occurrence.event.is_started:
        return "the event has started already"
    match request.decision:
        case "release":
            return None if status.active_holds else _nothing_to_release(status)
        case "hold":
            return _hold_conflict_reason(status)
        case "approve":
            return _vote_conflict_reason(request, status)


def _nothing_to_release(status: ApprovalStatus) -> str:
    standing = status.active_standing_holds
    if not standing:
        return f"no hold is on this event; {HOLD_NOTICE}"
    described = " and ".join(
        f"the standing hold {hold.hold_id[:8]} of {hold.principal} until "
        f"{format_rfc3339(hold.ends)}"
        for hold in latest_ending_holds(standing)
    )
    return f"only {described} is on this event: end it with imds-relay holds end; {HOLD_NOTICE}"


def _hold_conflict_reason(status: ApprovalStatus) -> str | None:
    not_before = status.not_before
    if not_before is not None and status.now >= not_before:
        return _describe_too_late(not_before, status.now)
    # Between two attempts a hold stops the next.
    is_being_sent = any(map(status.is_grant_in_flight, status.grants))
    if is_being_sent or status.is_accepted_by_imds:
        return f"too late: the StartRequest is on its way; {HOLD_NOTICE}"
    return None


def _vote_conflict_reason(request: DecisionRequest, status: ApprovalStatus) -> str | None:
    closes_at = status.voting_closes_at
    if closes_at is not None and status.now >= closes_at:
        return _describe_too_late(closes_at, status.now)
    current = status.occurrence.revision
    if request.revision != current:
        return f"the event has changed since that revision; the current one is {current}"
    event = status.occurrence.event
    if not event.is_scheduled:
        event_status = event.event_status or "without a status"
        return f"only a Scheduled event can be approved, this one is {event_status}"
    if status.is_refused_by_imds:
        return "IMDS refused the StartRequest for this event (400)"
    return None


def _describe_too_late(closed_at: datetime, now: datetime) -> str:
    return f"too late: it closed at {format_rfc3339(closed_at)}, it is {format_rfc3339(now)}"


def _permission_refusal_reason(request: DecisionRequest, status: ApprovalStatus) -> str | None:
    problem = (
        _missing_right_reason(request, status)
        or _vm_decides_beyond_itself_reason(request, status)
        or _uncovered_resources_reason(request, status)
    )
    if problem is not None or request.decision != "approve":
        return problem
    if status.rule is None:
        return "no rule of approvals.rules allows this event to be approved"
    if status.quorum is None:
        return None
    if not is_any_of(status.eligible_voters, request.caller.principal):
        return f"rule {status.rule.name} takes votes from others only"
    return None


def _missing_right_reason(request: DecisionRequest, status: ApprovalStatus) -> str | None:
    can = request.caller.rights.can
    if request.decision != "release":
        if request.decision in can:
            return None
        return f"you may not {request.decision}: it is not in your rights (can)"
    if "operate" in can:
        return None
    if "hold" not in can:
        return "you may not release: neither hold nor operate is in your rights (can)"
    if any(_is_own_hold(hold, request, status) for hold in status.active_holds):
        return None
    return (
        "somebody else took the hold; they can release it, and so can anybody with the right "
        f"operate; {HOLD_NOTICE}"
    )


def _is_own_hold(hold: Decision, request: DecisionRequest, status: ApprovalStatus) -> bool:
    """Whether the caller took the hold. Machines that are one person do not share theirs."""
    principal = request.caller.principal
    if is_machine(principal):
        return hold.principal == principal
    return status.person_of_voter(hold.principal) == status.person_of_voter(principal)


def _vm_decides_beyond_itself_reason(
    request: DecisionRequest, status: ApprovalStatus
) -> str | None:
    """Why a machine may not decide about it: it speaks for itself, and may release its own hold."""
    machine = request.caller.principal
    if not is_machine(machine) or request.decision == "release":
        return None
    own = status.resources_of_machine(machine)
    if not own:
        return f"{machine} may decide for itself only, and the event does not name it"
    others = [name for name in status.occurrence.event.resources if name not in own]
    covers_itself = status.quorum is not None and status.quorum.each_resource
    if request.decision == "hold" or covers_itself or not others:
        return None
    return (
        f"{machine} may decide for itself only, not for {join_names(others)}: "
        "with each_resource: true, a rule takes a vote of each machine"
    )


def _uncovered_resources_reason(request: DecisionRequest, status: ApprovalStatus) -> str | None:
    rights = request.caller.rights
    resources = status.occurrence.event.resources
    quorum = status.quorum if request.decision == "approve" else None
    must_cover_each = quorum is not None and quorum.each_resource
    if not resources and (must_cover_each or rights.are_limited):
        return "you may not decide for an event that names no resource"
    foreign = [name for name in resources if not covers_all_resources(rights.resources, (name,))]
    if must_cover_each and len(foreign) < len(resources):
        foreign = []  # others can cover the rest
    uncovered = [
        name
        for name in resources
        if name in foreign
        or not all(covers_all_resources(limit, (name,)) for limit in rights.limits)
    ]
    if not uncovered:
        return None
    pronoun = "it" if len(uncovered) == 1 else "them"
    return (
        f"you may not decide for {join_names(uncovered)}: "
        f"your rights (resources) do not cover {pronoun}"
    )


# --- accepted requests


def find_same_decision(request: DecisionRequest, status: ApprovalStatus) -> Decision | None:
    """Return the decision in force that the request only repeats."""
    wanted = (request.decision, request.caller.principal, request.revision)
    for decision in (*status.counted_votes, *status.active_holds):
        if decision.dry_run and status.mode != "dry-run":
            continue  # a dry run can release such a hold
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
        decision=request.decision,
        principal=request.caller.principal,
        channel=request.caller.channel,
        revision=request.revision,
        remarks=request.remarks,
        at=request.at,
        expires=request.at + timedelta(seconds=lifetime) if lifetime is not None else None,
        dry_run=status.mode == "dry-run",
        message_id=request.message_id,
    )


def find_decisions_to_end(request: DecisionRequest, status: ApprovalStatus) -> list[Decision]:
    """Return the decisions that the request replaces or releases.

    A principal has one hold, and one vote for each revision. A release ends the holds of the
    caller, or all holds if the caller may ``operate``. In a dry run it ends those of dry runs only.
    """
    caller = request.caller
    if request.decision == "release":
        is_operator = "operate" in caller.rights.can
        found = [
            hold
            for hold in status.active_holds
            if is_operator or _is_own_hold(hold, request, status)
        ]
    else:
        found = [
            decision
            for decision in status.decisions
            if (decision.decision, decision.principal) == (request.decision, caller.principal)
            and (decision.decision == "hold" or decision.revision == request.revision)
        ]
    return [decision for decision in found if decision.dry_run or status.mode != "dry-run"]


def build_accepted_answer(
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
            **status.vote_count_fields,
            **({"notice": DRY_RUN_NOTICE} if status.mode == "dry-run" else {}),
            **told_of_decision(request.decision, status),
        },
    )


def told_of_decision(decision: str, status: ApprovalStatus) -> dict[str, Any]:
    """Return what is told only where it is so. ``notice``: the hold may come too late."""
    is_late = decision == "hold" and status.may_be_accepted_by_imds
    fields = {
        "notice": SENT_BEFORE_NOTICE if is_late else "",
        "waitingFor": list(status.waiting_for),
        "standingHolds": hold_summaries(status.active_standing_holds),
    }
    return {name: value for name, value in fields.items() if value}


def _answer_state(request: DecisionRequest, status: ApprovalStatus) -> str:
    if status.is_held:
        return "held"
    if status.waiting_for:
        return "waiting"
    if status.active_grant is not None or status.is_grantable:
        return "granted"
    if request.decision == "release" and not status.vote_count:
        return "released"
    return "pending"
