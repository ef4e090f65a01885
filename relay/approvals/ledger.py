"""Carries policy into the journal: inside one transaction, what was decided becomes rows and events.

Nothing here waits, and nothing here sends: `gate` runs these pieces of work in the store.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from relay.approvals import ApprovalsSettings
from relay.approvals.invited import not_invited
from relay.approvals.judgement import HOLD_MEANS, Refusal, judge
from relay.approvals.policy import Allow, Discount, Effect, Expire, Fail, claimable, next_moment, step
from relay.approvals.request import Answer, Approval
from relay.approvals.standing import Standing, rule_for, state_of
from relay.events.moment import rfc3339
from relay.events.normalise import Origin, tell_decision
from relay.outbox import Decision, Grant, Mode, Occurrence
from relay.outbox.transaction import Transaction

_STRICTNESS: tuple[Mode, ...] = ("on", "dry-run", "off")
_UNKNOWN = ("eventType", "eventStatus", "resourceType", "resources", "notBefore", "description", "eventSource", "durationSeconds")


@dataclass(frozen=True, slots=True)
class Claim:
    """A grant that may be sent now, with the EventId as Azure wrote it."""

    grant: Grant
    event_id: str


@dataclass(slots=True)
class Ledger:
    """The rules of this relay, and who it is.

    ``trusted`` is False where the store could not be compared with this VM. ``in_flight`` are the grants whose
    StartRequest is being sent at this moment: what becomes of them is for its answer to say. ``speaks``: the clients that
    may approve, and the resources that each may speak for (None: all).
    """

    settings: ApprovalsSettings
    origin: Origin
    trusted: bool = True
    in_flight: frozenset[int] = frozenset()
    speaks: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)

    def mode(self, tx: Transaction) -> Mode:
        """The switch as it holds: of file and remembered, the stricter."""
        return stricter(self.settings, tx.mode(), trusted=self.trusted)

    def standing(self, tx: Transaction, occurrence: Occurrence, now: datetime) -> Standing:
        """Everything that a decision about an event rests on."""
        return Standing(
            occurrence,
            tuple(tx.decisions.of(occurrence.id, counting=True)),
            tuple(tx.decisions.grants(occurrence.id)),
            rule_for(self.settings.rules, occurrence, self.origin.scope, now),
            self.settings.groups,
            self.mode(tx),
            now,
            self.settings.people,
            self.speaks,
        )

    def submit(self, tx: Transaction, approval: Approval) -> Answer:
        """Judge a request and record what it comes to; a repeat gets its first answer and does nothing."""
        principal, request_id = approval.caller.principal, approval.request_id
        first = tx.decisions.first_answer(principal, request_id) if request_id is not None else None
        if first is not None and first.digest == approval.digest:
            return Answer(first.status, first.body, repeat=True)
        occurrence = tx.snapshot.find(approval.event_id.lower())
        if approval.scope is not None and approval.scope != self.origin.scope:
            occurrence = None
        # What time and the document made necessary comes first: a vote that is void, or a hold that has expired, is told as such.
        standing = self._step(tx, occurrence, approval.at) if occurrence is not None else None
        if first is not None:
            refusal: Refusal | None = Refusal(409, "this id came before with another body; give each request an id of its own")
        else:
            refusal = judge(approval, standing)
            if refusal is None and standing is not None and approval.invited is not None:
                refusal = not_invited(tx, approval, approval.invited, standing.occurrence)
        if refusal is not None:
            answer = self._refuse(tx, approval, standing, refusal)
        else:
            assert standing is not None  # noqa: S101  # judge refuses what is unknown
            answer = self._accept(tx, approval, standing)
        # A 404 may be asked again over HTTP; a message that comes again is to get no second event.
        # A link is used up by the decision that counts: a wrong code, or a right that was lacking, can be mended.
        final = (202,) if approval.invited else (202, 403, 409) if approval.message_id is None else (202, 403, 404, 409)
        if request_id is not None and first is None and answer.status in final:
            tx.decisions.remember_answer(principal, request_id, approval.digest, answer.status, dict(answer.body), approval.at)
        return answer

    def step_all(self, tx: Transaction, now: datetime) -> datetime | None:
        """Do whatever time, the document or the switch have made necessary; returns when to look again at the latest."""
        moments = []
        for occurrence in tx.decisions.unsettled():
            standing = self._step(tx, tx.snapshot.by_id(occurrence), now)
            moment = next_moment(standing)
            if moment is not None:
                moments.append(moment)
            if standing.open and self._hours:
                # Hours turn at whole minutes, and so does every zone: no need to know which is the next.
                moments.append(now.replace(second=0, microsecond=0) + timedelta(minutes=1))
        return min(moments, default=None)

    @property
    def _hours(self) -> bool:
        return any(rule.match.time is not None for rule in self.settings.rules)

    def held(self, tx: Transaction, grant: Grant, now: datetime) -> bool:
        """Whether somebody's hold keeps a grant back."""
        return bool(self.standing(tx, tx.snapshot.by_id(grant.occurrence), now).holds)

    def claim(self, tx: Transaction, grants: Sequence[Grant], now: datetime) -> list[Claim]:
        """The last step before the POST: check everything again, and write the claim down."""
        claims = []
        wanted = {one.id for one in grants}
        for grant in tx.decisions.open_grants():
            if grant.id not in wanted:
                continue
            occurrence = tx.snapshot.by_id(grant.occurrence)
            if not claimable(grant, self.standing(tx, occurrence, now)):
                continue
            event_id = occurrence.event.event_id
            tx.decisions.claim(grant.id)
            facts = {
                "eventId": event_id,
                "revision": grant.revision,
                "rule": grant.rule,
                "approvalId": grant.approval_id,
                "grant": grant.id,
            }
            tx.journal.note(now, "claim", {**facts, "attempt": grant.attempts + 1}, event_key=occurrence.key)
            claims.append(Claim(grant, event_id))
        return claims

    def accepted(self, tx: Transaction, claims: Sequence[Claim], now: datetime) -> None:
        """IMDS answered 200."""
        for claim in claims:
            tx.decisions.answered(claim.grant.id, "accepted", 200)
            self._tell_start(tx, "startrequest.accepted", claim.grant, None, now)

    def failed(self, tx: Transaction, claims: Sequence[Claim], status: int | None, reason: str, now: datetime) -> None:
        """IMDS answered 400: another try would fare no better."""
        for claim in claims:
            tx.decisions.answered(claim.grant.id, "refused", status)
            self._tell_start(tx, "startrequest.failed", claim.grant, reason, now)

    def unanswered(self, tx: Transaction, claims: Sequence[Claim], status: int | None) -> None:
        """No 200, and no 400 for one event alone: the claims stand, and are tried again after another fresh read."""
        for claim in claims:
            tx.decisions.answered(claim.grant.id, "sent", status)

    # --- a request

    def _refuse(self, tx: Transaction, approval: Approval, standing: Standing | None, refusal: Refusal) -> Answer:
        if refusal.status != 503:  # HTTP
            event = standing.occurrence.data if standing is not None else _unknown(approval.event_id)
            told = _told(new_id(), approval, standing) | {"refusal": refusal.reason}
            cause = approval.message_id or (standing.occurrence.told if standing is not None else None)
            self._say(tx, "approval.refused", event, self._with_mode(tx, told), cause, approval.at)
        body: dict[str, Any] = {"detail": refusal.reason}
        if refusal.status == 409 and standing is not None:  # HTTP
            body["revision"] = standing.occurrence.revision
        if refusal.field is not None:
            body["field"] = refusal.field
        return Answer(refusal.status, body)

    def _accept(self, tx: Transaction, approval: Approval, standing: Standing) -> Answer:
        # A request with an id of its own is told anew: over AMQP that is its answer. It replaces the vote that it repeats.
        live = _live(approval, standing) if approval.request_id is None else None
        approval_id = live.approval_id if live is not None else self._record(tx, approval, standing)
        after = self._step(tx, standing.occurrence, approval.at)
        return Answer(
            202,
            {
                "approvalId": approval_id,
                "eventId": standing.occurrence.event.event_id,
                "decision": approval.decision,
                "state": _answer_state(approval, after),
                "votes": after.votes,
                "required": after.required,
                "rule": after.rule.name if after.rule is not None else None,
            },
        )

    def _record(self, tx: Transaction, approval: Approval, standing: Standing) -> str:
        """Write the decision down and tell it."""
        principal = approval.caller.principal
        dry_run = standing.mode == "dry-run"
        if approval.decision == "release":
            discounted = [hold for hold in standing.holds if _may_release(approval, hold, standing)]
        else:
            # A principal has one vote and one hold: the newest. What was said in a dry run replaces nothing that was meant.
            same = (one for one in standing.decisions if (one.decision, one.principal) == (approval.decision, principal))
            own = (one for one in same if one.decision == "hold" or one.revision == approval.revision)
            discounted = [one for one in own if one.dry_run or not dry_run]
        for one in discounted:
            tx.decisions.discount(one.approval_id)
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
            told="",
            message_id=approval.message_id,
        )
        counted = replace(standing, decisions=(*standing.decisions, decision))
        told = self._with_mode(tx, _told(decision.approval_id, approval, counted))
        cause = approval.message_id or standing.occurrence.told
        tx.decisions.add(replace(decision, told=self._say(tx, "approval.recorded", standing.occurrence.data, told, cause, approval.at)))
        return decision.approval_id

    def _expires(self, approval: Approval, standing: Standing) -> datetime | None:
        if approval.decision == "hold":
            return approval.at + timedelta(seconds=self.settings.hold_expires)
        if approval.decision == "approve" and standing.asks is not None and standing.asks.expires is not None:
            return approval.at + timedelta(seconds=standing.asks.expires)
        return None

    # --- what follows

    def _step(self, tx: Transaction, occurrence: Occurrence, now: datetime) -> Standing:
        """Step until nothing is left to be done; returns how it stands then."""
        while effects := step(standing := self.standing(tx, occurrence, now), self.in_flight):
            for effect in effects:
                self._apply(tx, effect, standing, now)
        return standing

    def _apply(self, tx: Transaction, effect: Effect, standing: Standing, now: datetime) -> None:
        match effect:
            case Discount(decisions, why):
                for decision in decisions:
                    tx.decisions.discount(decision.approval_id)
                if why is not None:
                    cause = decisions[-1].told if why == "expired" else standing.occurrence.told
                    told = {"why": why} | ({"dryRun": True} if all(one.dry_run for one in decisions) else {})
                    self._say(tx, "approval.voided", standing.occurrence.data, told, cause, now)
            case Expire(hold):
                tx.decisions.discount(hold.approval_id)
                self._tell_expired(tx, hold, standing, now)
            case Fail(grant, reason):
                tx.decisions.answered(grant.id, "failed", None)
                if not grant.dry_run:
                    self._tell_start(tx, "startrequest.failed", grant, reason, now)
            case Allow(rule):
                self._allow(tx, rule.name, standing, now)

    def _allow(self, tx: Transaction, rule: str, standing: Standing, now: datetime) -> None:
        """Grant: on the word of the newest decision where there is one, else of the rule."""
        votes = standing.voted if standing.required else ()
        completing = votes[-1] if votes else None
        last = next(reversed(tx.decisions.of(standing.occurrence.id)), None)
        told = {
            "approvalId": completing.approval_id if completing is not None else new_id(),
            "decision": "approve",
            "principal": completing.principal if completing is not None else f"rule:{rule}",
            "channel": completing.channel if completing is not None else "rule",
            "reason": completing.reason if completing is not None else None,
            "votes": standing.votes,
            "required": standing.required,
            "rule": rule,
        }
        # The cause is the vote, or the release, that completed it; of an automatic grant, the event itself.
        completed = last is not None and (completing is not None or (last.decision == "release" and last.at == now))
        by = last if completed else None
        cause = (by.message_id or by.told) if by is not None else standing.occurrence.told
        granted = self._say(tx, "approval.granted", standing.occurrence.data, self._with_mode(tx, told), cause, now)
        tx.decisions.grant(
            standing.occurrence.id,
            standing.occurrence.revision,
            rule,
            str(told["approvalId"]),
            now,
            dry_run=standing.mode == "dry-run",
            cause=(by.message_id if by is not None else None) or granted,
        )

    def _tell_expired(self, tx: Transaction, hold: Decision, standing: Standing, now: datetime) -> None:
        approval_id = new_id()
        told = {
            "approvalId": approval_id,
            "decision": "release",
            "principal": "relay",
            "channel": "relay",
            "reason": f"the hold of {hold.principal} expired; {HOLD_MEANS}",
            **_count(standing),
        }
        said = self._say(tx, "approval.recorded", standing.occurrence.data, self._with_mode(tx, told), hold.told, now)
        tx.decisions.add(
            Decision(
                approval_id,
                standing.occurrence.id,
                "release",
                "relay",
                "relay",
                standing.occurrence.revision,
                str(told["reason"]),
                now,
                expires=None,
                dry_run=standing.mode == "dry-run",
                counts=False,
                told=said,
                message_id=None,
            )
        )

    def _tell_start(self, tx: Transaction, name: str, grant: Grant, reason: str | None, now: datetime) -> None:
        after = next(one for one in tx.decisions.grants(grant.occurrence) if one.id == grant.id)
        told = {"status": after.status, "attempts": after.attempts, "reason": reason}
        self._say(tx, name, tx.snapshot.by_id(grant.occurrence).data, told, grant.cause, now)

    def _with_mode(self, tx: Transaction, told: dict[str, Any]) -> dict[str, Any]:
        return told | {"dryRun": True} if self.mode(tx) == "dry-run" else told

    def _say(self, tx: Transaction, name: str, event: Mapping[str, Any], told: Mapping[str, Any], cause: str | None, at: datetime) -> str:
        said = tell_decision(name, self.origin, at, event=event, added=told, cause=cause, head=str(tx.head()))
        tx.say(said, at)
        return said.id


