"""The agents as the source of the hub: whether they can be heard at all."""

from __future__ import annotations

from typing import NoReturn

from relay.clock import Clock
from relay.events.build import RecordRelayEvent

LOST_AFTER = 90.0
"""Seconds without a connection to RabbitMQ after which the hub reports it."""
_CHECK_INTERVAL = 1.0


class FleetSourceHealth:
    """What the API reports about the source of a hub."""

    lost_reason = "the hub has no connection to RabbitMQ, so it hears no agent"

    def __init__(self, clock: Clock, report: RecordRelayEvent) -> None:
        self.lost = False
        """Whether there has been no connection for `LOST_AFTER` seconds."""
        self.polls = 0
        """How many messages of agents were read."""
        self.failures = 0
        """How often the connection was lost or could not be made since it was there last."""
        self._clock = clock
        self._report = report
        self._disconnected_at: float | None = clock.monotonic()

    @property
    def is_connected(self) -> bool:
        """Whether the hub hears its agents."""
        return self._disconnected_at is None

    def on_broker_connected(self) -> None:
        """The hub hears its agents from now on."""
        self._disconnected_at = None
        self.failures = 0
        if self.lost:
            self.lost = False
            self._report("relay.source-recovered", "the hub hears its agents again")

    def on_broker_disconnected(self) -> None:
        """The hub does not hear its agents any more."""
        self._disconnected_at = self._clock.monotonic()

    def on_broker_connection_failed(self) -> None:
        """The connection could not be made, or was lost."""
        self.failures += 1

    async def watch_connection(self) -> NoReturn:
        """Report the loss of the connection, until cancelled."""
        while True:
            await self._clock.sleep(_CHECK_INTERVAL)
            since = self._disconnected_at
            if since is None or self.lost or self._clock.monotonic() - since < LOST_AFTER:
                continue
            self.lost = True
            self._report("relay.source-lost", f"{self.lost_reason} (for {LOST_AFTER:g} s)")
