"""Carries policy into the journal: inside one transaction, what was decided becomes rows and events.

Nothing here waits, and nothing here sends: `gate` runs these pieces of work in the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from relay.approvals import ApprovalsSettings
from relay.approvals.authorize import Refusal, authorize
from relay.approvals.confirmation_link import check_confirmation_link
from relay.approvals.effects import ApprovalJournal, count, new_id, with_mode
from relay.approvals.request import DecisionAnswer, DecisionRequest
from relay.approvals.status import ApprovalStatus, approval_state, rule_for
from relay.approvals.transitions import can_claim, next_change_at, next_transitions
from relay.events.build import Origin
from relay.events.timestamps import format_rfc3339
from relay.outbox import Decision, Grant, Mode, Occurrence
from relay.outbox.transaction import Transaction

_STRICTNESS: tuple[Mode, ...] = ("on", "dry-run", "off")
_UNKNOWN = (
    "eventType",
    "eventStatus",
    "resourceType",
    "resources",
    "notBefore",
    "description",
    "eventSource",
    "durationSeconds",
)


@dataclass(frozen=True, slots=True)
class Claim:
    """A grant that may be sent now, with the EventId as Azure wrote it."""

    grant: Grant
    event_id: str


@dataclass(slots=True)
class ApprovalService:
    """The rules of this relay, and who it is.

    ``trusted`` is False where the store could not be compared with this VM. ``in_flight`` are the grants whose
    StartRequest is being sent at this moment: what becomes of them is for its answer to say. ``speaks``: the clients that
    may approve, and the resources that each may speak for (None: all).
    """

    settings: ApprovalsSettings
    origin: Origin
    trusted: bool = True
    in_flight: frozenset[int] = frozenset()
    client_resources: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)

    @property
    def _scribe(self) -> ApprovalJournal:
        return ApprovalJournal(self.origin)

    def mode(self, tx: Transaction) -> Mode:
        """The switch as it holds: of file and remembered, the stricter."""
        return stricter(self.settings, tx.mode(), trusted=self.trusted)

    def status(self, tx: Transaction, occurrence: Occurrence, now: datetime) -> ApprovalStatus:
        """Everything that a decision about an event rests on."""
        return ApprovalStatus(
            occurrence,
            # A hold belongs to the EventId: one that left the document and is back is held as before.
            (
                *tx.decisions.holds_before(occurrence.key, occurrence.id),
                *tx.decisions.for_occurrence(occurrence.id, counting=True),
            ),
            tuple(tx.decisions.grants(occurrence.id)),
            rule_for(self.settings.rules, occurrence, self.origin.scope, now),
            self.settings.groups,
            self.mode(tx),
            now,
            self.settings.people,
            self.client_resources,
        )

    def submit(self, tx: Transaction, approval: DecisionRequest) -> DecisionAnswer:
        """Judge a request and record what it comes to; a repeat gets its first answer and does nothing."""
        principal, request_id = approval.caller.principal, approval.request_id
        first = tx.decisions.first_answer(principal, request_id) if request_id is not None else None
        if first is not None and first.digest == approval.digest:
            return DecisionAnswer(first.status, first.body, repeat=True)
        occurrence = tx.snapshot.find(approval.event_id.lower())
        if approval.scope is not None and approval.scope != self.origin.scope:
            occurrence = None
        # What time and the document made necessary comes first: a vote that is void, or a hold that has expired, is told as such.
        standing = self._step(tx, occurrence, approval.at) if occurrence is not None else None
        if first is not None:
            refusal: Refusal | None = Refusal(
                409, "this id came before with another body; give each request an id of its own"
            )
        else:
            refusal = authorize(approval, standing)
            if refusal is None and standing is not None and approval.link is not None:
                refusal = check_confirmation_link(tx, approval, approval.link, standing.occurrence)
        if refusal is not None:
            answer = self._refuse(tx, approval, standing, refusal)
        else:
            assert standing is not None  # noqa: S101  # judge refuses what is unknown
            answer = self._accept(tx, approval, standing)
        # A 404 may be asked again over HTTP; a message that comes again is to get no second event.
        # A link is used up by the decision that counts: a wrong code, or a right that was lacking, can be mended.
        final = (
            (202,)
            if approval.link
            else (202, 403, 409)
            if approval.message_id is None
            else (202, 403, 404, 409)
        )
        if request_id is not None and first is None and answer.status in final:
            tx.decisions.remember_answer(
                principal,
                request_id,
                approval.digest,
                answer.status,
                dict(answer.body),
                approval.at,
            )
        return answer

    def apply_transitions(self, tx: Transaction, now: datetime) -> datetime | None:
        """Do whatever time, the document or the switch have made necessary; returns when to look again at the latest."""
        moments = []
        for occurrence in tx.decisions.unsettled():
            standing = self._step(tx, tx.snapshot.by_id(occurrence), now)
            moment = next_change_at(standing)
            if moment is not None:
                moments.append(moment)
            if standing.is_open and self._hours:
                # Hours turn at whole minutes, and so does every zone: no need to know which is the next.
                moments.append(now.replace(second=0, microsecond=0) + timedelta(minutes=1))
        return min(moments, default=None)

    @property
    def _hours(self) -> bool:
        return any(rule.match.time is not None for rule in self.settings.rules)

    def is_held(self, tx: Transaction, grant: Grant, now: datetime) -> bool:
        """Whether somebody's hold keeps a grant back."""
        return bool(self.status(tx, tx.snapshot.by_id(grant.occurrence), now).active_holds)

    def claim(self, tx: Transaction, grants: Sequence[Grant], now: datetime) -> list[Claim]:
        """The last step before the POST: check everything again, and write the claim down."""
        claims = []
        wanted = {one.id for one in grants}
        for grant in tx.decisions.open_grants():
            if grant.id not in wanted:
                continue
            occurrence = tx.snapshot.by_id(grant.occurrence)
            if not can_claim(grant, self.status(tx, occurrence, now)):
                continue
            event_id = occurrence.event.event_id
            tx.decisions.claim_grant(grant.id)
            facts = {
                "eventId": event_id,
                "revision": grant.revision,
                "rule": grant.rule,
                "approvalId": grant.approval_id,
                "grant": grant.id,
            }
            tx.journal.append_note(
                now, "claim", {**facts, "attempt": grant.attempts + 1}, event_key=occurrence.key
            )
            claims.append(Claim(grant, event_id))
        return claims

    def accepted(self, tx: Transaction, claims: Sequence[Claim], now: datetime) -> None:
        """IMDS answered 200."""
        for claim in claims:
            tx.decisions.record_answer(claim.grant.id, "accepted", 200)
            self._scribe.tell_start(tx, "startrequest.accepted", claim.grant, None, now)

    def failed(
        self,
        tx: Transaction,
        claims: Sequence[Claim],
        status: int | None,
        reason: str,
        now: datetime,
    ) -> None:
        """IMDS answered 400: another try would fare no better."""
        for claim in claims:
            tx.decisions.record_answer(claim.grant.id, "refused", status)
            self._scribe.tell_start(tx, "startrequest.failed", claim.grant, reason, now)

    def unanswered(self, tx: Transaction, claims: Sequence[Claim], status: int | None) -> None:
        """No 200, and no 400 for one event alone: the claims stand, and are tried again after another fresh read."""
        for claim in claims:
            tx.decisions.record_answer(claim.grant.id, "sent", status)

    # --- a request

    def _refuse(
        self,
        tx: Transaction,
        approval: DecisionRequest,
        standing: ApprovalStatus | None,
        refusal: Refusal,
    ) -> DecisionAnswer:
        if refusal.status != 503:  # HTTP
            event = (
                standing.occurrence.data if standing is not None else _unknown(approval.event_id)
            )
            told = _told(new_id(), approval, standing) | {"refusal": refusal.reason}
            cause = approval.message_id or (
                standing.occurrence.last_event_id if standing is not None else None
            )
            self._scribe.say(
                tx, "approval.refused", event, with_mode(self.mode(tx), told), cause, approval.at
            )
        body: dict[str, Any] = {"detail": refusal.reason}
        if refusal.status == 409 and standing is not None:  # HTTP
            body["revision"] = standing.occurrence.revision
        if refusal.field is not None:
            body["field"] = refusal.field
        return DecisionAnswer(refusal.status, body)

    def _accept(
        self, tx: Transaction, approval: DecisionRequest, standing: ApprovalStatus
    ) -> DecisionAnswer:
        # A request with an id of its own is told anew: over AMQP that is its answer. It replaces the vote that it repeats.
        live = _live(approval, standing) if approval.request_id is None else None
        approval_id = live.approval_id if live is not None else self._record(tx, approval, standing)
        after = self._step(tx, standing.occurrence, approval.at)
        return DecisionAnswer(
            202,
            {
                "approvalId": approval_id,
                "eventId": standing.occurrence.event.event_id,
                "decision": approval.decision,
                "state": _answer_state(approval, after),
                "votes": after.vote_count,
                "required": after.votes_required,
                "rule": after.rule.name if after.rule is not None else None,
            },
        )

    def _record(self, tx: Transaction, approval: DecisionRequest, standing: ApprovalStatus) -> str:
        """Write the decision down and tell it."""
        principal = approval.caller.principal
        dry_run = standing.mode == "dry-run"
        if approval.decision == "release":
            own = (hold for hold in standing.active_holds if _may_release(approval, hold, standing))
        else:
            # A principal has one vote and one hold: the newest.
            same = (
                one
                for one in standing.decisions
                if (one.decision, one.principal) == (approval.decision, principal)
            )
            own = (
                one for one in same if one.decision == "hold" or one.revision == approval.revision
            )
        for one in own:
            if (
                one.dry_run or not dry_run
            ):  # what was said in a dry run replaces and releases nothing that was meant
                tx.decisions.stop_counting(one.approval_id)
        decision = Decision(
            new_id(),
            standing.occurrence.id,
            approval.decision,
            principal,
            approval.caller.channel,
            approval.revision,
            approval.reason,
            approval.at,
            self._expires(approval, standing),
            dry_run=dry_run,
            counts=approval.decision != "release",
            recorded_event_id="",
            message_id=approval.message_id,
        )
        counted = replace(standing, decisions=(*standing.decisions, decision))
        told = with_mode(standing.mode, _told(decision.approval_id, approval, counted))
        cause = approval.message_id or standing.occurrence.last_event_id
        said = self._scribe.say(
            tx, "approval.recorded", standing.occurrence.data, told, cause, approval.at
        )
        tx.decisions.add_decision(replace(decision, recorded_event_id=said))
        return decision.approval_id

    def _expires(self, approval: DecisionRequest, standing: ApprovalStatus) -> datetime | None:
        if approval.decision == "hold":
            return approval.at + timedelta(seconds=self.settings.hold_expires)
        if (
            approval.decision == "approve"
            and standing.quorum is not None
            and standing.quorum.expires is not None
        ):
            return approval.at + timedelta(seconds=standing.quorum.expires)
        return None

    # --- what follows

    def _step(self, tx: Transaction, occurrence: Occurrence, now: datetime) -> ApprovalStatus:
        """Step until nothing is left to be done; returns how it stands then."""
        while effects := next_transitions(
            standing := self.status(tx, occurrence, now), self.in_flight
        ):
            for effect in effects:
                self._scribe.apply(tx, effect, standing, now)
        return standing


