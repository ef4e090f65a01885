"""Decides which sinks want an event. Pure.

The roles make `matching_sinks` the route of the store, so it decides which entries an event gets.
The dispatcher asks `wants` when a sink is new and live events wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from relay.events.cloudevent import CloudEvent, is_about_event
from relay.events.match import matches, matches_any_pattern
from relay.sinks import SinkSettings


def matching_sinks(event: CloudEvent, sinks: Iterable[SinkSettings]) -> tuple[str, ...]:
    """Return the names of the sinks that want an event."""
    return tuple(sink.name for sink in sinks if wants(sink, event))


def wants(sink: SinkSettings, event: CloudEvent) -> bool:
    """Whether a sink wants an event.

    Its ``events`` must name the type and its ``match`` must apply. ``match`` concerns neither
    ``standing-hold.*`` nor ``relay.*``, which never goes to the sink that it is about. No sink
    wants ``relay.ping``: it is sent to one sink by name.
    """
    if event.name == "relay.ping" or not matches_any_pattern(sink.events, event.name):
        return False
    if event.name.startswith("relay."):
        return event.subject != sink.name
    if not is_about_event(event.name):
        return True
    return matches(sink.match, event.data, event.scope, every_resource=False)
