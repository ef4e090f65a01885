"""Carries out the hub's orders: one StartRequest each, or none.

Of all agents, one at a time has an order for an event, because no agent sends anything after the
deadline of its order. So this module rather sends nothing than too late. It judges the deadline by
the clock of IMDS, which it reads with the document. From then on it takes the longer of two times
that have passed: by the monotonic clock, which can stop while the VM is frozen, and by the wall
clock, which can be set. Only a freeze during which both stand still, between the read and the
StartRequest, is not seen. It is as long as the StartRequest waits for its turn, which `ImdsClient`
gives within a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import NoReturn, Protocol, TypeAlias

from relay.clock import Clock
from relay.errors import DeliveryError, SourceCallNotSentInTime, SourceError, SourceRefused
from relay.events.model import Document
from relay.fleet.messages import (
    ANSWER_MARGIN,
    MAX_REASON,
    ORDER_LIFETIME,
    StartOrder,
    StartOutcome,
    StartResult,
)
from relay.ingest import DatedRead

RESTART_PAUSE = ORDER_LIFETIME
"""Seconds after its start in which an agent carries out nothing.

The process that ran there before may have carried out the same order, and did not write it down.
"""
MAX_HUB_AHEAD = 2.0
"""Seconds that the hub's clock may be ahead of that of IMDS, which makes its deadlines later.

