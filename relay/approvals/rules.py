"""What a rule is: its conditions, the hours in which it holds, and whose votes it asks for. Time zones alone are read from disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, Field, model_validator

from relay.approvals.principals import is_principal, principal_forms
from relay.events.match import Match, matches
from relay.settings import Duration, Section

_MINUTE = timedelta(minutes=1)
_LONGEST = 3650 * 86400.0


def _principal(text: str) -> str:
    if not is_principal(text):
        raise ValueError(f"expected {principal_forms()}")
    return text


def _member(text: str) -> str:
    if not text.startswith("person:") and not is_principal(text):
        raise ValueError(f"expected {principal_forms()}, or person:<name>")
    return text


def _voter(text: str) -> str:
    if not text.startswith(("group:", "person:")) and not is_principal(text):
        raise ValueError(f"expected group:<name>, person:<name>, {principal_forms()}")
    return text


def _sensible(seconds: float) -> float:
    # Moments are counted with it, and those end with the year 9999.
    if seconds > _LONGEST:
        raise ValueError(f"expected at most 3650d, got {seconds / 86400:g}d")
    return seconds


def _some_time(seconds: float) -> float:
    if seconds <= 0:
        raise ValueError("expected more than 0s: it would be over as soon as it begins")
    return seconds


def _zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (
        OSError,
        ValueError,
    ):  # ZoneInfoNotFoundError is a KeyError, and a folder of zones an OSError
        raise ValueError("expected a time zone such as UTC or Europe/Oslo") from None
    except KeyError:
        raise ValueError(
            "expected a time zone that this machine knows, such as UTC or Europe/Oslo"
        ) from None
    return name


Span = Annotated[Duration, AfterValidator(_sensible)]
Lifetime = Annotated[Span, AfterValidator(_some_time)]
Principal = Annotated[str, AfterValidator(_principal)]
Member = Annotated[str, AfterValidator(_member)]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
_DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class Hours(Section):
    """When a rule holds. Hours over midnight belong to the day on which they begin."""

    days: tuple[Day, ...] = Field(default=_DAYS, min_length=1)
    """mon, tue, wed, thu, fri, sat, sun."""
    from_: str = Field(default="00:00", alias="from", pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    """Its first minute."""
    to: str = Field(default="24:00", pattern=r"^(([01]\d|2[0-3]):[0-5]\d|24:00)$")
    """The first minute after it."""
    zone: Annotated[str, AfterValidator(_zone)] = "UTC"
    """Whose clocks are meant."""

    @model_validator(mode="after")
    def _last(self) -> Hours:
        if _minutes(self.from_) == _minutes(self.to) % (24 * 60) and self.to != "24:00":
            raise ValueError(f"expected from and to that differ, got {self.to} for both")
        return self

    def are_active(self, now: datetime) -> bool:
        """Whether it is one of these hours now."""
        local = now.astimezone(ZoneInfo(self.zone))
        minute, first, last = (
            local.hour * 60 + local.minute,
            _minutes(self.from_),
            _minutes(self.to),
        )
        today, yesterday = (
            _DAYS[local.weekday()] in self.days,
            _DAYS[local.weekday() - 1] in self.days,
        )
        if first < last:
            return today and first <= minute < last
        return (today and minute >= first) or (yesterday and minute < last)

    def next_change(self, now: datetime) -> datetime | None:
        """When they begin or end next, to the minute; None: they always hold. Costs milliseconds: for people alone."""
        before, moment = self.are_active(now), now.replace(second=0, microsecond=0)
        for _ in range(8 * 24 * 60):
            moment += _MINUTE
            if self.are_active(moment) != before:
                return moment
        return None


class RuleConditions(Match):
    """The conditions of the one matching language, and the hours: a sink and a client have none, since they know no now."""

    time: Hours | None = None
    """Days and hours in which the rule holds."""


class Quorum(Section):
    """A quorum: how many people of whom must approve."""

    votes: int = Field(default=1, ge=1)
    """How many people; one counts once, with however many principals."""
    from_: tuple[Annotated[str, AfterValidator(_voter)], ...] = Field(alias="from", min_length=1)
    """Who may vote: group:<name>, person:<name>, client:<name>, local:<user>."""
    each_resource: bool = False
    """Whether every machine of the event must be spoken for by one whose resources cover it."""
    expires: Lifetime | None = None
    """How long a vote counts; until NotBefore where left out."""
    close_before: Span = 0.0
    """How long before NotBefore voting closes."""
    execution_expires: Lifetime | None = None
    """How long a granted approval may wait to be sent; then its votes count no more."""

    @model_validator(mode="after")
    def _asks_for_something(self) -> Quorum:
        if "votes" not in self.model_fields_set and not self.each_resource:
            raise ValueError("expected votes, each_resource: true, or both")
        return self


class Rule(Section):
    """Which events may be approved, and how. The first rule that matches decides."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    match: RuleConditions = RuleConditions()
    """Conditions; every resource of the event must match."""
    approve: Literal["automatic"] | Quorum

    def matches(self, data: Mapping[str, Any], scope: str, now: datetime) -> bool:
        """Whether an event (its CloudEvents ``data``) meets the conditions at this moment."""
        return matches(self.match, data, scope) and (
            self.match.time is None or self.match.time.are_active(now)
        )


def eligible_voters(
    approve: Quorum,
    groups: Mapping[str, Sequence[str]],
    people: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> frozenset[str]:
    """The principals who may vote under a rule, groups and people taken apart. Raises KeyError for one that is not there."""
    members = [
        member
        for one in approve.from_
        for member in (groups[one.removeprefix("group:")] if one.startswith("group:") else (one,))
    ]
    return frozenset(
        principal
        for one in members
        for principal in (
            people[one.removeprefix("person:")] if one.startswith("person:") else (one,)
        )
    )


def person_for(principal: str, people: Mapping[str, Sequence[str]]) -> str:
    """Whose principal it is: ``person:<name>``, or the principal itself where no person is named for it."""
    return next(
        (f"person:{name}" for name, principals in people.items() if principal in principals),
        principal,
    )


def _minutes(text: str) -> int:
    hours, _, minutes = text.partition(":")
    return int(hours) * 60 + int(minutes)
