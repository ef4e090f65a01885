"""Texts as words of RabbitMQ's routing keys. Pure.

The sink writes the keys of events with them, and a fleet the keys of its messages. A hub knows an
agent only by such a word, so the rights of machines are compared by it too.
"""

from __future__ import annotations

import re

_MAX_RELAY_WORD_BYTES = 80


def routing_word(text: str, max_bytes: int) -> str:
    """Return a text as a word of a routing key: lower case, of ``[a-z0-9_-]``, never empty."""
    return re.sub(r"[^a-z0-9_-]", "_", text.lower())[:max_bytes] or "none"


def relay_word(name: str) -> str:
    """Return the name of a relay as a word of a routing key."""
    return routing_word(name, _MAX_RELAY_WORD_BYTES)
