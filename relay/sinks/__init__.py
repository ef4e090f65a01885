"""The contract of the sinks: a sink carries one event to its destination and reports how it went.

Each other module of this folder that does not start with ``_`` is one sink. The module defines

- ``Settings``: a subclass of `SinkSettings` that narrows ``kind`` to a literal. It is the sink's
  section of the YAML document.
- ``connect(settings, clock)``: an async context manager that yields the `Sink`. It may start tasks
  and connections, which end with the context. It must not wait for the far side, which may be
  down when the relay starts.
- ``diagnose(settings, clock, scope)``, optional: a coroutine that checks the far side for
  ``imds-relay doctor`` and returns a list of `Finding`. It delivers nothing.

The dispatcher calls ``deliver`` in order per EventId, at most ``concurrency`` calls at once. A sink
never retries and never remembers: outbox and dispatcher do both, for all sinks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from pydantic import AfterValidator, Field

from relay.events.catalog import CATALOG
from relay.events.cloudevent import CloudEvent
from relay.events.match import Match, matches_any
from relay.settings import Section

_EVENT_PATTERN = re.compile(r"\*|[a-z*][a-z-*]*\.[a-z*][a-z-*]*")


def _event_pattern(text: str) -> str:
    if _EVENT_PATTERN.fullmatch(text) is None:
        raise ValueError(
            "expected a pattern over <family>.<change> such as event.scheduled, approval.* or *"
        )
    if not any(matches_any((text,), definition.name) for definition in CATALOG):
        raise ValueError("expected a pattern that matches an event type; see docs/events.md")
    return text


class SinkSettings(Section):
    """What every sink has in the YAML document."""

    kind: str
    """Which sink it is: the name of its module or entry point."""
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Tells it apart from the others: in the store, in routing keys and on the command line."""
    events: tuple[Annotated[str, AfterValidator(_event_pattern)], ...] = Field(
        default=("*",), min_length=1
    )
    """Patterns over the event type between prefix and version: event.scheduled, approval.*, *."""
    match: Match = Match()
    """Only events that meet these conditions; one matching resource is enough. Not for relay.*."""
    stale: Literal["deliver", "drop"] = "deliver"
    """drop: skip queued states that a newer one of the same EventId replaced."""
    rate: float | None = Field(default=None, gt=0)
    """At most so many deliveries begin in a second; null: as fast as the far side takes them."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The destination has taken the event.

    ``status`` and ``response`` (at most 1 KiB) go into the log of attempts. ``skew`` is how many
    seconds the far side's clock is ahead of ours; None if that is not known.
    """

    status: int | None = None
    response: str | None = None
    skew: float | None = None


class Sink(Protocol):
    """One destination. Raises only `Deferred` and `Rejected`; any other error is a bug in it."""

    concurrency: int
    """How many deliveries may run at once."""
    longest_pause: float
    """Seconds: the longest pause between two tries when no deadline presses."""
    give_up_after: float
    """Seconds: how long an event is tried before it becomes a dead letter; may be infinite."""

    async def deliver(self, event: CloudEvent) -> Receipt:
        """Return when the destination has taken the event.

        Raises Deferred if a later try may work, Rejected if none will. Must end within the sink's
        own timeout.
        """
