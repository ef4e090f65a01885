"""One agent: its link to the hub, and the parts that use it.

`Agent` hands each message of the hub to the part that it is for, and makes the messages to the hub.
If the hub asks whether events are still there (`PulseRequest`), and this VM sees one of them when
it has read its document again, a pulse says so.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from typing_extensions import override  # in typing from Python 3.12

from relay import __version__
from relay.approvals.engine import ApprovalEngine
from relay.clock import Clock
from relay.errors import SourceError
from relay.events.build import Origin, common_event_data
from relay.events.model import Document
from relay.fleet.agent.link import AgentLink, CommandHandler
from relay.fleet.agent.pulses import Pulses
from relay.fleet.agent.report_sink import ReportSink
from relay.fleet.agent.start_orders import DocumentReader, StartOrders, StartRequestSender
from relay.fleet.agent.votes import VoteForwarder
from relay.fleet.messages import (
    MAX_NAMES,
    Pulse,
    PulseRequest,
    StartOrder,
    StartResult,
    VoteAnswer,
    VoteMessage,
)
from relay.fleet.routing import pulse_key, result_key, vote_key
from relay.fleet.settings import AgentSettings

ANSWER_DELAY = 1.5
"""Seconds until an agent looks whether an event that another says is gone is still there.

Most VMs have only not polled again. The hub ends the event later than the last try
(`relay.fleet.hub.merge.END_WAIT`).
"""
ANSWER_SPREAD = 1.0
"""Seconds over which the agents of a scope spread their answers."""
ANSWER_TRIES = 3
"""Reads of the document that an agent tries. After them, the hub has heard or decided."""


class AgentPoller(DocumentReader, Protocol):
    """The poller of this VM, as an agent uses it."""

    last_document: Document | None
    """The document that was read last; None: none was read yet."""

    @property
    def read_age(self) -> float | None:
        """The seconds since the last read; None: nothing was read yet."""

    @property
    def clock_offset(self) -> float | None:
        """Seconds that the clock of this VM is ahead of that of IMDS; None if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmIdentity:
    """The VM of an agent. ``names`` are those by which events refer to it; None: unknown."""

    vm_id: str | None
    boot_id: str | None
    zone: str | None
    names: frozenset[str] | None


class Agent(CommandHandler):
    """What a relay needs to be an agent of a fleet. ``engine`` has approvals off.

    `attach_source` comes later, because the poller needs the store, whose sink is `report_sink`.
    """

    def __init__(
        self,
        settings: AgentSettings,
        origin: Origin,
        machine: VmIdentity,
        engine: ApprovalEngine,
        clock: Clock,
        *,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._origin = origin
        self._machine = machine
        self._clock = clock
        self._chance = chance
        self._source: AgentPoller | None = None
        self._orders: StartOrders | None = None
        self._asked: set[str] = set()
        """EventIds, in lower case, of which the hub wants to know whether they are still there."""
        self._was_asked = asyncio.Event()
        self.link = AgentLink(settings, origin, self, clock, chance=chance)
        self.report_sink = ReportSink(self.link, origin)
        self.votes = VoteForwarder(engine, self._publish_vote_to_hub)
        self._pulses = Pulses(self._make_pulse, self._send_pulse, clock, chance=chance)

    def attach_source(self, source: AgentPoller, sender: StartRequestSender) -> None:
        """From now on pulses tell what the source sees, and orders can be carried out."""
        self._source = source
        self._orders = StartOrders(
            source,
            sender,
            self._publish_result,
            self._machine.vm_id,
            self._clock,
        )

    async def run(self) -> None:
        """Stay connected, send pulses and carry out orders until cancelled."""
        if self._orders is None:
            raise RuntimeError("expected attach_source to be called before run")
        async with asyncio.TaskGroup() as group:
            group.create_task(self.link.run(), name="agent: link")
            group.create_task(self._pulses.run(), name="agent: pulses")
            group.create_task(self._orders.run(), name="agent: orders")
            group.create_task(self._answer_pulse_requests(), name="agent: pulse requests")

    async def stop_orders(self, within: float) -> None:
        """Begin no more orders. Return when no order is left, or after ``within`` seconds."""
        if self._orders is not None:
            await self._orders.stop(within)

    # --- messages of the hub

    @override
    def on_agent_listening_to_hub(self) -> None:
        self._pulses.send_soon()

    @override
    def handle_order(self, order: StartOrder) -> None:
        if self._orders is not None:
            self._orders.take(order)

    @override
    def handle_vote_answer(self, answer: VoteAnswer) -> None:
        self.votes.handle_vote_answer(answer)

    @override
    def handle_pulse_request(self, request: PulseRequest) -> None:
        self._asked |= {event_id.lower() for event_id in request.event_ids}
        self._was_asked.set()

    async def _answer_pulse_requests(self) -> NoReturn:
        while True:
            await self._was_asked.wait()
            self._was_asked.clear()
            asked, self._asked = self._asked, set()
            await self._say_what_is_still_there(asked)

    async def _say_what_is_still_there(self, asked: set[str]) -> None:
        """Send a pulse if this VM still sees any of the events.

        A VM that cannot read its document does not know whether it does, and says nothing.
        """
        for _ in range(ANSWER_TRIES):
            await self._clock.sleep(ANSWER_DELAY + ANSWER_SPREAD * self._chance())
            if self._source is None or not self._sees_any(asked):
                return
            with suppress(SourceError):
                await self._source.read_with_imds_time()
                if self._sees_any(asked):
                    self._pulses.send_soon()
                return

    def _sees_any(self, event_ids: set[str]) -> bool:
        document = self._source.last_document if self._source is not None else None
        return document is not None and any(
            event.lowercase_event_id in event_ids for event in document.events
        )

    # --- messages to the hub

    def _make_pulse(self) -> Pulse:
        machine, source = self._machine, self._source
        document = source.last_document if source is not None else None
        live: tuple[dict[str, Any], ...] | None = None
        if document is not None:
            live = tuple(
                common_event_data(event, document.incarnation) for event in document.events
            )
        # What Azure says is not checked here: the hub refuses what it cannot use.
        return Pulse.model_construct(
            vm_id=machine.vm_id,
            boot_id=machine.boot_id,
            version=__version__,
            zone=machine.zone,
            names=tuple(sorted(machine.names or ()))[:MAX_NAMES],
            live=live,  # None: before the first read nobody can say what has ended
            poll_age=source.read_age if source is not None else None,
            clock_offset=source.clock_offset if source is not None else None,
        )

    def _send_pulse(self, pulse: Pulse) -> None:
        event = pulse.to_event(self._origin, self._clock.now())
        self.link.send_transient_if_connected(event, pulse_key(self._origin))

    async def _publish_result(self, result: StartResult) -> None:
        event = result.to_event(self._origin, self._clock.now())
        await self.link.publish(event, result_key(self._origin))

    async def _publish_vote_to_hub(self, vote: VoteMessage) -> None:
        event = vote.to_event(self._origin, self._clock.now())
        await self.link.publish(event, vote_key(self._origin))
