"""Makes, ends and expires standing holds inside transactions of the store.

Each change is a row in the journal and a CloudEvent. `relay.approvals.gate` runs these functions,
and lets the transitions that follow be applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

import orjson

from relay.approvals.admission import REUSED_ID, Refusal
from relay.approvals.decision_recording import new_approval_id
from relay.approvals.request import DecisionAnswer
from relay.approvals.standing_hold_admission import (
    CreateOrEndRequest,
    CreateRequest,
    EndRequest,
    hold_times,
    patterns_of_rights,
    refuse_creation,
    refuse_end,
    standing_hold_to_json_object,
)
from relay.approvals.standing_holds import conditions_to_json_object, is_about
from relay.events.build import Origin, standing_hold_event
from relay.store import StandingHold
from relay.store.standing_holds import CREATED, ENDED, EXPIRED
from relay.store.transaction import Transaction

_MINUTE, _DAY = timedelta(minutes=1), timedelta(days=1)


def create_standing_hold(tx: Transaction, origin: Origin, request: CreateRequest) -> DecisionAnswer:
    """Make a standing hold. A repeat gets its first answer."""

    def decide() -> DecisionAnswer:
        created_in_minute, created_in_day = (
            tx.standing_holds.count_created(
                request.caller.principal, request.at - period, request.at + period
            )
            for period in (_MINUTE, _DAY)
        )
        refusal = refuse_creation(
            request, tx.standing_holds.list_open(), created_in_minute, created_in_day
        )
        if refusal is not None:
            return _refusal_answer(refusal)
        hold = _build_hold(request)
        return DecisionAnswer(201, _record(tx, origin, CREATED, hold, request.at))

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
        ended = {"endedBy": request.caller.principal, "endReason": request.reason}
        return DecisionAnswer(200, _record(tx, origin, ENDED, hold, request.at, ended))

    return _decide_or_repeat_first_answer(tx, request, decide)


def expire_standing_holds(tx: Transaction, origin: Origin, now: datetime) -> list[StandingHold]:
    """Expire the standing holds whose time is over; return them."""
    expired = [hold for hold in tx.standing_holds.list_open() if hold.ends <= now]
    for hold in expired:
        _record(tx, origin, EXPIRED, hold, now)
    return expired


def _decide_or_repeat_first_answer(
    tx: Transaction, request: CreateOrEndRequest, decide: Callable[[], DecisionAnswer]
) -> DecisionAnswer:
    """Return the first answer to the same request, or else decide it and remember the answer."""
    principal, request_id = request.caller.principal, request.request_id
    if request_id is None:
        return decide()
    first = tx.answers.find(principal, request_id)
    if first is not None:
        if first.digest != request.digest:
            return _refusal_answer(REUSED_ID)
        return DecisionAnswer(first.status, first.body, repeat=True)
    answer = decide()
    if answer.status in (200, 201):  # HTTP
        tx.answers.add(
            principal, request_id, request.digest, answer.status, dict(answer.body), request.at
        )
    return answer


def _build_hold(request: CreateRequest) -> StandingHold:
    starts, ends = hold_times(request)
    return StandingHold(
        hold_id=new_approval_id(),
        conditions=orjson.dumps(conditions_to_json_object(request.body.match)).decode(),
        within=orjson.dumps(patterns_of_rights(request.caller.rights)).decode(),
        starts=starts,
        ends=ends,
        principal=request.caller.principal,
        channel=request.caller.channel,
        reason=request.body.reason,
        created=request.at,
    )


def _refusal_answer(refusal: Refusal) -> DecisionAnswer:
    field = {} if refusal.field is None else {"field": refusal.field}
    return DecisionAnswer(refusal.status, {"detail": refusal.reason, **field})


def _record(
    tx: Transaction,
    origin: Origin,
    name: str,
    hold: StandingHold,
    at: datetime,
    added: Mapping[str, str | None] = MappingProxyType({}),
) -> dict[str, Any]:
    """Record an event about a standing hold; return its data.

    The messages about the events that it is about become due for refresh.
    """
    data = {**standing_hold_to_json_object(hold), **added}
    tx.record(standing_hold_event(name, origin, at, data=data, head=str(tx.head())), at)
    live = tx.occurrences.live_occurrences()
    about = [occurrence.id for occurrence in live if is_about(hold, occurrence)]
    shown = tx.messages.filter_shown_occurrences(about)
    if shown:
        tx.messages.refresh_about(shown, at)
    return data
