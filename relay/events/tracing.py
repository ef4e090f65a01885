"""What a trace consists of, and the ids in it. Pure.

There is one trace for each occurrence of an event of Azure, from the poll to the StartRequest. The
id of a trace follows from the occurrence, and the id of a span from the CloudEvent that it stands
for. So nothing needs to be remembered over a restart, and all relays of a scope add to the same
trace. The store writes the context into each event that it records (``traceparent``).
`relay.telemetry.traces` makes the spans of events. Deliveries and StartRequests add their own,
whose ids are random.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeAlias

from typing_extensions import override

from relay.events.cloudevent import CloudEvent, digest_id

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}", re.ASCII)
"""Version 00 of W3C Trace Context. A later version is not understood, so it is ignored."""
SpanKind = Literal["internal", "client", "server", "producer", "consumer"]
AttributeValue: TypeAlias = str | bool | int | float | Sequence[str]


@dataclass(frozen=True, slots=True)
class SpanContext:
    """The trace and the id of a span, in 32 and 16 hexadecimal digits."""

    trace_id: str
    span_id: str

    def child(self, span_id: str) -> SpanContext:
        """Return the context of another span in the same trace."""
        return SpanContext(self.trace_id, span_id)

    @override
    def __str__(self) -> str:
        """The form of the attribute and header ``traceparent``. Every trace is sampled."""
        return f"00-{self.trace_id}-{self.span_id}-01"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A piece of work that has ended. ``error`` is why it failed."""

    name: str
    kind: SpanKind
    context: SpanContext
    parent: SpanContext | None
    began: datetime
    ended: datetime
    attributes: Mapping[str, AttributeValue | None] = field(default_factory=dict)
    links: Sequence[SpanContext] = ()
    error: str | None = None


RecordSpan = Callable[[Span], None]
"""Keeps a span until it is exported."""


def parse_traceparent(text: str | None) -> SpanContext | None:
    """Return the context in a ``traceparent``; None if there is none, or a malformed one."""
    match = _TRACEPARENT.fullmatch(text) if text is not None else None
    if match is None or not match[1].strip("0") or not match[2].strip("0"):
        return None
    return SpanContext(match[1], match[2])


def context_of(event: CloudEvent) -> SpanContext | None:
    """Return the context that an event carries; None if tracing was off when it was recorded."""
    return parse_traceparent(event.attributes.get("traceparent"))


def occurrence_trace_id(scope: str, event_id: str, number: int) -> str:
    """Return the id of the trace of an occurrence: the ``number``-th of its EventId."""
    return digest_id("trace", scope, event_id.lower(), number)


def make_event_context(event: CloudEvent, number: int) -> SpanContext:
    """Return the context of an event. ``number`` is that of its occurrence.

    An event that is about no event of Azure, such as ``relay.*``, has a trace of its own.
    """
    event_id = event.attributes.get("correlationid")
    trace_id = event.id if event_id is None else occurrence_trace_id(event.scope, event_id, number)
    return SpanContext(trace_id, span_id_from_relay_and_text(event, event.id))


def span_id_from_relay_and_text(event: CloudEvent, about: str) -> str:
    """Return the id of a span that the relay of ``event`` makes about something.

    ``about`` is the id of an event that this relay recorded, or other text that is unique in the
    trace. Relays with the same history make the same ids of events, so the name of the relay is a
    part.
    """
    relay = f"{event.scope}/{event.attributes['relay']}"
    return hashlib.sha256(f"{relay} {about}".encode()).hexdigest()[:16]
