"""The fields of log lines, and logs that say a thing once: a state, or a warning in a minute."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from relay.clock import Clock
from relay.rate_limits import TokenBuckets


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
"""Seconds before the same warning is logged again."""
MAX_WARNINGS = 20
"""Different warnings in that time; more are not logged. Some platforms do not prove who clicked."""


class ThrottledLog:
    """Logs warnings of one sink, each text at most once per interval.

    Unlike `LogOnce`, it logs a refusal again on another day, and it does not log
    every click of two people who take turns.
    """

    def __init__(self, logger: logging.Logger, clock: Clock, sink_name: str) -> None:
        self._logger = logger
        self._clock = clock
        self._sink_name = sink_name
        self._logged_at: dict[str, float] = {}

    def warning(self, text: str) -> None:
        now = self._clock.monotonic()
        self._logged_at = {
            logged_text: logged_at
            for logged_text, logged_at in self._logged_at.items()
            if now - logged_at < LOG_INTERVAL
        }
        if text not in self._logged_at and len(self._logged_at) < MAX_WARNINGS:
            self._logged_at[text] = now
            extra = log_extra(sink=self._sink_name)
            self._logger.warning("sink %s: %s", self._sink_name, text, extra=extra)


_MAX_REJECTIONS = 1024
"""Lines about all senders in an interval."""
_MAX_REASON_LENGTH = 300  # characters of a reason that may quote the message


class RejectionLog:
    """Counts every rejection, and logs them at most once per interval for each sender.

    They are calls without valid credentials, and AMQP messages that cannot be used; neither becomes
    an event. `now` is monotonic seconds. No reason contains a secret.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self.count = 0
        self._logger = logger
        self._senders = TokenBuckets(1 / LOG_INTERVAL, 1)
        self._all = TokenBuckets(_MAX_REJECTIONS / LOG_INTERVAL, _MAX_REJECTIONS)

    def record_unauthenticated_call(
        self, address: str, reason: str, now: float, *, network: str
    ) -> None:
        """Record a call without valid credentials. All addresses of a network are one sender."""
        text = f"a call from {address} without good credentials was refused: {reason}"
        self._record(network, text, now)

    def record_unusable_amqp_message(self, user: str | None, reason: str, now: float) -> None:
        """Record an AMQP message that cannot be used. The broker validated the user."""
        quoted = ascii(reason[:_MAX_REASON_LENGTH])
        text = f"a message from {user or 'nobody'!r} was dead-lettered: {quoted}"
        self._record(f"amqp {user}", text, now)

    def _record(self, sender: str, text: str, now: float) -> None:
        self.count += 1
        if not self._senders.take(sender, now) and not self._all.take("", now):
            self._logger.warning("%s", text)


def log_extra(**fields: object) -> dict[str, Any]:
    """Return the ``extra`` of a logger's call, whose fields docs/log.md lists. None is left out."""
    return {"fields": fields}
