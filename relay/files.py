"""Whether something is at a path, and why it cannot be read.

From Python 3.14 on `Path.exists`, `is_file` and `is_dir` answer no where they may not look. These answer no only where
nothing of that kind is there for certain; whoever then opens the path learns the reason.
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
    return _may_be(path, lambda _: True)


def may_be_file(path: Path) -> bool:
    """Return whether a file is there, or may be."""
    return _may_be(path, stat.S_ISREG)


def may_be_folder(path: Path) -> bool:
    """Return whether a folder is there, or may be."""
    return _may_be(path, stat.S_ISDIR)


def _may_be(path: Path, kind: Callable[[int], bool]) -> bool:
    try:
        return kind(path.stat().st_mode)
    except OSError as error:
        return error.errno not in _ABSENT


def reason(error: OSError) -> str:
    """Return what the system says, and for which user where rights are missing."""
    said = error.strerror or type(error).__name__
    return f"{said} (this runs as {user()})" if isinstance(error, PermissionError) else said


def user() -> str:
    """Return the name, or the number, of the user as whom this runs."""
    try:
        import pwd  # noqa: PLC0415  # POSIX alone has it
    except ImportError:
        return "this user"
    try:
        return f"user {pwd.getpwuid(os.geteuid()).pw_name}"
    except KeyError:
        return f"user {os.geteuid()}"
