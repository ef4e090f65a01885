"""Who may make and end standing holds: the requests, and why they are refused. Pure.

The API turns a body into a `CreateRequest` or `EndRequest`. `standing_hold_engine` asks
`refuse_creation` or `refuse_end` before it changes anything. The conditions of a standing hold must
be inside the rights of its author, because nobody knows yet which events will meet them.
`standing_hold_to_json_object` describes a standing hold to the API and in events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from relay.approvals.admission import HOLD_NOTICE, Refusal
from relay.approvals.request import Caller, Rights
from relay.approvals.rules import RuleConditions, person_of
from relay.approvals.standing_holds import (
    conditions_to_json_object,
    stored_conditions,
    stored_patterns,
)
from relay.events.match import are_patterns_inside
from relay.events.timestamps import format_rfc3339, parse_timestamp
from relay.store import StandingHold
from relay.validation import RequestBody

MAX_OPEN = 100
"""Standing holds that are not over. More are refused."""
MAX_CREATED = 30
"""Standing holds that a principal makes within a minute. More are refused."""
MAX_CREATED_IN_DAY = 300
"""Within a day. Before each claim the journal is asked for all that were made."""
MAX_AHEAD = timedelta(days=366)
"""How far from now a standing hold may end."""
MAX_PATTERNS = 100
"""Entries in each list of the conditions."""
MAX_OPEN_PATTERNS = 1000
"""Entries in the lists of all standing holds that are not over: each event is compared with all."""
MAX_PATTERN_LENGTH = 256
"""Characters of an entry."""
TIMESTAMP = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)$"
"""RFC 3339."""


def _check_timestamp_syntax(text: str) -> str:
    if parse_timestamp(text) is None:
        raise ValueError("expected a time such as 2022-04-11T22:26:58Z")
    return text


def _check_condition_sizes(conditions: RuleConditions) -> RuleConditions:
    for names in _condition_name_lists(conditions):
        if len(names) > MAX_PATTERNS:
            raise ValueError(f"expected at most {MAX_PATTERNS} entries in each list")
        if any(len(name) > MAX_PATTERN_LENGTH for name in names):
            raise ValueError(f"expected entries of at most {MAX_PATTERN_LENGTH} characters")
    return conditions


def _condition_name_lists(conditions: RuleConditions) -> tuple[tuple[str, ...], ...]:
    lists = (conditions.event_type, conditions.event_source, conditions.resources, conditions.scope)
    return tuple(names or () for names in lists)


def _count_patterns(conditions: RuleConditions) -> int:
    return sum(map(len, _condition_name_lists(conditions)))


Timestamp = Annotated[str, Field(pattern=TIMESTAMP), AfterValidator(_check_timestamp_syntax)]


class StandingHoldBody(RequestBody):
    """The body of ``POST /v1/standing-holds``."""

    match: Annotated[RuleConditions, AfterValidator(_check_condition_sizes)]
    """The conditions of a rule; ``{}`` holds every event. An event that can meet them is held: one
    matching resource is enough, and so is a type, source or duration that Azure does not say."""
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
class CreateOrEndRequest:
    """A request to make a standing hold, or to end one."""

    caller: Caller
    at: datetime
    request_id: str | None = None
    """A repeat has the same id and the same ``digest``; None: a repeat cannot be recognized."""
    digest: str = ""
    """SHA-256 of the call: its path and its body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRequest(CreateOrEndRequest):
    """A request to make a standing hold."""

    body: StandingHoldBody


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequest(CreateOrEndRequest):
    """A request to end a standing hold early."""

    hold_id: str
    reason: str | None = None


