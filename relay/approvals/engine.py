"""Decides approvals inside transactions of the store: requests, transitions, claims and answers.

`gate` and `start_requests` run these methods in the store. The rules of decision are in
`admission`, `standing_holds` and `transitions`; `recording` writes what was decided. Nothing here
waits or sends.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

from relay.approvals import ApprovalsSettings, ClaimedGrant
from relay.approvals.admission import (
    REUSED_ID,
    ambiguous_scope_refusal,
    build_accepted_answer,
    build_decision,
    find_decision_refusal,
    find_decisions_to_end,
    find_same_decision,
)
from relay.approvals.limits import CountMachines, LimitSlots
from relay.approvals.recording import (
    Recording,
    new_approval_id,
    record_refusal,
    record_standing_hold,
)
from relay.approvals.request import DecisionAnswer, DecisionRequest, Request
from relay.approvals.rules import Quorum
from relay.approvals.standing_holds import (
    CreateRequest,
    EndRequest,
    is_about,
    next_hold_change,
    refuse_creation,
    refuse_end,
)
from relay.approvals.status import ApprovalStatus, first_matching_rule
from relay.approvals.transitions import (
    CreateGrant,
    Transition,
    VoidVotes,
    can_claim_grant,
    due_transitions,
    next_change_at,
)
from relay.clock import TokenBuckets
from relay.errors import SourceError, SourceRefused
from relay.events.build import Origin
from relay.events.data_types import LimitWait
from relay.store import FirstAnswer, Grant, GrantState, Mode, StandingHold, TrackedEvent
from relay.store.standing_holds import CREATED, ENDED, EXPIRED
from relay.store.transaction import Transaction

_log = logging.getLogger(__name__)
SAME_DECISION = timedelta(minutes=1)
"""For so long a decision that changes nothing gets the answer to the first."""
MAX_REFUSALS = 100
"""Refusals of one principal that are recorded at once, and then in each minute. The metric and the
log count all of them."""


class ApprovalEngine:
    def __init__(
        self,
        settings: ApprovalsSettings,
        origin: Origin,
        *,
        trusted: bool = True,
        client_resources: Mapping[str, tuple[str, ...] | None] = MappingProxyType({}),
        count_machines: CountMachines = lambda _: 0,
    ) -> None:
        """``trusted`` is False if nobody knows whether the store belongs to this VM.

        ``client_resources`` are the clients that may approve, and the resources each may decide for
        (None: all). A limit whose ``max`` is a share needs ``count_machines``; without it, it has
        one slot.
        """
        self.origin = origin
        self.in_flight: set[tuple[int, int]] = set()
        """The StartRequests that are being sent now, as `ApprovalStatus` has them. The sender adds
        them before the claim, and takes them away once the answer is recorded."""
        self.next_change: datetime | None = datetime.min.replace(tzinfo=UTC)
        """When a transition can be due by time alone, or earlier; None: never. What is rolled back
        can leave it too early, which costs one check."""
        self.unrecorded_refusals = Counter[str]()
        """Refusals beyond `MAX_REFUSALS`, by decision."""
        # A transaction that runs twice takes two tokens of each, which only makes this tell less.
        self._refusals = TokenBuckets(MAX_REFUSALS / 60, MAX_REFUSALS)
        self._compared_holds: tuple[StandingHold, ...] = ()
        self._holds_about: dict[tuple[int, str], tuple[StandingHold, ...]] = {}
        """Those of ``_compared_holds`` that are about an occurrence in a state."""
        self._trusted = trusted
        self.settings = settings
        self._client_resources = client_resources
        self.acts_unasked = any(
            not isinstance(rule.approve, Quorum) or rule.approve.remind for rule in settings.rules
        )
        """Whether something can follow for an event about which nobody has decided anything: by an
        automatic rule, or a reminder."""
        has_automatic_rule = any(rule.approve == "automatic" for rule in settings.rules)
        self._limits = LimitSlots(
            settings.limits, self._status_without_limits, count_machines, has_automatic_rule
        )
        conditions = [rule.match for rule in settings.rules]
        conditions += [limit.match for limit in settings.limits]
        self._have_hours = any(each.time is not None for each in conditions)

    def effective_approval_mode(self, tx: Transaction) -> Mode:
        trusted = self._trusted and tx.standing_holds.damage is None
        return self.settings.mode(tx.stored_approval_mode(), trusted=trusted)

    def status(self, tx: Transaction, occurrence: TrackedEvent, now: datetime) -> ApprovalStatus:
        status = self._status_without_limits(tx, occurrence, now)
        waits = self._limits.waits_of(tx, status)
        return replace(status, waiting_for=waits) if waits else status

    def _status_without_limits(
        self, tx: Transaction, occurrence: TrackedEvent, now: datetime
    ) -> ApprovalStatus:
        approvals = tx.approvals.of_occurrence(occurrence)
        damage = approvals.damage or tx.standing_holds.damage
        return ApprovalStatus(
            occurrence=occurrence,
            decisions=approvals.decisions,
            grants=approvals.grants,
            damage=damage,
            rule=first_matching_rule(self.settings.rules, occurrence, now),
            groups=self.settings.groups,
            mode=self.effective_approval_mode(tx) if damage is None else "off",
            now=now,
            people=self.settings.people,
            resources_by_client=self._client_resources,
            in_flight=frozenset(self.in_flight),
            standing_holds=self._standing_holds_about(tx, occurrence) if occurrence.live else (),
            is_reminded=any(revision == occurrence.revision for _, revision in approvals.reminded),
        )

    def _standing_holds_about(
        self, tx: Transaction, occurrence: TrackedEvent
    ) -> tuple[StandingHold, ...]:
        # Compared once for each state: a pass over many events takes a fifth of the time.
        open_holds = tx.standing_holds.list_open()
        if not open_holds:
            return ()
        if open_holds is not self._compared_holds:
            self._compared_holds, self._holds_about = open_holds, {}
        key = (occurrence.id, occurrence.last_event_id)
        if key not in self._holds_about:
            self._holds_about[key] = tuple(
                hold for hold in open_holds if is_about(hold, occurrence)
            )
        return self._holds_about[key]

    # --- requests

    def decide(self, tx: Transaction, request: Request) -> DecisionAnswer:
        """Record what is decided; `follow_up` records the rest. A repeat gets its first answer."""
        principal, request_id = request.caller.principal, request.request_id
        first = tx.answers.find(principal, request_id) if request_id is not None else None
        if first is not None and first.digest == request.digest:
            return DecisionAnswer(first.status, first.body, repeat=True)
        reused = REUSED_ID if first is not None else None
        match request:
            case DecisionRequest():
                answer = self._decide_about_event(tx, request, reused)
            case CreateRequest():
                answer = reused or self._create_standing_hold(tx, request)
            case EndRequest():
                answer = reused or self._end_standing_hold(tx, request)
            case _:
                raise TypeError(f"expected a request that can be decided, got {request!r:.80}")
        if request_id is not None and answer.accepted:
            said = answer.status, dict(answer.body), request.at
            tx.answers.add(FirstAnswer(principal, request_id, request.digest, *said))
        return answer

    def _decide_about_event(
        self, tx: Transaction, request: DecisionRequest, refusal: DecisionAnswer | None
    ) -> DecisionAnswer:
        occurrences: list[TrackedEvent] = []
        scope = request.arrival_scope or request.scope
        if request.scope in (None, scope):
            occurrences = tx.occurrences.find_occurrences_by_reference(request.event_id, scope)
        status: ApprovalStatus | None = None
        if len(occurrences) == 1:
            if self.next_change is not None and self.next_change <= request.at:
                # What was due before comes first. All events would keep whoever is next waiting.
                self.apply_due_transitions(tx, request.at, [occurrences[0].key])
            status = self.status(tx, occurrences[0], request.at)
        elif len(occurrences) > 1:
            refusal = refusal or ambiguous_scope_refusal(occurrences)
        refusal = refusal or find_decision_refusal(request, status)
        if refusal is not None:
            return self._refuse_request(tx, request, status, refusal)
        assert status is not None  # noqa: S101  # find_decision_refusal refuses an unknown event
        return self._accept_request(tx, request, status)

    def _refuse_request(
        self,
        tx: Transaction,
        request: DecisionRequest,
        status: ApprovalStatus | None,
        refusal: DecisionAnswer,
    ) -> DecisionAnswer:
        principal, reason = request.caller.principal, refusal.body["detail"]
        if refusal.status in (422, 503):  # HTTP
            pass
        elif self._refusals.take(principal, request.at.timestamp()):
            self.unrecorded_refusals[request.decision] += 1
            _log.info(
                "%s may not %s event %s: %s", principal, request.decision, request.event_id, reason
            )
        else:
            record_refusal(tx, self.origin, request, status, reason)
        if refusal.status == 409 and status is not None:  # HTTP
            return replace(refusal, body={**refusal.body, "revision": status.occurrence.revision})
        return refusal

    def _accept_request(
        self, tx: Transaction, request: DecisionRequest, status: ApprovalStatus
    ) -> DecisionAnswer:
        """Record the decision, unless the caller took the same one within the last minute.

        Later it takes the place of that one, and expires later. Over AMQP the event is the answer,
        so there each message gets one.
        """
        same_decision = find_same_decision(request, status)
        if (
            same_decision is not None
            and request.message_id is None
            and abs(request.at - same_decision.at) < SAME_DECISION
        ):
            return build_accepted_answer(request, same_decision, status)
        decision = build_decision(
            request, status, approval_id=new_approval_id(), hold_expires=self.settings.hold_expires
        )
        occurrence, ended = status.occurrence, find_decisions_to_end(request, status)
        left = (earlier for earlier in status.decisions if earlier not in ended)
        after = replace(status, decisions=(*left, decision))
        after = replace(after, waiting_for=self._limits.waits_of(tx, after))
        cause = request.message_id or occurrence.last_event_id
        Recording(tx, self.origin, occurrence, request.at).decision(decision, after, cause, ended)
        return build_accepted_answer(request, decision, after)

    # --- standing holds

    def _create_standing_hold(self, tx: Transaction, request: CreateRequest) -> DecisionAnswer:
        hold = request.hold(new_approval_id())
        refusal = refuse_creation(request, hold, tx.standing_holds.list_open())
        if refusal is not None:
            return refusal
        told = record_standing_hold(tx, self.origin, CREATED, hold, request.at)
        return DecisionAnswer(201, told)

    def _end_standing_hold(self, tx: Transaction, request: EndRequest) -> DecisionAnswer:
        hold = tx.standing_holds.find(request.hold_id)
        refusal = refuse_end(request, hold)
        if refusal is not None:
            return refusal
        assert hold is not None  # noqa: S101  # refuse_end refuses an unknown one
        ended = {"endedBy": request.caller.principal, "endReason": request.reason}
        told = record_standing_hold(tx, self.origin, ENDED, hold, request.at, **ended)
        return DecisionAnswer(200, told)

    # --- transitions

    def follow_up(self, tx: Transaction, now: datetime) -> None:
        """Record what follows from what this transaction has recorded (`Store.follow_up`)."""
        if tx.changed is not None and not (self.acts_unasked or tx.approvals.exist()):
            return
        keys = None if tx.changed is None else sorted(tx.changed)
        moment = self.apply_due_transitions(tx, now, keys)
        self.next_change = _earliest([moment, self.next_change])

    def check_all(self, tx: Transaction, now: datetime) -> None:
        """Apply every transition that is due: the time has come for one, or the rules changed."""
        self.next_change = self.apply_due_transitions(tx, now)
        tx.changed = set()

    def apply_due_transitions(
        self, tx: Transaction, now: datetime, event_keys: Sequence[str] | None = None
    ) -> datetime | None:
        """Apply every transition that is due; return when the next can be due by time alone.

        ``event_keys``: only consider these events, unless a standing hold expires.
        """
        for hold in tx.standing_holds.list_open():
            if hold.ends <= now:
                record_standing_hold(tx, self.origin, EXPIRED, hold, now)
                event_keys = None
        moments = [next_hold_change(hold, now) for hold in tx.standing_holds.list_open()]
        for occurrence in tx.approvals.occurrences_to_check(
            all_live=self.acts_unasked, event_keys=event_keys
        ):
            status = self._apply_event_transitions(tx, occurrence, now)
            moments.append(next_change_at(status))
            if status.is_startable and self._have_hours:
                # Hours begin and end at whole minutes, in every time zone.
                moments.append(now.replace(second=0, microsecond=0) + timedelta(minutes=1))
        return _earliest(moments + self._grant_what_has_slots(tx, now))

    def _grant_what_has_slots(self, tx: Transaction, now: datetime) -> list[datetime | None]:
        """Grant all events that a limit counts and that have slots now, first in line first.

        In a dry run they only keep their places. Return when something follows by time alone.
        """
        line = self._limits.line(tx, now)
        moments = [line.next_rest_end]
        for occurrence in line.grantable:  # the grants change nothing about who has slots
            status = self._status_without_limits(tx, occurrence, now)
            moments.append(status.not_before)
            if status.mode == "on":
                Recording(tx, self.origin, occurrence, now).transition(CreateGrant(), status)
        if line.waiting:  # their messages show who takes the slots
            tx.messages.refresh_about(line.waiting, now)
        return moments

    def _apply_event_transitions(
        self, tx: Transaction, occurrence: TrackedEvent, now: datetime
    ) -> ApprovalStatus:
        """Apply transitions until none is due. What a limit counts is granted afterwards."""
        recording = Recording(tx, self.origin, occurrence, now)
        is_granted_later = self._limits.counts(occurrence, now)
        while True:
            status = self._status_without_limits(tx, occurrence, now)
            transitions = [
                each
                for each in due_transitions(status)
                if not (is_granted_later and isinstance(each, CreateGrant))
            ]
            if not transitions:
                return status
            for transition in transitions:
                waited = self._waits_until_expiry(tx, transition, status)
                recording.transition(transition, status, waited)

    def _waits_until_expiry(
        self, tx: Transaction, transition: Transition, status: ApprovalStatus
    ) -> Sequence[LimitWait]:
        if not isinstance(transition, VoidVotes) or transition.reason != "expired":
            return ()
        end = _earliest([status.not_before, *map(status.decision_expires_at, transition.decisions)])
        assert end is not None  # noqa: S101  # otherwise they have not expired
        return self._limits.waits_of(tx, replace(status, now=end - timedelta(microseconds=1)))

    # --- StartRequests

    def claim_grant(
        self, tx: Transaction, known: Grant, now: datetime, *, agent: str | None = None
    ) -> ClaimedGrant | None:
        """Check everything again, and claim the grant; None if no StartRequest may be sent now.

        The caller sends it to ``agent`` only after this transaction is on disk
        (docs/guarantees.md#every-startrequest-follows-from-the-journal).
        """
        occurrence = tx.occurrences.require_occurrence(known.occurrence)
        tx.approvals.verify(occurrence.key)  # damage turns its approvals off
        status = self.status(tx, occurrence, now)
        grant = next((each for each in status.grants if each.id == known.id), None)
        if grant is None or not can_claim_grant(grant, status):
            return None
        Recording(tx, self.origin, occurrence, now).claim(grant, status, agent)
        return ClaimedGrant(grant, occurrence.event.event_id, agent, tx.head())

    def record_start_answer(
        self, tx: Transaction, claim: ClaimedGrant, error: SourceError | None, now: datetime
    ) -> None:
        """Record the answer of IMDS to a StartRequest; None means 200.

        A 400 is final. After any other error it is sent again, after another fresh read.
        """
        state: GrantState = "accepted"
        if error is not None:
            state = "refused" if isinstance(error, SourceRefused) else "sent"
        occurrence = tx.occurrences.require_occurrence(claim.grant.occurrence)
        Recording(tx, self.origin, occurrence, now).start_answer(
            replace(claim.grant, attempts=claim.attempt_number),
            state,
            http_status=error.status if error is not None else 200,
            reason=error.reason if error is not None else None,
        )


def _earliest(moments: Iterable[datetime | None]) -> datetime | None:
    return min((each for each in moments if each is not None), default=None)
