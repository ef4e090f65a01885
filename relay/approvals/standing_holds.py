"""Standing holds: which events they are about, and when. Pure.

A standing hold is a hold by the conditions of a rule and for a time. It is made before an event
exists, and keeps this relay from starting every event that can meet its conditions, automatic rules
included. Its ``within`` are the resources to which the rights of its author are limited: it is
about no event with others. `standing_hold_admission` says who may make one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter

from relay.approvals.rules import RuleConditions
from relay.events.match import covers_all_resources, event_may_meet_conditions
from relay.events.timestamps import format_rfc3339
from relay.store import StandingHold, TrackedEvent

MAX_NAMED = 10
"""Patterns of a condition that a description names, and standing holds that an answer names."""
_WITHIN = TypeAdapter(tuple[tuple[str, ...], ...])


@lru_cache(maxsize=512)
def stored_conditions(text: str) -> RuleConditions:
    """Return the conditions of a standing hold, as it stores them.

    Every event meets those that cannot be read: the text was damaged, or this machine does not know
    the time zone any more. Otherwise the relay would end at each start, or start what was held.
    """
    try:
        return RuleConditions.model_validate_json(text)
    except ValueError:
        return RuleConditions()


@lru_cache(maxsize=512)
def stored_patterns(text: str) -> tuple[tuple[str, ...], ...]:
    """Return the lists of patterns that limit a standing hold; none if they cannot be read."""
    try:
        return _WITHIN.validate_json(text)
    except ValueError:
        return ()


def is_about(hold: StandingHold, occurrence: TrackedEvent) -> bool:
    """Whether a standing hold is about an event, at whatever time.

    Nobody holds in this way what they could not hold by hand: of an author who is limited to
    resources, every resource of the event must be covered.
    """
    conditions = stored_conditions(hold.conditions)
    return event_may_meet_conditions(conditions, occurrence.data, occurrence.scope) and all(
        covers_all_resources(patterns, occurrence.event.resources)
        for patterns in stored_patterns(hold.within)
    )


def has_begun(hold: StandingHold, now: datetime) -> bool:
    """Whether the start of a standing hold has come.

    If it held from the moment when it was made, a clock that is set back does not change that.
    """
    return hold.starts <= max(now, hold.created)


def is_in_force(hold: StandingHold, now: datetime) -> bool:
    """Whether a standing hold applies at a moment: between its times, and within its hours."""
    if hold.ended is not None or not has_begun(hold, now) or now >= hold.ends:
        return False
    hours = stored_conditions(hold.conditions).time
    return hours is None or hours.are_active(now)


def has_hours(hold: StandingHold) -> bool:
    """Whether a standing hold applies at some hours only."""
    return stored_conditions(hold.conditions).time is not None


def next_hold_change(hold: StandingHold, now: datetime) -> datetime | None:
    """Return when a standing hold begins or ceases to apply next by time alone; None: never."""
    is_begun = has_begun(hold, now)
    moments = [hold.ends] if is_begun else [hold.starts, hold.ends]
    hours = stored_conditions(hold.conditions).time
    if hours is not None and is_begun and now < hold.ends:
        moments += filter(None, [hours.next_change(now)])
    return min((moment for moment in moments if moment > now), default=None)


def describe_conditions(hold: Mapping[str, Any]) -> str:
    """Return which events a standing hold is about; ``hold`` is its JSON."""
    texts = [f"{key} {_value_text(value)}" for key, value in hold["match"].items()]
    texts += [f"only inside {_value_text(patterns)}" for patterns in hold.get("within", ())]
    return "; ".join(texts) or "every event"


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value_text(part)}" for key, part in value.items())
    if isinstance(value, list):
        more = len(value) - MAX_NAMED
        named = " ".join(map(str, value[:MAX_NAMED]))
        return f"{named} and {more} more" if more > 0 else named
    return str(value)


def describe_standing_hold(hold: StandingHold) -> str:
    """Return whose standing hold it is and until when, for people."""
    return (
        f"the standing hold {hold.hold_id[:8]} of {hold.principal} until "
        f"{format_rfc3339(hold.ends)}"
    )


# --- as JSON


def conditions_to_json_object(conditions: RuleConditions) -> dict[str, Any]:
    """Return conditions as the configuration and the API write them, without what is not set."""
    found: dict[str, Any] = {
        key: list(value)
        for key in ("event_type", "event_source", "resources", "scope")
        if (value := getattr(conditions, key)) is not None
    }
    bounds, hours = conditions.duration, conditions.time
    if bounds is not None:
        found["duration"] = {
            name: _format_configuration_duration(getattr(bounds, name))
            for name in sorted(bounds.model_fields_set)
        }
    if hours is not None:
        found["time"] = {
            "days": list(hours.days),
            "from": hours.from_,
            "to": hours.to,
            "zone": hours.zone,
        }
    return found


def _format_configuration_duration(seconds: float) -> str:
    milliseconds = round(seconds * 1000)
    return f"{milliseconds}ms" if milliseconds % 1000 else f"{milliseconds // 1000}s"


def standing_holds_field(holds: Iterable[StandingHold]) -> dict[str, Any]:
    """Return ``standingHolds`` for an answer or event about one event; nothing if there are none.

    `hold_summaries` returns the value alone.
    """
    summaries = hold_summaries(holds)
    return {"standingHolds": summaries} if summaries else {}


def latest_ending_holds(holds: Iterable[StandingHold]) -> list[StandingHold]:
    """Return those of some standing holds that end last, the last one first."""
    return sorted(holds, key=lambda hold: hold.ends, reverse=True)[:MAX_NAMED]


def hold_summaries(holds: Iterable[StandingHold]) -> list[dict[str, Any]]:
    """Return whose standing holds are in force, until when, and why: of those that end last."""
    return [
        {
            "holdId": hold.hold_id,
            "principal": hold.principal,
            "until": format_rfc3339(hold.ends),
            "reason": hold.reason,
        }
        for hold in latest_ending_holds(holds)
    ]