def refuse_creation(
    request: CreateRequest,
    open_holds: Sequence[StandingHold],
    created_in_minute: int,
    created_in_day: int,
) -> Refusal | None:
    """Return why a standing hold is not made, or None if it is."""
    caller, body = request.caller, request.body
    if "hold" not in caller.rights.can:
        return Refusal(403, "you may not hold: it is not in your rights (can)")
    if not _are_resources_within_rights(body.match, caller.rights):
        return Refusal(
            403,
            "you may not hold every event that this could be about: match.resources must be "
            "inside your rights (resources)",
        )
    starts, ends = hold_times(request)
    time_problem = _time_problem(starts, ends, request.at)
    if time_problem is not None:
        return Refusal(422, f"ends: {time_problem}; it is {format_rfc3339(request.at)}", "ends")
    if len(open_holds) >= MAX_OPEN:
        return Refusal(409, f"there are {MAX_OPEN} standing holds that are not over: end some")
    patterns = sum(_count_patterns(stored_conditions(hold.conditions)) for hold in open_holds)
    if patterns + _count_patterns(body.match) > MAX_OPEN_PATTERNS:
        return Refusal(
            409,
            f"the standing holds that are not over would have more than {MAX_OPEN_PATTERNS} "
            "entries in their lists: end some, or use patterns",
        )
    if created_in_minute >= MAX_CREATED:
        return Refusal(
            409, f"you have made {MAX_CREATED} standing holds within a minute: wait a minute"
        )
    if created_in_day >= MAX_CREATED_IN_DAY:
        return Refusal(409, f"you have made {MAX_CREATED_IN_DAY} standing holds within a day: wait")
    return None


def _time_problem(starts: datetime, ends: datetime, now: datetime) -> str | None:
    if ends <= now:
        return "expected a time in the future"
    if ends <= starts:
        return "expected a time after starts"
    if ends > now + MAX_AHEAD:
        return f"expected a time within {MAX_AHEAD.days} days from now"
    return None


def refuse_end(
    request: EndRequest, hold: StandingHold | None, people: Mapping[str, Sequence[str]]
) -> Refusal | None:
    """Return why a standing hold is not ended, or None if it is."""
    if hold is None:
        return Refusal(404, "no such standing hold; see GET /v1/standing-holds")
    if hold.ended is not None or hold.ends <= request.at:
        return Refusal(409, "the standing hold is over")
    rights = request.caller.rights
    is_own = person_of(hold.principal, people) == person_of(request.caller.principal, people)
    if "operate" not in rights.can:
        if "hold" not in rights.can:
            return Refusal(
                403, "you may not end it: neither hold nor operate is in your rights (can)"
            )
        if not is_own:
            return Refusal(
                403,
                f"{hold.principal} made the standing hold; they can end it, and so can anybody "
                f"with the right operate; {HOLD_NOTICE}",
            )
    if not is_own and not _are_resources_within_rights(stored_conditions(hold.conditions), rights):
        return Refusal(
            403,
            "you may not decide for every event that this standing hold could be about: your "
            "rights (resources) do not cover its match.resources",
        )
    return None


def _are_resources_within_rights(conditions: RuleConditions, rights: Rights) -> bool:
    """Whether the resources of the conditions are certainly inside the limits of a caller."""
    limits = patterns_of_rights(rights)
    if not limits:
        return True
    patterns = conditions.resources
    return patterns is not None and all(are_patterns_inside(patterns, limit) for limit in limits)


def patterns_of_rights(rights: Rights) -> tuple[tuple[str, ...], ...]:
    """Return the lists of patterns, each of which must cover what a caller decides for."""
    own = (rights.resources,) if rights.resources is not None else ()
    return (*own, *rights.limits)


def hold_times(request: CreateRequest) -> tuple[datetime, datetime]:
    """Return from when and until when a requested standing hold holds."""
    starts = parse_timestamp(request.body.starts) or request.at
    ends = parse_timestamp(request.body.ends)
    assert ends is not None  # noqa: S101  # the body was validated
    return starts, ends


def standing_hold_to_json_object(hold: StandingHold) -> dict[str, Any]:
    """Return a standing hold as its events and the API describe it."""
    within = [list(patterns) for patterns in stored_patterns(hold.within)]
    return {
        "holdId": hold.hold_id,
        "match": conditions_to_json_object(stored_conditions(hold.conditions)),
        **({"within": within} if within else {}),
        "starts": format_rfc3339(hold.starts),
        "ends": format_rfc3339(hold.ends),
        "principal": hold.principal,
        "channel": hold.channel,
        "reason": hold.reason,
        "created": format_rfc3339(hold.created),
        "notice": HOLD_NOTICE,
    }
