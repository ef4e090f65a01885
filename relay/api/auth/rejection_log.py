"""Those who call without good credentials, or send what cannot be used: counted, and logged once a minute each. Never events."""

from __future__ import annotations

import logging
from collections import OrderedDict

from relay.api.server.connection import Peer

LOG_INTERVAL = 60.0
"""Seconds between two lines in the log about one address, or user of RabbitMQ."""
_MOST = 1024
_LONGEST = 300  # characters of a reason that may quote what was sent
_log = logging.getLogger(__name__)


class RejectionLog:
    """Counts them. Remembers so many and no more; while all those are fresh, others are counted alone."""

    def __init__(self) -> None:
        self.count = 0
        self._seen: OrderedDict[str, tuple[float, int]] = (
            OrderedDict()
        )  # when it was logged last, how many came since

    def unauthenticated_call(self, peer: Peer, reason: str, now: float) -> None:
        """A stranger called. ``now`` is monotonic, in seconds; ``reason`` holds no secret."""
        self._note(
            peer.network,
            f"a call from {peer.address} without good credentials was refused: {reason}",
            now,
        )

    def unusable_message(self, user: str | None, reason: str, now: float) -> None:
        """A message came over AMQP that could not be used. ``user``: whom the broker vouches for; ``now``: as above."""
        self._note(
            f"amqp {user}",
            f"a message from {user or 'nobody'!r} was dead-lettered: {reason[:_LONGEST]!a}",
            now,
        )

    def _note(self, key: str, sentence: str, now: float) -> None:
        self.count += 1
        logged, since = self._seen.get(key, (now - LOG_INTERVAL, 0))
        if now - logged < LOG_INTERVAL:
            self._seen[key] = (logged, since + 1)
            return
        while self._seen and next(iter(self._seen.values()))[0] <= now - LOG_INTERVAL:
            self._seen.popitem(last=False)
        if len(self._seen) >= _MOST:
            return
        self._seen[key] = (now, 0)
        _log.warning("%s%s", sentence, f" ({since} more in the minute before)" if since else "")
