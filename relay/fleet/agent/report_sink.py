"""The sink of an agent: it publishes to the hub what the agent recorded."""

from __future__ import annotations

import math
from typing import Literal, Protocol

from relay.errors import Rejected
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.routing import report_key
from relay.sinks import Receipt, SinkSettings


class ReportSinkSettings(SinkSettings):
    """The settings of the sink that every agent has. They are not part of the configuration."""

    kind: Literal["hub"] = "hub"
    name: str = "hub"


class Publisher(Protocol):
    """How the sink reaches the hub."""

    async def publish(self, event: CloudEvent, key: str) -> None:
        """Return when a queue of the hub holds the event. Raises Deferred or Rejected."""


class ReportSink:
    """Publishes each event of this VM's document, and each that is about the agent itself."""

    concurrency = 64
    longest_pause = 5.0  # a try costs nothing while there is no connection
    give_up_after = math.inf  # a hub that is back gets the whole history

    def __init__(self, publisher: Publisher, origin: Origin) -> None:
        self._publisher = publisher
        self._origin = origin

    async def deliver(self, event: CloudEvent) -> Receipt:
        """Return when the hub's queue has the event.

        Raises Rejected if the hub takes no such event, and what `Publisher.publish` raises.
        """
        if not event.name.startswith(("event.", "relay.")):
            # A relay without a fleet recorded it here for a sink with the same name.
            raise Rejected("an agent reports no decisions: the hub makes them")
        await self._publisher.publish(event, report_key(event, self._origin))
        return Receipt()
