"""Values that are made from files, such as secrets and certificates, and made again on a change."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from relay.errors import ConfigError

T = TypeVar("T")
_Stamp = tuple[int, int, int]


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
        """Return the current value."""
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
