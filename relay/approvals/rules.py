"""What a rule is: its conditions, its hours, and the votes that it needs; and who may vote.

A `Rule` is an entry of ``approvals.rules``. `status` finds the rule of an event and counts its
votes. Pure, except that time zones are read from disk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, time, timedelta
from functools import partial
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, Field, model_validator

from relay.approvals.principals import expected_form, is_any_of, is_principal
from relay.events.match import Match, matches
from relay.settings import Duration, Name, Section, WrongValue, text_pattern_validator

MAX_DURATION = 3650 * 86400.0
"""Seconds. A longer time from now could pass the year 9999, where datetime ends."""
MAX_RUNBOOK_LENGTH = 500
_RUNBOOK = re.compile(
    r"https://[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{1,5})?(?:[/?#][A-Za-z0-9._~/?#=&%+:@;,!$*-]*)?"
)
"""Without characters that end a link in the markup of some chat."""


def _check_principal(text: str, references: tuple[str, ...] = ()) -> str:
    """Accept a principal, or a reference such as ``group:<name>``."""
    if text.startswith(tuple(f"{kind}:" for kind in references)) or is_principal(text):
        return text
    raise ValueError(f"expected {expected_form(text, references)}")


def _check_duration_within_maximum(seconds: float) -> float:
    if seconds > MAX_DURATION:
        raise ValueError(f"expected at most 3650d, got {seconds / 86400:g}d")
    return seconds


def _check_positive(seconds: float) -> float:
    if seconds <= 0:
        raise ValueError("expected more than 0s: it would be over as soon as it begins")
    return seconds


def _check_zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except KeyError:  # ZoneInfoNotFoundError
        raise ValueError(
            "expected a time zone that this machine knows, such as UTC or Europe/Oslo"
        ) from None
    except (OSError, ValueError):  # the name of a directory, or a path outside the database
        raise ValueError("expected a time zone such as UTC or Europe/Oslo") from None
    return name


def _check_runbook(url: str) -> str:
    if len(url) > MAX_RUNBOOK_LENGTH or _RUNBOOK.fullmatch(url) is None:
        raise ValueError(
            "expected an https:// URL of at most 500 characters, such as "
            "https://wiki.example.com/maintenance; write other characters than letters, digits "
            "and -._~/?#=&%+:@;,!$* as %XX"
        )
    return url


BoundedDuration = Annotated[Duration, AfterValidator(_check_duration_within_maximum)]
PositiveDuration = Annotated[BoundedDuration, AfterValidator(_check_positive)]
Runbook = Annotated[str, AfterValidator(_check_runbook)]
Principal = Annotated[str, AfterValidator(_check_principal)]
Member = Annotated[str, AfterValidator(partial(_check_principal, references=("person",)))]
Voter = Annotated[str, AfterValidator(partial(_check_principal, references=("group", "person")))]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
_DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_MINUTE = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_MINUTE_FORM = 'a minute in quotes such as "08:00"'


class Hours(Section):
    """When a rule applies. Hours that pass midnight belong to the day on which they begin."""

    days: tuple[Day, ...] = Field(default=_DAYS, min_length=1)
    """mon, tue, wed, thu, fri, sat, sun."""
    from_: Annotated[str, text_pattern_validator(_MINUTE, f'{_MINUTE_FORM}, at most "23:59"')] = (
        Field(default="00:00", alias="from")
    )
    """The first minute."""
    to: Annotated[
        str, text_pattern_validator(f"{_MINUTE}|24:00", f'{_MINUTE_FORM}, at most "24:00"')
    ] = "24:00"
    """The first minute after the hours."""
    zone: Annotated[str, AfterValidator(_check_zone)] = "UTC"
    """The time zone of the hours."""

    @model_validator(mode="after")
    def _check_from_and_to_differ(self) -> Hours:
        if self.from_ == self.to:
            raise ValueError(f"expected from and to that differ, got {self.to} for both")
        return self

    def are_active(self, now: datetime) -> bool:
        local = now.astimezone(ZoneInfo(self.zone))
        minute = local.hour * 60 + local.minute
        first, end = _minute_of_day(self.from_), _minute_of_day(self.to)
        is_today_included = _DAYS[local.weekday()] in self.days
        if first < end:
            return is_today_included and first <= minute < end
        is_yesterday_included = _DAYS[local.weekday() - 1] in self.days
        return (is_today_included and minute >= first) or (is_yesterday_included and minute < end)

    def next_change(self, now: datetime) -> datetime | None:
        """When the hours begin or end next; None if they are always active.

        It is to be shown: in a night in which the zone sets its clock it can be off by that.
        """
        is_active = self.are_active(now)
        zone = ZoneInfo(self.zone)
        today = datetime.combine(now.astimezone(zone).date(), time(), zone)
        # Two weeks and a day: summer time can leave out the hours of a week.
        for day in range(16):
            for text in sorted((self.from_, self.to)):
                local = today + timedelta(days=day, minutes=_minute_of_day(text))
                moment = local.astimezone(UTC)
                if moment > now and self.are_active(moment) != is_active:
                    return moment
        return None


class RuleConditions(Match):
    """The conditions of a rule: those of a sink or client, and hours."""

    time: Hours | None = None
    """Days and hours in which the rule applies."""

    def in_hours(self, now: datetime) -> bool:
        return self.time is None or self.time.are_active(now)


class Quorum(Section):
    """How many people must approve, and who may vote."""

    votes: int = Field(default=1, ge=1)
    """How many people must vote; one person counts once, with however many principals."""
    from_: tuple[Voter, ...] = Field(alias="from", min_length=1)
    """Who may vote: group:<name>, person:<name>, or a principal such as client:<name>."""
    each_resource: bool = False
    """Whether every resource needs a vote: of a client that covers it, or of the machine itself."""
    expires: PositiveDuration | None = None
    """How long a vote counts; until NotBefore where left out."""
    close_before: BoundedDuration = 0.0
    """How long before NotBefore voting closes."""
    remind: PositiveDuration | None = None
    """How long before NotBefore one reminder is sent if votes are missing; null: none is."""

    @model_validator(mode="after")
    def _check_has_votes_or_each_resource(self) -> Quorum:
        if "votes" not in self.model_fields_set and not self.each_resource:
            raise ValueError("expected votes, each_resource: true, or both")
        return self

    @model_validator(mode="after")
    def _check_reminder_precedes_close(self) -> Quorum:
        if self.remind is not None and self.remind <= self.close_before:
            raise WrongValue(
                ("remind",),
                f"expected more than close_before, got {self.remind:g}s and "
                f"{self.close_before:g}s: nobody could vote any more",
            )
        return self


class Rule(Section):
    """Which events may be approved, and how. The first rule that matches decides."""

    name: Name
    match: RuleConditions = RuleConditions()
    """Conditions; every resource of the event must match."""
    approve: Literal["automatic"] | Quorum
    runbook: Runbook | None = None
    """An https URL that messages, the page and reminders show."""

    def applies_to(self, data: Mapping[str, Any], scope: str, now: datetime) -> bool:
        return matches(self.match, data, scope) and self.match.in_hours(now)

    def unmet_conditions(self, data: Mapping[str, Any], scope: str, now: datetime) -> list[str]:
        return [
            key
            for key in RuleConditions.model_fields
            if not self.model_copy(
                update={
                    "match": RuleConditions().model_copy(update={key: getattr(self.match, key)})
                }
            ).applies_to(data, scope, now)
        ]


def eligible_voters(
    quorum: Quorum, groups: Mapping[str, Sequence[str]], people: Mapping[str, Sequence[str]]
) -> frozenset[str]:
    """Return the principals and patterns that may vote. Raises KeyError for an unknown group."""
    members: list[str] = []
    for voter in quorum.from_:
        kind, _, name = voter.partition(":")
        members += groups[name] if kind == "group" else [voter]
    entries: set[str] = set()
    for member in members:
        kind, _, name = member.partition(":")
        entries.update(people[name] if kind == "person" else [member])
    return frozenset(entries)


def person_of(principal: str, people: Mapping[str, Sequence[str]]) -> str:
    """Return ``person:<name>`` for a principal, or a pattern, of a person; else the same text."""
    for name, entries in people.items():
        if is_any_of(entries, principal):
            return f"person:{name}"
    return principal


def clients_of_same_person(principal: str, people: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the clients of the same person: their rights limit what it may decide in a chat."""
    person = person_of(principal, people).removeprefix("person:")
    return tuple(
        other for other in people.get(person, ()) if other.startswith(("client:", "mtls:"))
    )


def _minute_of_day(text: str) -> int:
    hours, _, minutes = text.partition(":")
    return int(hours) * 60 + int(minutes)
