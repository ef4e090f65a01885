"""Those who call without good credentials: counted, and logged at most once a minute for each address. Never events."""

from __future__ import annotations

import logging
from collections import OrderedDict

from relay.api.connection import Peer

EVERY = 60.0
"""Seconds between two lines in the log about one address."""
_MOST = 1024
_log = logging.getLogger(__name__)


class Strangers:
    """Counts them. Remembers so many addresses and no more; while all those are fresh, others are counted alone."""

    def __init__(self) -> None:
        self.count = 0
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()  # when it was logged last, how many came since

    def came(self, peer: Peer, reason: str, now: float) -> None:
        """A stranger called. ``now`` is monotonic, in seconds; ``reason`` holds no secret."""
        self.count += 1
        logged, since = self._seen.get(peer.network, (now - EVERY, 0))
        if now - logged < EVERY:
            self._seen[peer.network] = (logged, since + 1)
            return
        while self._seen and next(iter(self._seen.values()))[0] <= now - EVERY:
            self._seen.popitem(last=False)
        if len(self._seen) >= _MOST:
            return
        self._seen[peer.network] = (now, 0)
        more = f" ({since} more in the minute before)" if since else ""
        _log.warning("a call from %s without good credentials was refused: %s%s", peer.address, reason, more)
