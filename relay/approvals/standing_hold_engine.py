"""Makes, ends and expires standing holds inside transactions of the store.

Each change is a row in the journal and a CloudEvent. `relay.approvals.gate` runs these functions,
and lets the transitions that follow be applied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import orjson

from relay.approvals.admission import REUSED_ID, Refusal
from relay.approvals.decision_recording import new_approval_id
from relay.approvals.refusal_aggregation import MINUTE
from relay.approvals.request import DecisionAnswer
from relay.approvals.standing_hold_admission import (
    CreateOrEndRequest,
    CreateRequest,
    EndRequest,
    hold_times,
    refuse_creation,
    refuse_end,
    resource_pattern_lists_of_rights,
    standing_hold_to_json_object,
)
from relay.approvals.standing_holds import conditions_to_json_object, is_about
from relay.events.build import Origin, standing_hold_event
from relay.store import StandingHold
from relay.store.standing_holds import CREATED, ENDED, EXPIRED, standing_holds_only_in_first
from relay.store.transaction import Transaction

_log = logging.getLogger(__name__)
_DAY = timedelta(days=1)


def create_standing_hold(tx: Transaction, origin: Origin, request: CreateRequest) -> DecisionAnswer:
    """Make a standing hold. A repeat gets its first answer."""

    def decide() -> DecisionAnswer:
        created_in_minute, created_in_day = (
            tx.standing_holds.count_created(
                request.caller.principal, request.at - period, request.at + period
            )
            for period in (MINUTE, _DAY)
        )
        refusal = refuse_creation(
            request, tx.standing_holds.list_open(), created_in_minute, created_in_day
        )
        if refusal is not None:
            return _refusal_answer(refusal)
        hold = _create_and_record_hold(tx, origin, request)
        return DecisionAnswer(201, standing_hold_to_json_object(hold))

    return _decide_or_repeat_first_answer(tx, request, decide)


def end_standing_hold(
    tx: Transaction, origin: Origin, request: EndRequest, people: Mapping[str, Sequence[str]]
) -> DecisionAnswer:
    """End a standing hold early. A repeat gets its first answer."""

    def decide() -> DecisionAnswer:
        hold = tx.standing_holds.find(request.hold_id)
        refusal = refuse_end(request, hold, people)
        if refusal is not None:
            return _refusal_answer(refusal)
        assert hold is not None  # noqa: S101  # refuse_end refuses an unknown one
        principal = request.caller.principal
        ended = {"endedBy": principal, "endReason": request.reason}
        data = {**standing_hold_to_json_object(hold), **ended}
        head = str(tx.head())
        event = standing_hold_event(ENDED, origin, request.at, data=data, head=head)
        tx.record(event, request.at)
        tx.standing_holds.end(hold.hold_id, request.at, principal)
        _refresh_messages(tx, hold, request.at)
        return DecisionAnswer(200, data)

    return _decide_or_repeat_first_answer(tx, request, decide)


def expire_standing_holds(tx: Transaction, origin: Origin, now: datetime) -> list[StandingHold]:
    """Expire the standing holds whose time is over; return them."""
    expired = _find_expired(tx, now)
    if expired and correct_standing_holds_by_journal(tx, now):  # somebody may have shortened one
        expired = _find_expired(tx, now)
    for hold in expired:
        data, head = standing_hold_to_json_object(hold), str(tx.head())
        tx.record(standing_hold_event(EXPIRED, origin, now, data=data, head=head), now)
        tx.standing_holds.end(hold.hold_id, now, None)
        _refresh_messages(tx, hold, now)
    return expired


def _find_expired(tx: Transaction, now: datetime) -> list[StandingHold]:
    return [hold for hold in tx.standing_holds.list_open() if hold.ends <= now]


def correct_standing_holds_by_journal(tx: Transaction, now: datetime) -> bool:
    """Correct the table by the journal; return whether they differed.

    Another program can change the table, and so end a hold. If the row of a hold in the journal was
    changed, nobody knows what it said: the hold stays, as the table has it. This reads all that was
    decided about standing holds, so it comes only before a grant and before a claim, and once in a
    transaction that changes none.
    """
    if tx.standing_holds.compared_at == now:
        return False
    in_journal = tx.standing_holds.list_open_in_journal(now)
    in_table = [hold for hold in tx.standing_holds.list_open() if hold.ends > now]
    forged = [
        hold
        for hold in standing_holds_only_in_first(in_table, in_journal)
        if not tx.standing_holds.is_journal_row_damaged(hold)
    ]
    missing = standing_holds_only_in_first(in_journal, in_table)
    if not forged and not missing:
        tx.standing_holds.compared_at = now
        return False
    for hold in forged:
        tx.standing_holds.end(hold.hold_id, now, None)
    for hold in missing:
        before = tx.standing_holds.find(hold.hold_id)
        number = before.number if before is not None else tx.standing_holds.next_number()
        tx.standing_holds.add(replace(hold, number=number))
    _log.error(
        "the standing holds in the state file were changed by another program: "
        "%d are not in the journal, %d are missing. The relay follows the journal",
        len(forged),
        len(missing),
    )
    return True


def _decide_or_repeat_first_answer(
    tx: Transaction, request: CreateOrEndRequest, decide: Callable[[], DecisionAnswer]
) -> DecisionAnswer:
    """Return the first answer to the same request, or else decide it and remember the answer."""
    principal, request_id = request.caller.principal, request.request_id
    if request_id is None:
        return decide()
    first = tx.decisions.first_answer(principal, request_id)
    if first is not None:
        if first.digest != request.digest:
            return _refusal_answer(REUSED_ID)
        return DecisionAnswer(first.status, first.body, repeat=True)
    answer = decide()
    if answer.status in (200, 201, 403, 409):  # HTTP
        tx.decisions.remember_answer(
            principal, request_id, request.digest, answer.status, dict(answer.body), request.at
        )
    return answer


def _create_and_record_hold(
    tx: Transaction, origin: Origin, request: CreateRequest
) -> StandingHold:
    starts, ends = hold_times(request)
    hold = StandingHold(
        number=tx.standing_holds.next_number(),
        hold_id=new_approval_id(),
        conditions=orjson.dumps(conditions_to_json_object(request.body.match)).decode(),
        within=orjson.dumps(resource_pattern_lists_of_rights(request.caller.rights)).decode(),
        starts=starts,
        ends=ends,
        principal=request.caller.principal,
        channel=request.caller.channel,
        reason=request.body.reason,
        created=request.at,
    )
    data, head = standing_hold_to_json_object(hold), str(tx.head())
    tx.record(standing_hold_event(CREATED, origin, request.at, data=data, head=head), request.at)
    hold = replace(hold, position=tx.recorded[-1].position)
    tx.standing_holds.add(hold)
    _refresh_messages(tx, hold, request.at)
    return hold


def _refusal_answer(refusal: Refusal) -> DecisionAnswer:
    field = {} if refusal.field is None else {"field": refusal.field}
    return DecisionAnswer(refusal.status, {"detail": refusal.reason, **field})


def _refresh_messages(tx: Transaction, hold: StandingHold, now: datetime) -> None:
    """Make the messages about the events that a standing hold is about due for refresh."""
    about = [
        occurrence.id
        for occurrence in tx.occurrences.live_occurrences()
        if is_about(hold, occurrence)
    ]
    shown = tx.messages.filter_shown_occurrences(about)
    if shown:
        tx.messages.refresh_about(shown, now)
