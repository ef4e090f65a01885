"""What becomes of a request: who may decide what about an event, and when it is too late. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from relay.approvals.request import DecisionRequest, Rights
from relay.approvals.rules import eligible_voters
from relay.approvals.status import ApprovalStatus, is_scheduled
from relay.events.match import covers_all
from relay.events.timestamps import format_rfc3339

HOLD_NOTICE = "a hold stops this relay alone: Azure proceeds at NotBefore regardless, and other relays and Azure Resource Manager can approve"
"""Every text about a hold says it (docs/guarantees.md#a-hold-stops-this-relay-only)."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not accepted. ``status`` is that of HTTP; ``field`` is what to correct, where that would help."""

    status: int
    reason: str
    field: str | None = None


def authorize(approval: DecisionRequest, standing: ApprovalStatus | None) -> Refusal | None:
    """Whether a request is refused: 404, then 409, then 403, then 503 (docs/api.md#order-of-checks). None: it is accepted.

    ``standing`` is None when the EventId is unknown or the scope is another.
    """
    if standing is None:
        return Refusal(
            404, "no such event in this scope; see GET /v1/events, or `imds-relay events`"
        )
    refusal = _too_late(approval, standing) or _not_allowed(approval, standing)
    if refusal is None and standing.mode == "off":
        refusal = Refusal(
            503, "approvals are off; an operator can turn them on: imds-relay approvals on"
        )
    return refusal


def _too_late(approval: DecisionRequest, standing: ApprovalStatus) -> Refusal | None:
    occurrence, event = standing.occurrence, standing.occurrence.event
    if not occurrence.live:
        return Refusal(409, "the event has ended")
    if event.started:
        return Refusal(409, "the event has started already")
    if approval.decision == "release":
        return (
            Refusal(409, f"no hold is on this event; {HOLD_NOTICE}")
            if not standing.active_holds
            else None
        )
    closes = standing.voting_closes_at if approval.decision == "approve" else standing.not_before
    if closes is not None and standing.now >= closes:
        return Refusal(
            409,
            f"too late: it closed at {format_rfc3339(closes)}, it is {format_rfc3339(standing.now)}",
        )
    if approval.decision == "hold":
        return (
            Refusal(409, f"too late: the StartRequest is on its way; {HOLD_NOTICE}")
            if standing.is_claimed
            else None
        )
    if approval.revision != occurrence.revision:
        return Refusal(
            409,
            f"the event has changed since that revision; the current one is {occurrence.revision}",
        )
    if not is_scheduled(event):
        return Refusal(
            409,
            f"only a Scheduled event can be approved, this one is {event.event_status or 'without a status'}",
        )
    if standing.refused_by_imds:
        return Refusal(409, "IMDS refused the StartRequest for this event (400)")
    return None


def _not_allowed(approval: DecisionRequest, standing: ApprovalStatus) -> Refusal | None:
    rights = approval.caller.rights
    lacking = _lacking(approval, rights, standing)
    if lacking is not None:
        return Refusal(403, lacking)
    if not _may_speak(approval, rights, standing):
        return Refusal(
            403, "the event concerns resources that you may not speak for; every one must be yours"
        )
    if approval.decision != "approve":
        return None
    if standing.rule is None:
        return Refusal(403, "no rule of approvals.rules allows this event to be approved")
    if standing.quorum is not None and approval.caller.principal not in eligible_voters(
        standing.quorum, standing.groups, standing.people
    ):
        return Refusal(403, f"rule {standing.rule.name} takes votes from others only")
    return None


def _may_speak(approval: DecisionRequest, rights: Rights, standing: ApprovalStatus) -> bool:
    resources = standing.occurrence.event.resources
    if (
        approval.decision == "approve"
        and standing.quorum is not None
        and standing.quorum.each_resource
    ):
        return any(
            covers_all(rights.resources, (one,)) for one in resources
        )  # others speak for the rest
    return covers_all(rights.resources, resources)


def _lacking(approval: DecisionRequest, rights: Rights, standing: ApprovalStatus) -> str | None:
    if approval.decision != "release":
        return (
            None
            if approval.decision in rights.can
            else f"you may not {approval.decision}: it is not in your rights (can)"
        )
    if "operate" in rights.can:
        return None
    if "hold" not in rights.can:
        return "you may not release: neither hold nor operate is in your rights (can)"
    own = any(
        standing.person(hold.principal) == standing.person(approval.caller.principal)
        for hold in standing.active_holds
    )
    return (
        None
        if own
        else f"the hold is another's; its holder, or one who may operate, can release it; {HOLD_NOTICE}"
    )
