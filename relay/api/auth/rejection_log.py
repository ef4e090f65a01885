"""Counts rejected calls and messages, and logs them at most once a minute for each sender.

A rejected call has no valid credentials. A rejected AMQP message cannot be used. Neither becomes
an event.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

from relay.api.server.connection import Peer

LOG_INTERVAL = 60.0
"""Seconds between two log lines about one address or RabbitMQ user."""
_MAX_SENDERS = 1024
_MAX_REASON_LENGTH = 300  # characters of a reason that may quote the message
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sender:
    logged_at: float
    unlogged: int = 0


class RejectionLog:
    """Counts every rejection. Senders beyond the memory's limit are counted but not logged."""

    def __init__(self) -> None:
        self.count = 0
        self._senders: OrderedDict[str, _Sender] = OrderedDict()  # the longest unlogged first

    def record_unauthenticated_call(self, peer: Peer, reason: str, now: float) -> None:
        """Record a call without valid credentials. `now` is monotonic seconds.

        The reason contains no secret.
        """
        self._record(
            peer.network,
            f"a call from {peer.address} without good credentials was refused: {reason}",
            now,
        )

    def record_unusable_message(self, user: str | None, reason: str, now: float) -> None:
        """Record an AMQP message that cannot be used. The broker validated the user."""
        self._record(
            f"amqp {user}",
            f"a message from {user or 'nobody'!r} was dead-lettered: "
            f"{reason[:_MAX_REASON_LENGTH]!a}",
            now,
        )

    def _record(self, key: str, description: str, now: float) -> None:
        self.count += 1
        sender = self._senders.get(key)
        if sender is not None and now - sender.logged_at < LOG_INTERVAL:
            sender.unlogged += 1
            return
        self._forget_old_senders(now)
        if len(self._senders) >= _MAX_SENDERS:
            return
        self._senders[key] = _Sender(now)
        repeated = sender.unlogged if sender is not None else 0
        suffix = f" ({repeated} more in the minute before)" if repeated else ""
        _log.warning("%s%s", description, suffix)

    def _forget_old_senders(self, now: float) -> None:
        while self._senders:
            oldest = next(iter(self._senders.values()))
            if now - oldest.logged_at < LOG_INTERVAL:
                return
            self._senders.popitem(last=False)
