"""Standing holds: which events they are about, and when, and who may make and end them. Pure.

A standing hold is a hold by conditions and for a time. It is made before an event exists, by
somebody with the right `operate`, and keeps this relay from starting every event that can meet its
conditions, automatic rules included. Nobody knows yet which events will, so whose rights are
limited to resources makes none.
`engine` records what was made, ended and expired, and `relay.store.standing_holds` folds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from relay.approvals.request import HOLD_NOTICE, DecisionAnswer, Request, refuse
from relay.events.match import EVENT_SOURCES, EVENT_TYPES, Match, matches
from relay.events.timestamps import format_rfc3339, parse_timestamp
from relay.settings import RequestBody, closest
from relay.store import StandingHold, TrackedEvent

MAX_OPEN = 100
"""Standing holds that are not over: each event is compared with all. More are refused."""
MAX_AHEAD = timedelta(days=366)
"""How far from now a standing hold may end."""
MAX_NAMED = 10
"""Standing holds that an answer names."""
TIMESTAMP = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)$"
"""RFC 3339."""


# --- requests


def _parse(text: object) -> datetime:
    is_valid = isinstance(text, str) and re.fullmatch(TIMESTAMP, text, re.ASCII) is not None
    moment = parse_timestamp(str(text)) if is_valid else None
    if moment is None:
        raise ValueError("expected a time such as 2022-04-11T22:26:58Z")
    return moment


Timestamp = Annotated[
    datetime, BeforeValidator(_parse), WithJsonSchema({"type": "string", "pattern": TIMESTAMP})
]


class StandingHoldBody(RequestBody):
    """The body of ``POST /v1/standing-holds``."""

    match: Match
    """``{}`` holds every event. An event that can meet them is held: one matching resource is
    enough, and so is a type, source or duration that Azure does not say."""
    starts: Timestamp | None = None
    """RFC 3339: from when it holds; default: at once."""
    ends: Timestamp
    """RFC 3339: until when it holds, at most 366 days from now."""
    reason: str = Field(min_length=1, max_length=1000)
    """Shown wherever the hold is."""


class EndBody(RequestBody):
    """The body of ``POST /v1/standing-holds/{holdId}/end``."""

    reason: str | None = Field(default=None, max_length=1000)
    """For the audit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRequest(Request):
    body: StandingHoldBody

    def hold(self, hold_id: str) -> StandingHold:
        return StandingHold(
            hold_id=hold_id,
            conditions=self.body.match,
            starts=self.body.starts or self.at,
            ends=self.body.ends,
            principal=self.caller.principal,
            channel=self.caller.channel,
            reason=self.body.reason,
            created=self.at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequest(Request):
    hold_id: str
    reason: str | None = None


def refuse_creation(
    request: CreateRequest, hold: StandingHold, open_holds: Sequence[StandingHold]
) -> DecisionAnswer | None:
    if request.caller.rights.are_limited:
        return refuse(
            403,
            "you may not hold events by conditions, because your rights (resources) are for some "
            "machines only: hold each event as it comes, or ask somebody whose rights are not "
            "limited",
        )
    for field, known in (("event_type", EVENT_TYPES), ("event_source", EVENT_SOURCES)):
        for value in getattr(hold.conditions, field) or ():
            if value.lower() not in map(str.lower, known):
                close = closest(value, known)
                meant = f"did you mean {close}? It" if close else "it"
                text = f"expected {', '.join(known)}, got {value}: {meant} would hold nothing"
                return refuse(422, f"match.{field}: {text}", f"match.{field}")
    time_problem = _time_problem(hold.starts, hold.ends, request.at)
    if time_problem is not None:
        return refuse(422, f"ends: {time_problem}; it is {format_rfc3339(request.at)}", "ends")
    if len(open_holds) >= MAX_OPEN:
        return refuse(409, f"there are {MAX_OPEN} standing holds that are not over: end some")
    return None


def _time_problem(starts: datetime, ends: datetime, now: datetime) -> str | None:
    if ends <= now:
        return "expected a time in the future"
    if ends <= starts:
        return "expected a time after starts"
    if ends > now + MAX_AHEAD:
        return f"expected a time within {MAX_AHEAD.days} days from now"
    return None


def refuse_end(request: EndRequest, hold: StandingHold | None) -> DecisionAnswer | None:
    if hold is None:
        return refuse(404, "no such standing hold; see GET /v1/standing-holds")
    if hold.ended is not None or hold.ends <= request.at:
        return refuse(409, "the standing hold is over")
    if request.caller.rights.are_limited:
        return refuse(
            403,
            "you may not end a standing hold, because your rights (resources) are for some "
            "machines only: ask somebody whose rights are not limited",
        )
    return None


# --- which events, and when


def is_about(hold: StandingHold, occurrence: TrackedEvent) -> bool:
    """Whether a standing hold is about an event, at whatever time."""
    data, scope = occurrence.data, occurrence.scope
    return matches(hold.conditions, data, scope, every_resource=False, unknown=True)


def has_begun(hold: StandingHold, now: datetime) -> bool:
    """Whether its start has come. If that was when it was made, no clock set back changes that."""
    return hold.starts <= max(now, hold.created)


def is_in_force(hold: StandingHold, now: datetime) -> bool:
    return hold.ended is None and has_begun(hold, now) and now < hold.ends


def next_hold_change(hold: StandingHold, now: datetime) -> datetime | None:
    """Return when a standing hold begins or ceases to apply next by time alone; None: never."""
    moments = [hold.ends] if has_begun(hold, now) else [hold.starts, hold.ends]
    return min((moment for moment in moments if moment > now), default=None)


# --- what is said


def standing_hold_to_json_object(hold: StandingHold) -> dict[str, Any]:
    return {
        "holdId": hold.hold_id,
        "match": hold.conditions.model_dump(mode="json", exclude_unset=True, exclude_none=True),
        "starts": format_rfc3339(hold.starts),
        "ends": format_rfc3339(hold.ends),
        "principal": hold.principal,
        "channel": hold.channel,
        "reason": hold.reason,
        "created": format_rfc3339(hold.created),
        "notice": HOLD_NOTICE,
    }


def latest_ending_holds(holds: Iterable[StandingHold]) -> list[StandingHold]:
    return sorted(holds, key=lambda hold: hold.ends, reverse=True)[:MAX_NAMED]


def hold_summaries(holds: Iterable[StandingHold]) -> list[dict[str, Any]]:
    return [
        {
            "holdId": hold.hold_id,
            "principal": hold.principal,
            "until": format_rfc3339(hold.ends),
            "reason": hold.reason,
        }
        for hold in latest_ending_holds(holds)
    ]
