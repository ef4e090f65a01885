"""Conditions on events: the one matching language of rules, sinks, clients and standing holds.

`Match` is the section of the configuration, and the object in bodies of the API. `matches` decides
whether an event meets it, or could. Names of machines and scopes are compared with patterns of
``*``, ``?`` and ``[…]``, without case.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from functools import lru_cache
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from relay.settings import Section, parse_duration

EVENT_TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
"""The EventTypes that Azure documents. It may add others."""
EVENT_SOURCES = ("Platform", "User")
"""The EventSources that Azure documents. It may add others."""


def _format_duration(seconds: float) -> str | None:
    if math.isinf(seconds):
        return None  # no bound
    milliseconds = round(seconds * 1000)
    return f"{milliseconds}ms" if milliseconds % 1000 else f"{milliseconds // 1000}s"


# Text only: a number in a body could be one that its text, in the journal, cannot say.
_DurationBound = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(_format_duration, when_used="json"),
    WithJsonSchema({"type": "string", "examples": ["8s"]}),
]


class DurationRange(Section):
    """Bounds on the announced length, both included. An unknown length is in no range."""

    # The schema in OpenAPI has no defaults of factories: infinity is not JSON.
    min: _DurationBound = Field(default_factory=float)
    max: _DurationBound = Field(default_factory=lambda: math.inf)

    @model_validator(mode="after")
    def _check_min_at_most_max(self) -> DurationRange:
        if self.min > self.max:
            raise ValueError(
                f"expected min to be at most max, got {self.min:g}s and {self.max:g}s: "
                "no duration is in this range"
            )
        return self


class Match(Section):
    """Conditions on an event; all that are given must hold. Text is compared without case."""

    model_config = ConfigDict(use_attribute_docstrings=True)  # bodies of the API hold conditions

    event_type: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Freeze, Reboot, Redeploy, Preempt, Terminate."""
    event_source: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Platform, User."""
    duration: DurationRange | None = None
    """Announced length of the interruption."""
    resources: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Patterns with * and ? over the names in Resources."""
    scope: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Patterns over the scope's name."""


def matches_any_pattern(patterns: Iterable[str], name: str) -> bool:
    compiled = _compile(tuple(patterns))
    return compiled is not None and compiled.match(name.lower()) is not None


@lru_cache(maxsize=1024)
def _compile(patterns: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(translate(each.lower()) for each in patterns)) if patterns else None


def covers_all_resources(patterns: tuple[str, ...] | None, resources: Iterable[str]) -> bool:
    """Whether every resource matches. None covers all; patterns never cover an empty list."""
    if patterns is None:
        return True
    names = tuple(resources)
    return bool(names) and all(matches_any_pattern(patterns, name) for name in names)


def matches(
    match: Match,
    data: Mapping[str, Any],
    scope: str,
    *,
    every_resource: bool = True,
    unknown: bool = False,
) -> bool:
    """Whether an event, given as its CloudEvents ``data``, meets the conditions.

    ``every_resource`` (rules, clients): all resources must match, and an event without resources
    does not meet a ``resources`` condition. Otherwise (sinks, standing holds) one matching resource
    is enough, and an event without resources meets the condition. ``unknown``: whether a type,
    source or duration that Azure does not say meets its condition, for whoever would rather stop
    too much than too little.
    """
    names, patterns = data.get("resources") or (), match.resources
    return (
        _is_one_of(match.event_type, data.get("eventType"), unknown=unknown)
        and _is_one_of(match.event_source, data.get("eventSource"), unknown=unknown)
        and _is_within(match.duration, data.get("durationSeconds"), unknown=unknown)
        and (match.scope is None or matches_any_pattern(match.scope, scope))
        and (
            covers_all_resources(patterns, names)
            if patterns is None or every_resource
            else not names or any(matches_any_pattern(patterns, name) for name in names)
        )
    )


def _is_one_of(allowed: tuple[str, ...] | None, value: str | None, *, unknown: bool) -> bool:
    if allowed is None:
        return True
    return value.lower() in {name.lower() for name in allowed} if value is not None else unknown


def _is_within(bounds: DurationRange | None, seconds: float | None, *, unknown: bool) -> bool:
    if bounds is None:
        return True
    return bounds.min <= seconds <= bounds.max if seconds is not None else unknown
