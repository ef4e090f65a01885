"""Prints for people and programs: lines, JSON, local times, and how a command failed.

Some text was written by strangers, so everything printed for people is stripped of control
characters.
"""

from __future__ import annotations

import sqlite3
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from aiohttp import ClientError

from relay.errors import ConfigError, RelayError
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
    text = f"{day}{local:%H:%M:%S}"
    if not relative:
        return text
    distance = format_duration(abs((moment - now).total_seconds()))
    return f"{text} (in {distance})" if moment > now else f"{text} ({distance} ago)"


def format_duration(seconds: float) -> str:
    """Return a duration in at most two units: ``45 s``, ``12 min``, ``3 h 5 min``, ``2 d 4 h``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if 300 <= whole < 3600:
        return f"{whole // 60} min"
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    size, unit, smaller, small = next(each for each in units if whole >= each[0])
    rest = whole % size // smaller
    return f"{whole // size} {unit}" + (f" {rest} {small}" if rest else "")


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 vote``, ``2 votes``, ``3 tries``."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
"""Wrong usage or configuration."""
EXIT_REFUSED = 3
"""Refused by policy."""


class CommandFailed(RelayError):
    """The command did not do its work."""


class Unprocessable(CommandFailed):
    """The relay cannot do it as things are (422). ``problem`` is its whole answer."""

    def __init__(self, reason: str, problem: Mapping[str, Any]) -> None:
        super().__init__(reason)
        self.problem = problem


class RefusedByPolicy(RelayError):
    """The rules, the caller's rights or the state of the event forbid the request."""


def unwrap_exception_group(error: Exception) -> Exception:
    """Return the only error of a group, else the error itself. Task groups wrap what they raise."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def exit_code(error: Exception) -> int:
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    return EXIT_REFUSED if isinstance(error, RefusedByPolicy) else EXIT_FAILED


def error_text(error: Exception) -> str:
    match error:
        case RelayError():
            return str(error)
        case TimeoutError():
            return str(error) or "it took too long"
        case OSError(filename=None, strerror=str(reason)):
            return reason
        case OSError(filename=file, strerror=str(reason)):
            return f"{file}: {reason}"
        case OSError() | ClientError() | sqlite3.Error():
            return str(error) or type(error).__name__
    package = Path(__file__).parent.parent
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if Path(frame.filename).is_relative_to(package)]
    innermost = (own_frames or frames)[-1:]
    place = "".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in innermost) or "?"
    return (
        f"this is a bug in imds-relay, please report it: {type(error).__name__}: {error} ({place})"
    )
