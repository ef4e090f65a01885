"""Makes the ids of trace spans for tries: of a delivery, or of a StartRequest.

The span of an event needs none of these: its id follows from the id of the event.
"""

from __future__ import annotations

import random


def new_span_id() -> str:
    """Return 16 random hexadecimal digits, not all zero."""
    return f"{random.randrange(1, 2**64):016x}"  # noqa: S311  # it protects nothing
