"""One agent: its link to the hub, and the parts that use it.

`Agent` hands each message of the hub to the part that it is for, and makes the messages to the hub.
It also affirms *disputed* events: if the hub says that another agent reported an event as gone
(`HubScopeState.ending`), and this VM still sees it when it has read its document again, a pulse
says so.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from typing_extensions import override  # in typing from Python 3.12

from relay import __version__
from relay.clock import Clock
from relay.errors import SourceError
from relay.events.build import Origin, common_event_data
from relay.events.model import Document
from relay.fleet.agent.link import AgentLink, CommandHandler
from relay.fleet.agent.pulses import Pulses
from relay.fleet.agent.report_sink import NamesThisVm, ReportSink
from relay.fleet.agent.start_orders import DocumentReader, StartOrders, StartRequestSender
from relay.fleet.agent.votes import HubVoteClient
from relay.fleet.messages import (
    MAX_NAMES,
    HubScopeState,
    Pulse,
    StartOrder,
    StartResult,
    VoteAnswer,
    VoteMessage,
)
from relay.fleet.routing import pulse_key, result_key, vote_key
from relay.fleet.settings import AgentSettings

AFFIRM_DELAY = 1.5
"""Seconds until an agent affirms an event that another says is gone.

The hub ends the event later than that (`relay.fleet.hub.merge.END_WAIT`).
"""
AFFIRM_SPREAD = 1.0
"""Seconds over which agents spread what they affirm."""
DISPUTE_LIFETIME = 30.0
"""Seconds. By then the hub has ended the event, or has heard that it is still there."""


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
    """What a relay needs to be an agent of a fleet.

    `attach_source` comes later, because the poller needs the store, whose sink is `report_sink`.
    """

    def __init__(
        self,
        settings: AgentSettings,
        origin: Origin,
        machine: VmIdentity,
        names_this_vm: NamesThisVm,
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
        self._disputed: dict[str, float] = {}
        """EventIds that this VM showed when the hub said that another agent says gone, and when.

        The times are monotonic seconds. If the hub repeats it, the first one stays."""
        self._dispute_came = asyncio.Event()
        self.link = AgentLink(settings, origin, self, clock, chance=chance)
        self.report_sink = ReportSink(self.link, origin, names_this_vm, clock, chance=chance)
        self.votes = HubVoteClient(self._publish_vote_to_hub)
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
            group.create_task(self._affirm_disputed_events_forever(), name="agent: disputed events")

    async def stop_orders(self, within: float) -> None:
        """Begin no more orders. Return when no order is left, or after ``within`` seconds."""
        if self._orders is not None:
            await self._orders.stop(within)

    # --- messages of the hub

    @override
    def on_agent_listening_to_hub(self) -> None:
        self.report_sink.mark_listening_to_hub()
        self._pulses.send_soon()

    @override
    def handle_order(self, order: StartOrder) -> None:
        if self._orders is not None:
            self._orders.take(order)

    @override
    def handle_vote_answer(self, answer: VoteAnswer) -> None:
        self.votes.handle_vote_answer(answer)

    @override
    def handle_pulse_request(self) -> None:
        self._pulses.send_soon()

    @override
    def handle_events_known_to_hub(self, state: HubScopeState) -> None:
        self.report_sink.remember_events_known_to_hub(state)
        disputed = self._event_ids_still_in_document(state.ending)
        if disputed:
            now = self._clock.monotonic()
            self._disputed = dict.fromkeys(disputed, now) | self._disputed
            self._dispute_came.set()

    async def _affirm_disputed_events_forever(self) -> NoReturn:
        """Tell the hub of events that another agent says are gone, and that this VM still sees.

        Most VMs have only not polled again. So this waits for their next poll first: else each end
        of an event would cause a pulse of almost every VM of the scope. If that poll is late, the
        agent reads the document itself: the hub waits only `relay.fleet.hub.merge.END_WAIT`. A VM
        that cannot read its document does not know whether it still sees the event, and says
        nothing.
        """
        while True:
            self._dispute_came.clear()
            if not self._disputed:
                await self._dispute_came.wait()
            await self._clock.sleep(AFFIRM_DELAY + AFFIRM_SPREAD * self._chance())
            disputed = self._take_disputes_before_last_read()
            if not disputed and self._disputed and self._source is not None:
                with suppress(SourceError):
                    await self._source.read_with_imds_time()
                disputed = self._take_disputes_before_last_read()
            affirmed = self._event_ids_still_in_document(disputed)
            for event_id in affirmed:
                self.report_sink.mark_end_must_be_reported(event_id)
            if affirmed:
                self._pulses.send_soon()

    def _take_disputes_before_last_read(self) -> list[str]:
        """Return the disputed events about which the last read of the document says something.

        Forgets those whose dispute is over: a VM whose service fails would ask it all the time.
        """
        now = self._clock.monotonic()
        self._disputed = {
            event_id: at for event_id, at in self._disputed.items() if now < at + DISPUTE_LIFETIME
        }
        read_age = self._source.read_age if self._source is not None else None
        if read_age is None:
            return []
        read_at = now - read_age
        taken = [event_id for event_id, at in self._disputed.items() if at < read_at]
        for event_id in taken:
            del self._disputed[event_id]
        return taken

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

    def _event_ids_still_in_document(self, event_ids: Collection[str]) -> list[str]:
        """Return those of the EventIds that this VM still sees."""
        document = self._source.last_document if self._source is not None else None
        live = (
            {event.lowercase_event_id for event in document.events}
            if document is not None
            else set()
        )
        return [event_id for event_id in event_ids if event_id.lower() in live]

    async def _publish_result(self, result: StartResult) -> None:
        event = result.to_event(self._origin, self._clock.now())
        await self.link.publish(event, result_key(self._origin))

    async def _publish_vote_to_hub(self, vote: VoteMessage) -> None:
        event = vote.to_event(self._origin, self._clock.now())
        await self.link.publish(event, vote_key(self._origin))
