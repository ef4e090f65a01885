"""The names of machines and relays, as events and routing keys hold them. Pure.

A machine of a scale set stands in ``Resources`` under one of several names. A relay finds itself by
them, and approvals and the hub find the machine that a relay runs on
(docs/protocol.md#names-of-resources). A hub knows an agent only by the word that its name is in a
routing key of RabbitMQ, so the rights of machines are compared by it too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_MAX_RELAY_WORD_BYTES = 80


def other_instance_names(name: str, scale_set: str | None = None) -> Iterator[str]:
    """Yield the name of an instance in the other notation: ``set_18`` and ``set00000i``.

    A uniform scale set numbers its instances in decimal in VM names, and with six digits of base 36
    in computer names, whose prefix can differ from the name of the scale set. ``scale_set`` is
    None if it is not known. A name in neither notation yields nothing. A name of another machine
    that ends like a computer name yields a name that no machine has.
    """
    if number := re.fullmatch(r"(.+)_(\d{1,9})", name, re.ASCII):
        yield f"{scale_set or number[1]}{_encode_base36(int(number[2])):0>6}"
    elif digits := re.fullmatch(r"(.+?)([0-9a-z]{6})", name, re.ASCII | re.IGNORECASE):
        if scale_set:
            yield f"{scale_set}_{int(digits[2], 36)}"
        yield f"{digits[1]}_{int(digits[2], 36)}"


def add_underscore_prefixed_names(names: frozenset[str]) -> frozenset[str]:
    """Return the names, each also with the prefix ``_`` of old versions of the API."""
    return names | {f"_{name}" for name in names}


def _encode_base36(number: int) -> str:
    digits = ""
    while number or not digits:
        number, digit = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return digits


def routing_word(text: str, max_bytes: int) -> str:
    """Return a text as a word of a routing key: lower case, of ``[a-z0-9_-]``, never empty."""
    return re.sub(r"[^a-z0-9_-]", "_", text.lower())[:max_bytes] or "none"


def relay_word(name: str) -> str:
    """Return the name of a relay as a word of a routing key."""
    return routing_word(name, _MAX_RELAY_WORD_BYTES)
