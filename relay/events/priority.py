"""How important events are to receivers: of two that wait, the more important is sent first. Pure.

Refusals come last: a client that may decide nothing can cause any number of them.
"""

from __future__ import annotations

from functools import cache

PRIORITIES = 4
"""How many priorities there are."""
EVENT, DECISION, RELAY, REFUSAL = range(PRIORITIES)
"""The priorities, the most important first: ``event.*``; ``startrequest.*`` and ``approval.*``;
``relay.*``; ``approval.refused``."""


@cache
def priority(name: str) -> int:
    """Return the priority of an event by its name, ``<family>.<change>``."""
    if name == "approval.refused":
        return REFUSAL
    return {"event": EVENT, "relay": RELAY}.get(name.partition(".")[0], DECISION)