def stricter(settings: ApprovalsSettings, remembered: Mode, *, trusted: bool) -> Mode:
    """Of what the file says and what an operator said, the stricter; off where the store is not to be trusted."""
    configured: Mode = (
        "off" if not (settings.enabled and trusted) else "dry-run" if settings.dry_run else "on"
    )
    return max(configured, remembered, key=_STRICTNESS.index)


def approval_summary(standing: ApprovalStatus) -> dict[str, Any]:
    """``approval`` of an event, as the API gives it."""
    return {
        "state": approval_state(standing),
        **count(standing),
        "missing": standing.votes_missing if standing.is_open else 0,
        "closes": format_rfc3339(standing.voting_closes_at)
        if standing.voting_closes_at is not None
        else None,
    }


def _told(
    approval_id: str, approval: DecisionRequest, standing: ApprovalStatus | None
) -> dict[str, Any]:
    return {
        "approvalId": approval_id,
        "decision": approval.decision,
        "principal": approval.caller.principal,
        "channel": approval.caller.channel,
        "reason": approval.reason,
        **(count(standing) if standing is not None else {"votes": 0, "required": 0, "rule": None}),
    }


def _unknown(event_id: str) -> dict[str, Any]:
    return {
        "eventId": event_id,
        **dict.fromkeys(_UNKNOWN),
        "documentIncarnation": None,
        "revision": None,
    }


def _live(approval: DecisionRequest, standing: ApprovalStatus) -> Decision | None:
    """The same decision of the same principal on the same revision that counts already."""
    same = (approval.decision, approval.caller.principal, approval.revision)
    return next(
        (
            one
            for one in (*standing.counted_votes, *standing.active_holds)
            if (one.decision, one.principal, one.revision) == same
        ),
        None,
    )


def _may_release(approval: DecisionRequest, hold: Decision, standing: ApprovalStatus) -> bool:
    own = standing.person(hold.principal) == standing.person(approval.caller.principal)
    return own or "operate" in approval.caller.rights.can


def _answer_state(approval: DecisionRequest, standing: ApprovalStatus) -> str:
    if standing.active_holds:
        return "held"
    if standing.active_grant is not None:
        return "granted"
    if approval.decision == "release" and not standing.vote_count:
        return "released"
    return "pending"
