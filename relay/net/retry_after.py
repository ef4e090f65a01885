"""Reads the pause that an HTTP server asks for."""

from __future__ import annotations

import re
from datetime import datetime

from relay.events.timestamps import parse_timestamp

MAX_RETRY_AFTER = 3600.0
"""Seconds: the longest pause that the server of a sink can ask for."""
_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")


def parse_retry_after(text: str | None, now: datetime, *, maximum: float) -> float | None:
    """Return the seconds that a ``Retry-After`` header asks for, between 0 and ``maximum``.

    The header holds seconds or a date (RFC 9110, section 10.2.3). A fraction of a second is
    accepted too. Returns None if there is no header, or one that cannot be read.
    """
    text = (text or "").strip()
    if _SECONDS.fullmatch(text) is not None:
        return min(float(text), maximum)
    date = parse_timestamp(text)
    if date is None:
        return None
    return min(max((date - now).total_seconds(), 0.0), maximum)
