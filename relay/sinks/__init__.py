"""The contract of a sink: it delivers one event to a destination, and reports the result.

Each other module of this package is one sink, and its name is the ``kind`` of the YAML section. An
installed package adds a sink with an entry point of the group ``relay.sinks`` that names a module.
docs/adding-a-sink.md shows how to write one. The module defines

- ``Settings``, a subclass of `SinkSettings` with ``kind: Literal["<kind>"]``. The relay makes it
  from the YAML section when it starts. It checks what it can without the network.
- ``connect(settings, clock)``, an async context manager that yields the `Sink`. The relay enters it
  once at the start, and leaves it once at the end. It may start tasks and connections, but must not
  wait for the destination, which may be down. Leaving it ends everything that it started.
- ``diagnose(settings, clock, scope)``, optional, a coroutine that returns a list of
  `relay.logs.Finding`. ``imds-relay doctor`` calls it, without ``connect``. It checks
  the destination and delivers nothing.

The dispatcher calls `Sink.deliver` for each event that the settings select: one event of an EventId
after the other, at most ``concurrency`` calls at once, and again after `relay.errors.Deferred`. So
a sink never retries and never remembers events: store and dispatcher do both for all sinks.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Protocol

from pydantic import AfterValidator, Field

from relay.events import fast_dataclass
from relay.events.build import CATALOG
from relay.events.cloudevent import CloudEvent
from relay.events.match import Match, matches_any_pattern
from relay.settings import Name, Section, closest

_EVENT_PATTERN = re.compile(r"\*|[a-z*][a-z-*]*\.[a-z*][a-z-*]*")


def _check_event_pattern(text: str) -> str:
    if _EVENT_PATTERN.fullmatch(text) is None:
        raise ValueError(
            "expected a pattern over <family>.<change> such as event.scheduled, approval.* or *"
        )
    if not any(matches_any_pattern((text,), definition.name) for definition in CATALOG):
        close = closest(text, (definition.name for definition in CATALOG))
        meant = f"did you mean {close}? " if close else ""
        raise ValueError(
            f"expected a pattern that matches an event type; {meant}"
            "`imds-relay schema --list` lists them"
        )
    return text


class SinkSettings(Section):
    """What every sink has in the YAML document."""

    kind: str
    """Which sink it is: the name of its module or entry point."""
    name: Name
    """Identifies the sink in the store, in routing keys and on the command line."""
    events: tuple[Annotated[str, AfterValidator(_check_event_pattern)], ...] = Field(
        default=("*",), min_length=1
    )
    """Patterns over the event type between prefix and version: event.scheduled, approval.*, *."""
    match: Match = Match()
    """Conditions on events, except relay.*; one matching resource is enough."""
    stale: Literal["deliver", "drop"] = "deliver"
    """drop: skip queued states that a newer one of the same EventId replaced, but no end."""
    rate: float | None = Field(default=None, gt=0)
    """At most so many deliveries begin in a second; null: no limit."""


@fast_dataclass(frozen=True, slots=True)
class Receipt:
    """The destination has the event.

    ``status`` and ``response`` (at most 1 KiB) go into the log of attempts. ``skew`` is how many
    seconds the destination's clock is ahead of ours; None if unknown.
    """

    status: int | None = None
    response: str | None = None
    skew: float | None = None


class Sink(Protocol):
    """One destination."""

    concurrency: int
    """How many deliveries may run at once."""
    longest_pause: float
    """Seconds: the longest pause between two tries if no deadline is near."""
    give_up_after: float
    """Seconds: how long an event is tried before it becomes a dead letter; may be infinite."""

    async def deliver(self, event: CloudEvent) -> Receipt:
        """Return when the destination has the event.

        Raises `relay.errors.Deferred` if a later try may work, `relay.errors.Rejected` if none can,
        and `relay.errors.Superseded` if the destination does not need the event. Any other error
        counts as an internal error of the sink: the event becomes a dead letter after a few tries.
        It must end within a timeout of the sink, and may be cancelled when the relay stops. The
        same event can come again, so it must not matter if the destination gets it twice.
        """