The hub gives an order to another agent `ANSWER_MARGIN` after the deadline.
"""
DATE_RESOLUTION = 1.0
"""Seconds. The header ``Date`` leaves out the fraction of its second."""
_Ended: TypeAlias = tuple[StartOutcome, str | None, int | None]
"""How an order ended: the outcome, the reason, and the HTTP status of IMDS, if it answered."""
_log = logging.getLogger(__name__)


class DocumentReader(Protocol):
    """The `relay.imds.poller.Poller` of an agent. ``last_read_at`` is by the clock of IMDS."""

    last_document: Document | None
    last_read_at: datetime | None

    @property
    def read_age(self) -> float | None: ...

    @property
    def clock_offset(self) -> float | None: ...

    async def read_with_imds_time(self) -> DatedRead[Document]:
        """Read the document with a call that begins now. Raises SourceError."""


class StartRequestSender(Protocol):
    async def send_start_request(self, event_id: str, *, seconds_left: Callable[[], float]) -> None:
        """Send a StartRequest unless its time is over; return on 200.

        It must ask ``seconds_left`` directly before it sends, and must send nothing later. Raises
        SourceCallNotSentInTime if nothing was sent, SourceRefused on 400, another SourceError
        otherwise.
        """


@dataclass(frozen=True, slots=True)
class _ReceivedOrder:
    """An order, and the clocks of this VM when it came."""

    order: StartOrder
    at: datetime
    monotonic: float


@dataclass(eq=False)
class StartOrders:
    """Carries out one order at a time. ``publish`` raises DeliveryError; ``vm_id`` is ours."""

    reader: DocumentReader
    sender: StartRequestSender
    publish: Callable[[StartResult], Awaitable[None]]
    vm_id: str | None
    clock: Clock

    def __post_init__(self) -> None:
        self._started = self.clock.monotonic()
        self._waiting: asyncio.Queue[_ReceivedOrder] = asyncio.Queue(2)
        self._last: StartOrder | None = None
        self._is_stopping = False

    def take(self, order: StartOrder) -> None:
        """Carry out an order of the hub, which sends one after the other.

        An order for another VM is not answered: that VM answers. Two names of relays can be the
        same word of a routing key, and the hub could not tell the results apart.
        """
        if order.vm_id is not None and order.vm_id != self.vm_id:
            _log.warning("fleet: an order of the hub is for VM %s, which this is not", order.vm_id)
            return
        if order == self._last:  # the hub repeats none, and this one has or gets its answer
            return
        received = _ReceivedOrder(order, self.clock.now(), self.clock.monotonic())
        try:
            self._waiting.put_nowait(received)
        except asyncio.QueueFull:
            _log.warning("fleet: an order of the hub was dropped, because others wait")
        else:
            self._last = order

    async def run(self) -> NoReturn:
        while True:
            received = await self._waiting.get()
            order = received.order
            try:
                outcome, reason, status = await self._carry_out(received)
            except Exception:  # noqa: BLE001  # a bug must not stop the next order
                _log.exception("internal error: an order of the hub failed")
                outcome, reason, status = "failed", "an internal error of the agent", None
            name = f"{order.event_id} (grant {order.grant}, attempt {order.attempt})"
            more = f", {reason}" if reason else ""
            _log.info("fleet: the hub ordered a StartRequest for %s: %s%s", name, outcome, more)
            result = StartResult(
                grant=order.grant,
                attempt=order.attempt,
                result=outcome,
                status=status,
                reason=None if reason is None else reason[:MAX_REASON],
            )
            try:
                async with asyncio.timeout(self._remaining_lifetime(received) + ANSWER_MARGIN):
                    await self.publish(result)
            except (TimeoutError, DeliveryError) as error:
                why = f": {error.reason}" if isinstance(error, DeliveryError) else " in time"
                _log.warning("fleet: the result of grant %d could not be told%s", order.grant, why)
            self._waiting.task_done()

    async def stop(self, within: float) -> None:
        """Begin no more orders. Return when no order is left, or after ``within`` seconds."""
        self._is_stopping = True
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._waiting.join()

    # --- orders

    async def _carry_out(self, received: _ReceivedOrder) -> _Ended:
        if self._is_stopping:
            return "stale", "the agent is being stopped", None
        if received.monotonic - self._started < RESTART_PAUSE:
            return "stale", f"the agent has started less than {RESTART_PAUSE:g} s ago", None
        if self._remaining_lifetime(received) <= 0:
            return "stale", f"the order is older than {ORDER_LIFETIME:g} s", None
        try:
            async with asyncio.timeout(self._remaining_lifetime(received)):
                read = await self.reader.read_with_imds_time()
        except TimeoutError:
            return "stale", "IMDS did not give the document in time", None
        except SourceError as error:
            reason = f"the document could not be read, nothing was sent: {error.reason}"
            return "failed", reason, None
        if read.imds_time is None:
            return "failed", "IMDS gave no Date with the document, nothing was sent", None
        return await self._start(received, read, read.imds_time)

    async def _start(
        self, received: _ReceivedOrder, read: DatedRead[Document], date: datetime
    ) -> _Ended:
        order, key = received.order, received.order.event_id.lower()
        event = next(
            (event for event in read.content.events if event.lowercase_event_id == key), None
        )
        if event is None:
            return "changed", "the event is not in the document any more", None
        if not event.is_scheduled:
            return "changed", f"the event is {event.event_status}, not Scheduled", None
        if event.revision != order.revision:
            reason = f"the event has the revision {event.revision}, not {order.revision}"
            return "changed", reason, None
        early = (order.deadline - date).total_seconds() - ORDER_LIFETIME
        if early > MAX_HUB_AHEAD:
            reason = f"by the clock of IMDS the deadline is {early:.1f} s too far away"
            return "stale", reason, None

        def seconds_left() -> float:
            """Return the time to the deadline, if the clock of IMDS is as late as it can be."""
            passed = self._max_elapsed_by_both_clocks(read.asked_at, read.asked_monotonic)
            to_deadline = (order.deadline - date).total_seconds() - DATE_RESOLUTION
            return min(to_deadline - passed, self._remaining_lifetime(received))

        try:
            await self.sender.send_start_request(event.event_id, seconds_left=seconds_left)
        except SourceCallNotSentInTime as error:
            return "stale", error.reason, None
        except SourceRefused as error:
            return "refused", error.reason, 400
        except SourceError as error:
            return "failed", error.reason, error.status
        return "accepted", None, 200

    def _remaining_lifetime(self, received: _ReceivedOrder) -> float:
        """Return for how long an order can be valid, as it was valid when it came."""
        return ORDER_LIFETIME - self._max_elapsed_by_both_clocks(received.at, received.monotonic)

    def _max_elapsed_by_both_clocks(self, at: datetime, monotonic: float) -> float:
        return max(self.clock.monotonic() - monotonic, (self.clock.now() - at).total_seconds())
