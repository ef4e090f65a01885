"""The contract of the family: a sink carries an event and says how it went.

Each other module of this folder that does not start with ``_`` is one member. It defines

- ``Settings``: a subclass of `SinkSettings` whose ``kind`` is a literal; it is the member's section of the YAML document;
- ``connect(settings, clock)``: an async context manager that yields the `Sink`. It may start tasks and connections, and
  must not wait for the far side: a receiver that is down at the start is nothing special;
- ``examine(settings, clock, scope)``, which may be left out: a coroutine that returns what `doctor` should say of the far side, as
  a list of `Finding`. It delivers nothing.

The dispatcher calls ``deliver`` for one event at a time and EventId, at most ``sink.concurrency`` at once, in order per
EventId. The sink never retries and never remembers; outbox and dispatcher do both, once, for all sinks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, Field

from relay.clock import Clock
from relay.events.catalog import CATALOG
from relay.events.cloudevent import CloudEvent
from relay.events.match import Match, matches_any
from relay.settings import Section

_PATTERN = re.compile(r"\*|[a-z*][a-z-*]*\.[a-z*][a-z-*]*")


def _pattern(text: str) -> str:
    if _PATTERN.fullmatch(text) is None:
        raise ValueError(
            "expected a pattern over <family>.<change> such as event.scheduled, approval.* or *"
        )
    if not any(matches_any((text,), kind.name) for kind in CATALOG):
        raise ValueError("expected a pattern that some type of event fits; see docs/events.md")
    return text


class SinkSettings(Section):
    """What every sink has in the YAML document."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Tells it apart from the others: in the store, in routing keys and on the command line."""
    events: tuple[Annotated[str, AfterValidator(_pattern)], ...] = Field(
        default=("*",), min_length=1
    )
    """Patterns over the event type between prefix and version: event.scheduled, approval.*, *."""
    match: Match = Match()
    """Only events that meet these conditions; one matching resource is enough. Does not apply to relay.*."""
    stale: Literal["deliver", "drop"] = "deliver"
    """drop: skip queued states that a newer one of the same EventId replaced."""
    rate: float | None = Field(default=None, gt=0)
    """Deliveries begun in a second at the most; null: as fast as the far side takes them."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The event is safely over there. ``status`` and ``answer`` (at most 1 KiB) are for the log of attempts.

    ``skew``: seconds that the far side's clock is ahead of ours; None where that is not known.
    """

    status: int | None = None
    response: str | None = None
    skew: float | None = None


class Sink(Protocol):
    """One destination. Raises only `Deferred` and `Rejected`; anything else is an error in its own code."""

    concurrency: int
    """How many deliveries may be under way at once."""
    longest_pause: float
    """Seconds: the longest pause between two tries, however long the far side is gone and no deadline presses."""
    give_up_after: float
    """Seconds: how long an event is tried before it becomes a dead letter; may be infinite."""

    async def deliver(self, event: CloudEvent) -> Receipt:
        """Return when the event is safely over there.

        Raises Deferred when a later try may work, Rejected when none will. Must end within the sink's own timeout.
        """


Connect = Callable[[Any, Clock], AbstractAsyncContextManager[Sink]]
"""The signature of a member's ``connect``: takes its settings; leaving the context closes the sink and ends what it started."""
