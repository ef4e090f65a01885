"""Prints for people and programs: lines, JSON, and times in the local time zone.

Some text was written by strangers, so everything printed for people is stripped of control
characters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from relay.events.timestamps import parse_timestamp


def print_lines(*lines: str) -> None:
    for line in lines:
        print(strip_control(line), flush=True)  # noqa: T201  # the output of the command


def print_to_stderr(line: str) -> None:
    """Print a line to standard error, so that a program that reads the output does not see it."""
    print(strip_control(line), file=sys.stderr, flush=True)  # noqa: T201  # the output of the command


def print_json(value: object) -> None:
    print(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode(), flush=True)  # noqa: T201  # the output of the command


def print_json_line(value: object) -> None:
    print(orjson.dumps(value).decode(), flush=True)  # noqa: T201  # the output of the command


def strip_control(text: str) -> str:
    """Replace each character that moves the cursor or changes the colors of the screen."""
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def format_local_time(
    timestamp: str | None, now: datetime | None = None, *, relative: bool = True
) -> str | None:
    """Return a time for people, such as ``14:26:58 (in 12 min)``, in the local time zone.

    The date precedes a time that is not today. Without ``relative``, the distance is left out.
    Return a text that is no timestamp unchanged.
    """
    moment = parse_timestamp(timestamp)
    if moment is None:
        return timestamp
    now = now or datetime.now(UTC)
    local = moment.astimezone()
    day = "" if local.date() == now.astimezone().date() else f"{local:%Y-%m-%d} "
    distance = f" ({format_seconds_from_now((moment - now).total_seconds())})" if relative else ""
    return f"{day}{local:%H:%M:%S}{distance}"


def format_seconds_from_now(seconds: float) -> str:
    """Return the distance of a time from now: ``in 12 min``, ``3 h ago``."""
    distance = format_duration(abs(seconds))
    return f"in {distance}" if seconds > 0 else f"{distance} ago"


def format_duration(seconds: float) -> str:
    """Return a duration in at most two units: ``45 s``, ``12 min``, ``3 h 5 min``, ``2 d 4 h``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 5:
        return _two_units(minutes, "min", whole % 60, "s")
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    if hours < 24:
        return _two_units(hours, "h", minutes % 60, "min")
    return _two_units(hours // 24, "d", hours % 24, "h")


def _two_units(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large} {large_unit} {small} {small_unit}" if small else f"{large} {large_unit}"


def join_names(names: Sequence[Any] | None, *, limit: int = 5) -> str:
    if not names:
        return ""
    others = len(names) - limit
    listed = ", ".join(str(name) for name in names[:limit])
    return f"{listed} and {others} more" if others > 0 else listed


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 vote``, ``2 votes``, ``3 tries``."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
