"""Sends the pulses of an agent: signs of life that say what its VM sees.

A pulse also makes good a report that was lost. It is not confirmed: the next one follows.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from relay.clock import Clock, wait_for_event
from relay.fleet.messages import Pulse

INTERVAL = 60.0
"""Seconds between two pulses."""
INTERVAL_SPREAD = 0.1
"""The part of `INTERVAL` by which a pulse can be earlier or later, so that agents do not align."""
MIN_INTERVAL = 0.5
"""Seconds: the shortest time between two pulses, whoever asks for them."""


class Pulses:
    """Sends a pulse at an interval, and when somebody needs one.

    ``make`` returns a pulse about the present, ``send`` sends it if the agent is connected.
    ``chance`` returns a random number in [0, 1).
    """

    def __init__(
        self,
        make: Callable[[], Pulse],
        send: Callable[[Pulse], object],
        clock: Clock,
        *,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._make = make
        self._send = send
        self._clock = clock
        self._chance = chance
        self._next_at = clock.monotonic()
        self._earliest = clock.monotonic()
        self._changed = asyncio.Event()

    def send_soon(self) -> None:
        """Send a pulse as soon as one may be sent."""
        at = max(self._clock.monotonic(), self._earliest)
        if at < self._next_at:
            self._next_at = at
            self._changed.set()

    async def run(self) -> None:
        """Send pulses until cancelled."""
        while True:
            self._changed.clear()
            seconds = self._next_at - self._clock.monotonic()
            if seconds > 0:
                await wait_for_event(self._changed, self._clock, seconds)
                continue
            now = self._clock.monotonic()
            self._earliest = now + MIN_INTERVAL
            self._next_at = now + INTERVAL * (1 + INTERVAL_SPREAD * (2 * self._chance() - 1))
            self._send(self._make())
