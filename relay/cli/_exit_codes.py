"""How a command ends when it could not do what it was asked to: a sentence on standard error and an exit code."""

from __future__ import annotations

import sqlite3
import traceback
from pathlib import Path

from aiohttp import ClientError

from relay.errors import ConfigError, RelayError

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
"""Wrong usage or configuration."""
EXIT_REFUSED = 3
"""Refused by policy."""


class CommandFailed(RelayError):
    """The command could not do what it was asked to."""


class RefusedByPolicy(RelayError):
    """The relay may not do it, or not for this caller, or not now: its rules, or the state of the event, forbid it."""


def unwrap_group(error: Exception) -> Exception:
    """The error itself where it is the only one of a group, as task groups wrap what goes through them."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def exit_code(error: Exception) -> int:
    """The exit code that an error ends in."""
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    return EXIT_REFUSED if isinstance(error, RefusedByPolicy) else EXIT_FAILED


def error_text(error: Exception) -> str:
    """What a person is told of an error."""
    match error:
        case RelayError():
            return str(error)
        case TimeoutError():
            return str(error) or "it took too long"
        case OSError() if error.errno is not None:
            return (
                f"{error.filename}: {error.strerror}"
                if error.filename is not None
                else str(error.strerror)
            )
        case OSError() | ClientError() | sqlite3.Error():
            return str(error) or type(error).__name__
    return f"a mistake in imds-relay itself, please report it: {type(error).__name__}: {error} ({_place(error)})"


def _place(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame
        for frame in frames
        if Path(frame.filename).is_relative_to(Path(__file__).parent.parent)
    ] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
