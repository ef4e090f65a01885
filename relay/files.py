"""Whether something exists at a path, and why it cannot be read.

From Python 3.14 on, `Path.exists`, `is_file` and `is_dir` return False if the user may not look.
These functions return False only if nothing of that kind is there for certain. Whoever then opens
the path gets the reason.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}


def may_exist(path: Path) -> bool:
    """Return whether something is there, or may be."""
    return _may_match(path, lambda _: True)


def may_be_file(path: Path) -> bool:
    """Return whether a file is there, or may be."""
    return _may_match(path, stat.S_ISREG)


def may_be_folder(path: Path) -> bool:
    """Return whether a folder is there, or may be."""
    return _may_match(path, stat.S_ISDIR)


def _may_match(path: Path, matches_mode: Callable[[int], bool]) -> bool:
    try:
        return matches_mode(path.stat().st_mode)
    except OSError as error:
        return error.errno not in _ABSENT


def describe_os_error(error: OSError) -> str:
    """Return the system's text; for a missing permission, also the user that lacks it."""
    text = error.strerror or type(error).__name__
    if isinstance(error, PermissionError):
        return f"{text} (this runs as {current_user()})"
    return text


def current_user() -> str:
    """Return the name of the user that runs this process, or its number."""
    try:
        import pwd  # noqa: PLC0415  # only on POSIX
    except ImportError:
        return "this user"
    try:
        return f"user {pwd.getpwuid(os.geteuid()).pw_name}"
    except KeyError:
        return f"user {os.geteuid()}"
