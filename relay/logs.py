"""What operators are told: logs that say a thing once or not too often, and what doctor finds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from relay.clock import Clock, TokenBuckets


class LogOnce:
    """Logs a message unless it is the same as the last one."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._last: tuple[int, str, tuple[object, ...]] | None = None

    def log_if_changed(
        self, level: int, message: str, *args: object, extra: Mapping[str, object] | None = None
    ) -> None:
        if self._last != (level, message, args):
            self._last = (level, message, args)
            self._logger.log(level, message, *args, stacklevel=2, extra=extra)


LOG_INTERVAL = 60.0
"""Seconds before a warning about the same is logged again."""


class ThrottledLog:
    """Counts every warning, and logs at most one in a minute for each key, and ``most`` in all.

    A key is whoever caused it, or the text itself. Unlike `LogOnce`, it logs a refusal again on
    another day, and not every click of two people who take turns. ``now`` is monotonic seconds. No
    text contains a secret.
    """

    def __init__(self, logger: logging.Logger, most: int = 1024) -> None:
        self.count = 0
        self._logger = logger
        self._keys = TokenBuckets(1 / LOG_INTERVAL, 1)
        self._all = TokenBuckets(most / LOG_INTERVAL, most)

    def warning(
        self, key: str, text: str, now: float, extra: Mapping[str, object] | None = None
    ) -> None:
        self.count += 1
        if not self._keys.take(key, now) and not self._all.take("", now):
            self._logger.warning("%s", text, extra=extra)


MAX_SINK_WARNINGS = 20
"""Different warnings of a sink in a minute: some platforms do not prove who clicked."""


def throttled_sink_log(logger: logging.Logger, clock: Clock, sink: str) -> Callable[[str], None]:
    log = ThrottledLog(logger, MAX_SINK_WARNINGS)

    def warn(text: str) -> None:
        log.warning(text, f"sink {sink}: {text}", clock.monotonic(), log_extra(sink=sink))

    return warn


def log_extra(**fields: object) -> dict[str, Any]:
    """Return the ``extra`` of a logger's call, whose fields docs/log.md lists. None is left out."""
    return {"fields": fields}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check of ``imds-relay doctor``. No text contains a secret."""

    about: str
    state: Literal["ok", "warning", "failed"]
    said: str
    remedy: str | None = None

    @property
    def line(self) -> str:
        return self.said if self.remedy is None else f"{self.said}. Remedy: {self.remedy}"


def ok(about: str, said: str) -> Finding:
    return Finding(about, "ok", said)


def warning(about: str, said: str, remedy: str | None = None) -> Finding:
    return Finding(about, "warning", said, remedy)


def failure(about: str, said: str, remedy: str) -> Finding:
    return Finding(about, "failed", said, remedy)
