"""One agent: it reports what it recorded, says what it sees, and obeys the hub.

`AgentLink` publishes each event that the agent recorded. A pulse says at an interval who the agent
is, and all that its document holds. It follows the reports over the same way, and none is sent
while a report waits: so it never overtakes one. If the hub asks whether events are still there
(`PulseRequest`), and this VM sees one of them when it has read its document again, a pulse says so.

The times of reports and pulses are by the clock of IMDS (`ImdsClock`), as those of all agents.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Literal, NoReturn

from typing_extensions import override  # in typing from Python 3.12

from relay.amqp.connection import UnusableMessage
from relay.approvals.engine import ApprovalEngine
from relay.clock import Clock, SystemClock
from relay.errors import DeliveryError, SourceError
from relay.events.build import Origin, common_event_data
from relay.fleet.agent.start_orders import DocumentReader, StartOrders, StartRequestSender
from relay.fleet.link import AgentLink
from relay.fleet.messages import (
    ChangeData,
    Content,
    Pulse,
    PulseRequest,
    StartOrder,
    StartResult,
    VoteAnswer,
    VoteMessage,
)
from relay.fleet.routing import PULSE_TTL, agent_key
from relay.fleet.votes import VoteForwarder
from relay.sinks import SinkSettings

INTERVAL = 60.0
"""Seconds between two pulses."""
MIN_INTERVAL = 0.5
"""Seconds between two looks at whether a pulse is due: the shortest time between two pulses."""
ANSWER_DELAY = 1.5
"""Seconds until an agent looks whether an event that another says is gone is still there.

Most VMs have only not polled again. The hub ends the event later than the last try
(`relay.fleet.hub.merge.END_WAIT`).
"""
ANSWER_SPREAD = 1.0
"""Seconds over which the agents of a scope spread their answers."""
ANSWER_TRIES = 3
"""Reads of the document that an agent tries. After them, the hub has heard or decided."""
DATE_RESOLUTION = timedelta(seconds=2)
"""How much the time of IMDS can vary with the fraction of a second that its ``Date`` leaves out."""
_log = logging.getLogger(__name__)


class ImdsClock(SystemClock):
    """The clock of IMDS. ``skew`` returns how far it is ahead of this VM's; None: not known.

    It never gives a time twice, and does not go back by less than `DATE_RESOLUTION`: what was read
    later has a later time.
    """

    def __init__(self, skew: Callable[[], float | None]) -> None:
        self._skew = skew
        self._last = super().now()

    @override
    def now(self) -> datetime:
        now = super().now() + timedelta(seconds=self._skew() or 0.0)
        if now <= self._last <= now + DATE_RESOLUTION:
            now = self._last + timedelta.resolution
        self._last = now
        return now


class ReportSinkSettings(SinkSettings):
    """The settings of the sink that every agent has. They are not part of the configuration."""

    kind: Literal["hub"] = "hub"
    name: str = "hub"


class Agent:
    """What a relay does as an agent of a fleet. ``engine`` has approvals off.

    ``machine`` is a pulse that says who the VM is, and nothing of what it sees.
    ``reports_wait`` returns whether some reports are not in the hub's queue yet.
    """

    def __init__(
        self,
        link: AgentLink,
        origin: Origin,
        machine: Pulse,
        source: DocumentReader,
        sender: StartRequestSender,
        engine: ApprovalEngine,
        clock: Clock,
        *,
        reports_wait: Callable[[], bool],
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._link = link
        link.on_message, link.on_listening = self._on_message, self._send_pulse_soon
        self._origin = origin
        self._machine = machine
        self._source = source
        self._clock = clock
        self._chance = chance
        self._reports_wait = reports_wait
        self.orders = StartOrders(source, sender, self._say, machine.vm_id, clock)
        self._asked: set[str] = set()
        """EventIds, in lower case, of which the hub wants to know whether they are still there."""
        self._was_asked = asyncio.Event()
        self._pulse_at = clock.monotonic()
        self.votes = VoteForwarder(engine, self._say)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._link.run(), name="agent: link")
            group.create_task(self._send_pulses(), name="agent: pulses")
            group.create_task(self.orders.run(), name="agent: orders")
            group.create_task(self._answer_pulse_requests(), name="agent: pulse requests")

    def _on_message(self, content: Content) -> None:
        match content:
            case StartOrder():
                self.orders.take(content)
            case VoteAnswer():
                self.votes.handle_vote_answer(content)
            case PulseRequest():
                self._asked |= {event_id.lower() for event_id in content.event_ids}
                self._was_asked.set()
            case _:
                raise UnusableMessage("no hub sends a message of its kind")

    # --- pulses

    def _send_pulse_soon(self) -> None:
        self._pulse_at = self._clock.monotonic()

    async def _send_pulses(self) -> NoReturn:
        said_document = True
        while True:
            await self._clock.sleep(MIN_INTERVAL)
            if not said_document and self._source.last_document is not None:
                self._send_pulse_soon()  # from now on it can get orders
                said_document = True
            if self._clock.monotonic() < self._pulse_at or not self._link.is_connected:
                continue
            # The sink has what was recorded before the document is `last_document`.
            if not self._reports_wait():
                spread = 0.2 * (self._chance() - 0.5)  # so that agents do not align
                self._pulse_at = self._clock.monotonic() + INTERVAL * (1 + spread)
                pulse, at = self._make_pulse()
                said_document = pulse.live is not None
                with suppress(DeliveryError):  # the next one follows
                    await self._say(pulse, at, PULSE_TTL)

    def _make_pulse(self) -> tuple[Pulse, datetime]:
        source = self._source
        live: tuple[ChangeData, ...] | None = None
        age, at = None, self._clock.now()
        if source.last_document is not None:
            document, age = source.last_document, source.read_age
            live = tuple(
                ChangeData.model_construct(**common_event_data(event, document.incarnation))
                for event in document.events
            )
            if source.last_read_at is not None:
                at = source.last_read_at + timedelta(seconds=age or 0.0)
        # What Azure says is not checked here: the hub refuses what it cannot use.
        # `live` is None before the first read: nobody can say what has ended.
        seen = {"live": live, "poll_age": age, "clock_offset": source.clock_offset}
        return self._machine.model_copy(update=seen), at

    async def _answer_pulse_requests(self) -> NoReturn:
        """Send a pulse if this VM still sees any of the events of which the hub asks.

        A VM that cannot read its document does not know whether it does, and says nothing.
        """
        while True:
            await self._was_asked.wait()
            self._was_asked.clear()
            asked, self._asked = self._asked, set()
            for _ in range(ANSWER_TRIES):
                await self._clock.sleep(ANSWER_DELAY + ANSWER_SPREAD * self._chance())
                if not self._sees_any(asked):
                    break
                with suppress(SourceError):
                    await self._source.read_with_imds_time()
                    if self._sees_any(asked):
                        self._send_pulse_soon()
                    break

    def _sees_any(self, event_ids: set[str]) -> bool:
        document = self._source.last_document
        events = document.events if document is not None else ()
        return any(event.lowercase_event_id in event_ids for event in events)

    async def _say(
        self,
        message: Pulse | StartResult | VoteMessage,
        at: datetime | None = None,
        expiration: int | None = None,
    ) -> None:
        event = message.to_event(self._origin, at or self._clock.now())
        await self._link.publish(event, agent_key(message.routed_as, self._origin), expiration)
