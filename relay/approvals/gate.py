"""Takes requests to approve, and runs the tasks that follow from them.

The gate applies transitions when they are due. Its `StartRequestSender` sends what was granted. The
decisions themselves are in `service`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from relay.approvals import StartRequestPort
from relay.approvals.request import DecisionAnswer, DecisionRequest
from relay.approvals.sender import RETRY_DELAY, StartRequestSender
from relay.approvals.service import ApprovalService
from relay.clock import Clock, wait_for_event
from relay.errors import StoreUnavailable
from relay.outbox import Mode
from relay.outbox.sqlite import Store
from relay.outbox.transaction import Transaction

_log = logging.getLogger(__name__)
MAX_TIMER = 60.0
"""Seconds until the wall clock is read again: somebody may have set it."""
IDLE_CHECK_INTERVAL = 0.05
"""Seconds between two checks for a StartRequest in flight."""


class Gate:
    """Requests to approve in, StartRequests out."""

    def __init__(
        self,
        service: ApprovalService,
        store: Store,
        port: StartRequestPort,
        clock: Clock,
        names_us: Callable[[Sequence[str]], bool],
    ) -> None:
        """``names_us`` says whether the resources of an event include this VM."""
        self.service = service
        self._store = store
        self._clock = clock
        self._is_changed = asyncio.Event()
        self._sender = StartRequestSender(
            service, store, port, clock, names_us, on_answer=self._is_changed.set
        )
        store.listeners.recorded.append(lambda _: self.wake())

    async def submit(self, request: DecisionRequest) -> DecisionAnswer:
        """Decide one request; the decision is on disk when this returns.

        The answer is 503 if the decision cannot be written
        (docs/guarantees.md#approvals-fail-closed).
        """
        try:
            return await self._store.transact(lambda tx: self.service.submit(tx, request))
        except StoreUnavailable:
            return DecisionAnswer(
                503,
                {"detail": "the decision cannot be recorded now; nothing was decided, try again"},
            )

    async def mode(self) -> Mode:
        """Return the mode in force."""
        return await self._store.read(self.service.mode)

    async def set_mode(self, mode: Mode, principal: str) -> Mode:
        """Set and remember the switch; return the mode then in force. Raises StoreUnavailable."""
        now = self._clock.now()

        def set_switch(tx: Transaction) -> Mode:
            tx.set_mode(mode, principal, now)
            return self.service.mode(tx)

        effective = await self._store.transact(set_switch)
        _log.warning("%s set approvals to %s; they are now %s", principal, mode, effective)
        self.wake()
        return effective

    def wake(self) -> None:
        """Check for due transitions and grants now: something has changed."""
        self._is_changed.set()
        self._sender.wake()

    async def wait_until_idle(self, within: float) -> None:
        """Return when no StartRequest is in flight, or after ``within`` seconds."""
        deadline = self._clock.monotonic() + within
        while self.service.in_flight and self._clock.monotonic() < deadline:
            await self._clock.sleep(IDLE_CHECK_INTERVAL)

    async def run(self) -> None:
        """Apply transitions and send StartRequests until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._apply_transitions(), name="approvals: transitions")
            group.create_task(self._sender.run(), name="approvals: StartRequests")

    async def _apply_transitions(self) -> None:
        while True:
            self._is_changed.clear()
            try:
                next_change = await self._store.transact(
                    lambda tx: self.service.apply_transitions(tx, self._clock.now())
                )
            except StoreUnavailable:
                timeout: float | None = RETRY_DELAY
            else:
                timeout = None
                if next_change is not None:
                    seconds = (next_change - self._clock.now()).total_seconds()
                    timeout = min(seconds, MAX_TIMER)
            await wait_for_event(self._is_changed, self._clock, timeout)
