"""How a command fails: its errors, the sentence on standard error and the exit code for each."""

from __future__ import annotations

import sqlite3
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import ClientError

from relay.errors import ConfigError, RelayError

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
