"""The words of RabbitMQ's routing keys, and the names of relays as such words. Pure."""

from __future__ import annotations

import re

MAX_RELAY_WORD = 80


def routing_word(text: str, max_bytes: int) -> str:
    """Return a text as a word of a routing key: lower case, of ``[a-z0-9_-]``, never empty."""
    return re.sub(r"[^a-z0-9_-]", "_", text.lower())[:max_bytes] or "none"


def relay_word(name: str) -> str:
    """Return the name of a relay as a word of a routing key."""
    return routing_word(name, MAX_RELAY_WORD)
