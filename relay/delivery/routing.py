"""Which sinks want an event. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from relay.events.cloudevent import CloudEvent
from relay.events.match import matches, matches_any
from relay.sinks import SinkSettings


def matching_sinks(event: CloudEvent, sinks: Iterable[SinkSettings]) -> Iterator[str]:
    """The names of the sinks that want the event.

    ``relay.*`` goes to every sink whose ``events`` name it, but never to the sink it is about; ``match`` does not apply
    to it. ``relay.ping`` is sent to the pinged sink alone and wanted by none.
    """
    for sink in sinks:
        if wants(sink, event):
            yield sink.name


def wants(sink: SinkSettings, event: CloudEvent) -> bool:
    """Whether a sink wants the event."""
    if event.name == "relay.ping" or not matches_any(sink.events, event.name):
        return False
    if event.name.startswith("relay."):
        return event.subject != sink.name
    return matches(sink.match, event.data, event.scope, every=False)
