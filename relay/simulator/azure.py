"""The simulated Azure of one scope, without HTTP: state machine, timer, faults and past calls.

`Scope` is the state machine, which changes only when somebody asks it. `SimulatedAzure` adds a
timer, so that events happen when they are due, and lets tests wait for them. Playbooks, the control
API and tests drive it. `Simulator` in `relay.simulator.server` adds HTTP.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from typing_extensions import override

from relay.clock import Clock, SystemClock
from relay.simulator.event import Event, EventState
from relay.simulator.scope import Scope
from relay.simulator.setup import Fault, Setup, Target


@dataclass(slots=True, kw_only=True)
class RecordedCall:
    """One HTTP call to the simulator. The control API is not counted.

    ``vm`` is the VM whose address was called, ``peer`` address and port of the caller. Names of
    ``headers`` are in lower case. ``event_ids`` are those of a StartRequest, as sent. ``status`` is
    None before the answer, and for a connection that was reset. ``ended_at`` is when the answer was
    sent or the connection was lost.
    """

    at: datetime
    vm: str
    method: str
    path: str
    query: str
    peer: str
    headers: Mapping[str, str]
    body: bytes
    event_ids: tuple[str, ...] = ()
    status: int | None = None
    fault: str | None = None
    ended_at: datetime | None = None


@dataclass(slots=True)
class _ActiveFault:
    fault: Fault
    calls_left: int | None
    until: datetime | None


class SimulatedAzure(Scope):
    def __init__(
        self,
        setup: Setup | None = None,
        *,
        clock: Clock | None = None,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(setup or Setup(), clock=clock or SystemClock())
        self.calls: deque[RecordedCall] = deque(maxlen=10_000)
        self._faults: list[_ActiveFault] = []
        self._report = report
        self._changed = asyncio.Event()

    @property
    def faults(self) -> tuple[Fault, ...]:
        return tuple(active.fault for active in self._faults)

    def add_fault(self, fault: Fault) -> None:
        calls, until = fault.calls, None
        if fault.lasts is not None:
            until = self.clock.now() + self.scale_duration(fault.lasts)
        elif calls is None:
            calls = 1
        self._faults.append(_ActiveFault(fault, calls, until))
        self.report_line_with_time(f"fault {fault.label} waits for {fault.on} calls")

    def clear_faults(self) -> None:
        self._faults.clear()
        self.report_line_with_time("no more faults")

    def take_fault(self, target: Target, vm: str) -> Fault | None:
        """Return the fault that this call meets, and count the call; None if it meets none."""
        now = self.clock.now()
        self._faults = [each for each in self._faults if each.until is None or now < each.until]
        for active in self._faults:
            fault = active.fault
            if fault.on not in (target, "any") or fault.vm not in (None, vm):
                continue
            if active.calls_left is not None:
                active.calls_left -= 1
                if active.calls_left == 0:
                    self._faults.remove(active)
            return fault
        return None

    def report_line_with_time(self, text: str) -> None:
        self._report(f"{self.clock.now():%H:%M:%S} {text}")

    @property
    def start_requests(self) -> tuple[RecordedCall, ...]:
        """Every POST, whatever its answer was."""
        return tuple(call for call in self.calls if call.method == "POST")

    async def wait_until_approved(self, event: Event | str, *, within: float) -> Event:
        """Wait at most ``within`` real seconds until it is approved. Raises TimeoutError."""
        now = await self.wait_for(event, "approved", within=within)
        if not now.approved:  # it has started without
            raise _timeout_error(now, "approved", within)
        return now

    async def wait_until_started(self, event: Event | str, *, within: float) -> Event:
        """Wait until the event is no longer Scheduled. Raises TimeoutError."""
        return await self.wait_for(event, "started", within=within)

    async def wait_for(
        self, event: Event | str, state: EventState, *, within: float = math.inf
    ) -> Event:
        """Wait until an event is in a state, or in a later one. Raises TimeoutError."""
        try:
            await self.wait_until(lambda: self.event(event).has_been(state), within=within)
        except TimeoutError as error:
            raise _timeout_error(self.event(event), state, within) from error
        return self.event(event)

    async def wait_until(self, condition: Callable[[], bool], *, within: float = math.inf) -> None:
        """Wait until a condition holds. Each call and change checks it. Raises TimeoutError."""
        async with asyncio.timeout(within):
            while not condition():
                await self._changed.wait()

    def wake_waiters(self) -> None:
        """Wake those who wait and the timer, after all on which a condition may depend."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def run_timer(self) -> None:
        """Let events happen when they are due, until it is cancelled."""
        while True:
            now, due = self.tick(), self.next_transition_at()
            seconds = None if due is None else max((due - now).total_seconds(), 0.001)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()

    @override
    def tell(self, at: datetime, kind: str, event: Event | None, text: str) -> None:
        if event is not None:
            plan, machines = event.plan, ", ".join(event.resources) or "no VM"
            about = f"{kind:<9} {plan.type} {event.event_id} of {machines}"
            if kind in ("scheduled", "updated") and event.status == "Scheduled":
                not_before = f"{event.not_before:%Y-%m-%d %H:%M:%S} UTC"
                takes = "unknown duration" if plan.duration < 0 else f"{plan.duration} s"
                about += f", not before {not_before}, {plan.source}, {takes}"
            text = f"{about} {text}".rstrip()
        self._report(f"{at:%H:%M:%S} {text}")
        self.wake_waiters()


def _timeout_error(event: Event, state: EventState, within: float) -> TimeoutError:
    return TimeoutError(
        f"expected {event.event_id} to be {state} within {within:g} s, it is {event.status}, "
        f"approved by {', '.join(event.approved_by) or 'nobody'}"
    )
