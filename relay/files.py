"""What the standard library lacks for files of the relay and of its users."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from relay.errors import ConfigError

T = TypeVar("T")
_Stamp = tuple[int, int, int]

MAX_FILE_BYTES = 4 * 1024 * 1024
"""The largest file with a secret or certificates. The CAs of a whole machine are much smaller."""
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}


def may_exist(path: Path, is_meant: Callable[[int], bool] = lambda _: True) -> bool:
    """Return whether something is there, or may be. ``is_meant`` looks at its mode.

    From Python 3.14 on, `Path.exists` and its like return False if the user may not look. Here
    whoever opens the path then gets the reason.
    """
    try:
        return is_meant(path.stat().st_mode)
    except OSError as error:
        return error.errno not in _ABSENT


def require_small_regular_file(path: Path) -> None:
    """Return for a regular file of at most ``MAX_FILE_BYTES``, and for a link to one.

    To read a pipe waits for its writer, and to read some devices never ends. Raises OSError.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if status.st_size > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MAX_FILE_BYTES} bytes", str(path))


def describe_os_error(error: OSError) -> str:
    """Return the system's text; for a missing permission, also the user that lacks it."""
    text = error.strerror or type(error).__name__
    if isinstance(error, PermissionError):
        return f"{text} (this runs as {current_user()})"
    return text


def current_user() -> str:
    try:
        return f"user {user_name(os.geteuid())}"
    except (ImportError, AttributeError):  # Windows has neither
        return "this user"


def user_name(uid: int) -> str:
    import pwd  # noqa: PLC0415  # only on POSIX

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700


def ensure_private_file(path: Path) -> None:
    """Create an empty file for this user alone, or narrow the rights of the one that is there.

    An existing file is not opened: to close it would release the locks that this process has on it.
    Raises OSError, also if it belongs to another user.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE_FILE))
    except FileExistsError:
        path.chmod(PRIVATE_FILE)


def is_planted(path: Path) -> bool:
    """Return whether a stranger put a file or link into a folder that others can write.

    Root, this user and the owner of the folder are no strangers. Raises OSError.
    """
    if not hasattr(os, "geteuid"):
        return False
    owner, folder = path.lstat().st_uid, path.parent.stat()
    return bool(folder.st_mode & 0o022) and owner not in (os.geteuid(), 0, folder.st_uid)


def create_private_folder(path: Path) -> None:
    """Create a folder, and those above it, for this user alone. Existing ones stay as they are."""
    if not may_exist(path):
        create_private_folder(path.parent)
        path.mkdir(PRIVATE_FOLDER, exist_ok=True)


class FileBackedValue(Generic[T]):
    """A value that is loaded again after one of its files has changed.

    While the changed files cannot be used, the last value stays and each `get` tries again:
    somebody may just be replacing the files. ``on_failure`` gets the error once for each change.
    """

    def __init__(
        self,
        files: Iterable[Path | None],
        load: Callable[[], T],
        *,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        """Load the value for the first time. Raises what ``load`` raises."""
        self._files = tuple(file for file in files if file is not None)
        self._load = load
        self._on_failure = on_failure
        self._loaded = self._failed = self._stamps()
        self._value = load()

    def get(self) -> T:
        stamps = self._stamps()
        if stamps == self._loaded:
            return self._value
        try:
            self._value = self._load()
        except (ConfigError, OSError, ValueError) as error:
            if self._on_failure is not None and stamps != self._failed:
                self._on_failure(error)
            self._failed = stamps
        else:
            self._loaded = self._failed = stamps
        return self._value

    def _stamps(self) -> tuple[_Stamp | None, ...]:
        return tuple(_stamp(file) for file in self._files)


def _stamp(file: Path) -> _Stamp | None:
    try:
        status = os.stat(file)  # noqa: PTH116  # faster than Path.stat; runs on every delivery
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
