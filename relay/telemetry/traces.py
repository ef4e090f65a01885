"""Turns what the relay recorded into the spans of traces.

Each recorded event has a span, whose context is the ``traceparent`` of the event. Parts of the
relay that do something for an event add spans of their own: deliveries and StartRequests.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from datetime import datetime

from relay.clock import Clock
from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import format_rfc3339, parse_timestamp
from relay.events.tracing import (
    AttributeValue,
    RecordSpan,
    Span,
    SpanContext,
    SpanKind,
    context_of,
    span_id_from_relay_and_text,
)
from relay.store import RecordedEvent
from relay.telemetry.lines import log_line_of_event

_MAX_READS = 16
"""Polls whose times are remembered until their events are traced."""
_UPPER = re.compile(r"(?<!^)(?=[A-Z])")
_CLOUDEVENTS = {"id": "cloudevents.event_id", "type": "cloudevents.event_type"}
"""Fields of the log whose attributes OpenTelemetry has named."""


class Traces:
    """Makes the spans of recorded events. ``record`` keeps them until they are exported."""

    def __init__(self, clock: Clock, record: RecordSpan, relay: str) -> None:
        """``relay`` is the name of this relay. What another one recorded is in its own traces."""
        self.record = record
        self._relay = relay
        self._clock = clock
        self._reads: OrderedDict[str, datetime] = OrderedDict()  # the begin by the end

    def note_read(self, began: datetime, ended: datetime) -> None:
        """A poll brought a document. The events that it brings have the time of its end."""
        self._reads[format_rfc3339(ended)] = began
        if len(self._reads) > _MAX_READS:
            self._reads.popitem(last=False)

    def record_event_span(self, recorded: RecordedEvent, event: CloudEvent) -> None:
        """Record the spans of an event."""
        context = context_of(event)
        if context is None or event.attributes["relay"] != self._relay:
            return
        parent, links = self._find_or_record_parent_and_links(recorded, event, context)
        self.record(
            Span(
                name=event.name,
                kind=_span_kind_of_event(event),
                context=context,
                parent=parent,
                links=links,
                began=_event_time(event) or self._clock.now(),
                ended=self._clock.now(),
                attributes=_span_attributes_from_log_fields(recorded, event),
                error=event.data["reason"] if event.name == "startrequest.failed" else None,
            )
        )

    def _find_or_record_parent_and_links(
        self, recorded: RecordedEvent, event: CloudEvent, context: SpanContext
    ) -> tuple[SpanContext | None, list[SpanContext]]:
        """Return the parent and the links of the span of an event."""
        if event.name.startswith("event."):
            return self._record_poll_or_report_span(event, context), []
        caller = recorded.caller
        if caller is not None and caller.trace_id == context.trace_id:
            return caller, []  # the caller has gone on with the trace of the event
        parent = None
        if recorded.follows is not None:
            parent = context.child(span_id_from_relay_and_text(event, recorded.follows))
        return parent, [caller] if caller is not None else []

    def _record_poll_or_report_span(self, event: CloudEvent, context: SpanContext) -> SpanContext:
        """Record the span of the poll that brought an event; return its context.

        The first one of an event is the root of the trace. A hub has reports instead of polls.
        """
        root = context.child(span_id_from_relay_and_text(event, f"root {context.trace_id}"))
        is_first = event.name == "event.scheduled" or event.data.get("changed") == {}
        own = (
            root
            if is_first
            else context.child(span_id_from_relay_and_text(event, f"poll {event.id}"))
        )
        seen_at = _event_time(event) or self._clock.now()
        began = self._reads.get(event.attributes["time"])
        self.record(
            Span(
                name="poll" if began is not None else "report",
                kind="client" if began is not None else "consumer",
                context=own,
                parent=None if is_first else root,
                began=began or seen_at,
                ended=seen_at,
                attributes={"imds_relay.scope": event.scope},
            )
        )
        return own


def _span_kind_of_event(event: CloudEvent) -> SpanKind:
    """Return what the relay was: a server to a caller who decided, or nobody's."""
    if event.name not in ("approval.recorded", "approval.refused"):
        return "internal"
    channel = event.data["channel"]
    if channel == "relay":
        return "internal"
    return "consumer" if channel in ("amqp", "fleet") else "server"


def _event_time(event: CloudEvent) -> datetime | None:
    return parse_timestamp(event.attributes["time"])


def _span_attributes_from_log_fields(
    recorded: RecordedEvent, event: CloudEvent
) -> Mapping[str, AttributeValue | None]:
    """Return the fields of the event's log line as attributes."""
    fields = log_line_of_event(event, recorded.position).fields
    attributes = {attribute_name(name): value for name, value in fields.items()}
    attributes.pop(attribute_name("traceId"), None)
    return attributes | {"cloudevents.event_source": event.attributes["source"]}  # type: ignore[return-value]  # the fields have such values


def attribute_name(field: str) -> str:
    """Return the name of the attribute for a field of the log."""
    return _CLOUDEVENTS.get(field) or f"imds_relay.{_UPPER.sub('_', field).lower()}"
