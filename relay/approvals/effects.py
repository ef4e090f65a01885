"""What follows from how an event stands, written down and told: votes void, holds over, grants given and given up.

Each function works inside one transaction. Nothing here waits, sends, or decides.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from relay.approvals.authorize import HOLD_NOTICE
from relay.approvals.status import ApprovalStatus
from relay.approvals.transitions import CreateGrant, ExpireHold, FailGrant, Transition, VoidVotes
from relay.events.build import Origin, decision_event
from relay.outbox import Decision, Grant, Mode
from relay.outbox.transaction import Transaction


@dataclass(frozen=True, slots=True)
class ApprovalJournal:
    """Writes down and tells, in the name of one relay."""

    origin: Origin

    def apply(
        self, tx: Transaction, effect: Transition, standing: ApprovalStatus, now: datetime
    ) -> None:
        """Write down one thing that follows from how an event stands, and tell it."""
        match effect:
            case VoidVotes(decisions, why):
                for decision in decisions:
                    tx.decisions.stop_counting(decision.approval_id)
                if why is not None:
                    cause = (
                        decisions[-1].recorded_event_id
                        if why == "expired"
                        else standing.occurrence.last_event_id
                    )
                    told = {"why": why} | (
                        {"dryRun": True} if all(one.dry_run for one in decisions) else {}
                    )
                    self.say(tx, "approval.voided", standing.occurrence.data, told, cause, now)
            case ExpireHold(hold):
                tx.decisions.stop_counting(hold.approval_id)
                self._tell_expired(tx, hold, standing, now)
            case FailGrant(grant, reason):
                tx.decisions.record_answer(grant.id, "failed", None)
                if not grant.dry_run:
                    self.tell_start(tx, "startrequest.failed", grant, reason, now)
            case CreateGrant(rule):
                self._allow(tx, rule.name, standing, now)

    def _allow(self, tx: Transaction, rule: str, standing: ApprovalStatus, now: datetime) -> None:
        """Grant: on the word of the newest decision where there is one, else of the rule."""
        votes = standing.counted_votes if standing.votes_required else ()
        completing = votes[-1] if votes else None
        last = next(reversed(tx.decisions.for_occurrence(standing.occurrence.id)), None)
        told = {
            "approvalId": completing.approval_id if completing is not None else new_id(),
            "decision": "approve",
            "principal": completing.principal if completing is not None else f"rule:{rule}",
            "channel": completing.channel if completing is not None else "rule",
            "reason": completing.reason if completing is not None else None,
            "votes": standing.vote_count,
            "required": standing.votes_required,
            "rule": rule,
        }
        # The cause is the vote, or the release, that completed it; of an automatic grant, the event itself.
        completed = last is not None and (
            completing is not None or (last.decision == "release" and last.at == now)
        )
        by = last if completed else None
        cause = (
            (by.message_id or by.recorded_event_id)
            if by is not None
            else standing.occurrence.last_event_id
        )
        granted = self.say(
            tx,
            "approval.granted",
            standing.occurrence.data,
            with_mode(standing.mode, told),
            cause,
            now,
        )
        tx.decisions.add_grant(
            standing.occurrence.id,
            standing.occurrence.revision,
            rule,
            str(told["approvalId"]),
            now,
            dry_run=standing.mode == "dry-run",
            cause=(by.message_id if by is not None else None) or granted,
        )

    def _tell_expired(
        self, tx: Transaction, hold: Decision, standing: ApprovalStatus, now: datetime
    ) -> None:
        approval_id = new_id()
        told = {
            "approvalId": approval_id,
            "decision": "release",
            "principal": "relay",
            "channel": "relay",
            "reason": f"the hold of {hold.principal} expired; {HOLD_NOTICE}",
            **count(standing),
        }
        said = self.say(
            tx,
            "approval.recorded",
            standing.occurrence.data,
            with_mode(standing.mode, told),
            hold.recorded_event_id,
            now,
        )
        tx.decisions.add_decision(
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
                recorded_event_id=said,
                message_id=None,
            )
        )

    def tell_start(
        self, tx: Transaction, name: str, grant: Grant, reason: str | None, now: datetime
    ) -> None:
        """Tell what became of a StartRequest."""
        after = next(one for one in tx.decisions.grants(grant.occurrence) if one.id == grant.id)
        told = {"status": after.status, "attempts": after.attempts, "reason": reason}
        self.say(tx, name, tx.snapshot.by_id(grant.occurrence).data, told, grant.cause, now)

    def say(
        self,
        tx: Transaction,
        name: str,
        event: Mapping[str, Any],
        told: Mapping[str, Any],
        cause: str | None,
        at: datetime,
    ) -> str:
        """Tell of an event what ``told`` says, because of ``cause``; returns the id."""
        said = decision_event(
            name, self.origin, at, event=event, added=told, cause=cause, head=str(tx.head())
        )
        tx.record(said, at)
        return said.id


def with_mode(mode: Mode, told: dict[str, Any]) -> dict[str, Any]:
    """The same, marked where it is said in a dry run."""
    return told | {"dryRun": True} if mode == "dry-run" else told


def new_id() -> str:
    """An approvalId: 128 random bits."""
    return secrets.token_hex(16)


def count(standing: ApprovalStatus) -> dict[str, Any]:
    """How many of how many votes there are, and the rule that asks for them."""
    rule = standing.rule.name if standing.rule is not None else None
    return {"votes": standing.vote_count, "required": standing.votes_required, "rule": rule}
