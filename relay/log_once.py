"""Logs a state when it changes, and not each time that it is seen."""

from __future__ import annotations

import logging
from collections.abc import Mapping


class LogOnce:
    """Logs a message unless it is the same as the last one."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._last: tuple[int, str, tuple[object, ...]] | None = None

    def log_if_changed(
        self, level: int, message: str, *args: object, extra: Mapping[str, object] | None = None
    ) -> None:
        """Log the message, as `logging.Logger.log` does, if it differs from the last one."""
        if self._last != (level, message, args):
            self._last = (level, message, args)
            self._logger.log(level, message, *args, stacklevel=2, extra=extra)