def stricter(settings: ApprovalsSettings, remembered: Mode, *, trusted: bool) -> Mode:
    """Of what the file says and what an operator said, the stricter; off where the store is not to be trusted."""
    configured: Mode = "off" if not (settings.enabled and trusted) else "dry-run" if settings.dry_run else "on"
    return max(configured, remembered, key=_STRICTNESS.index)


def new_id() -> str:
    """An approvalId: 128 random bits."""
    return secrets.token_hex(16)


def shown(standing: Standing) -> dict[str, Any]:
    """``approval`` of an event, as the API gives it."""
    return {
        "state": state_of(standing),
        **_count(standing),
        "missing": standing.missing if standing.open else 0,
        "closes": rfc3339(standing.closes) if standing.closes is not None else None,
    }


def _count(standing: Standing) -> dict[str, Any]:
    rule = standing.rule.name if standing.rule is not None else None
    return {"votes": standing.votes, "required": standing.required, "rule": rule}


def _told(approval_id: str, approval: Approval, standing: Standing | None) -> dict[str, Any]:
    return {
        "approvalId": approval_id,
        "decision": approval.decision,
        "principal": approval.caller.principal,
        "channel": approval.caller.channel,
        "reason": approval.reason,
        **(_count(standing) if standing is not None else {"votes": 0, "required": 0, "rule": None}),
    }


def _unknown(event_id: str) -> dict[str, Any]:
    return {"eventId": event_id, **dict.fromkeys(_UNKNOWN), "documentIncarnation": None, "revision": None}


def _live(approval: Approval, standing: Standing) -> Decision | None:
    """The same decision of the same principal on the same revision that counts already."""
    same = (approval.decision, approval.caller.principal, approval.revision)
    return next((one for one in (*standing.voted, *standing.holds) if (one.decision, one.principal, one.revision) == same), None)


def _may_release(approval: Approval, hold: Decision, standing: Standing) -> bool:
    own = standing.person(hold.principal) == standing.person(approval.caller.principal)
    return own or "operate" in approval.caller.rights.can


def _answer_state(approval: Approval, standing: Standing) -> str:
    if standing.holds:
        return "held"
    if standing.grant is not None:
        return "granted"
    if approval.decision == "release" and not standing.votes:
        return "released"
    return "pending"
