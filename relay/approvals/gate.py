"""Takes requests of callers, and sends what was granted.

Each request is work for the store, in which `engine` decides it. What follows from a change,
whoever recorded it, is recorded in the same transaction (`Store.follow_up`). So `Gate.run` has two
tasks: it checks all events when time alone makes a transition due, and it sends what was granted
(`start_requests`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from relay.approvals import StartRequestPort
from relay.approvals.engine import ApprovalEngine
from relay.approvals.request import DecisionAnswer, DecisionRequest
from relay.approvals.standing_hold_admission import CreateRequest, EndRequest
from relay.approvals.standing_hold_engine import create_standing_hold, end_standing_hold
from relay.approvals.start_requests import RETRY_DELAY, StartRequestSender
from relay.clock import Clock, wait_for_event
from relay.errors import StoreUnavailable
from relay.log_fields import log_extra
from relay.store import Mode, StandingHold
from relay.store.rows import PageLimit
from relay.store.sqlite import Store
from relay.store.transaction import Transaction

_log = logging.getLogger(__name__)
MAX_TIMER = 60.0
"""Seconds until the wall clock is read again: somebody may have set it."""

_NOT_RECORDED = DecisionAnswer(
    503, {"detail": "the decision cannot be recorded now; nothing was decided, try again"}
)


class Gate:
    """The `DecisionHandler` of a relay that decides itself."""

    def __init__(
        self,
        engine: ApprovalEngine,
        store: Store,
        port: StartRequestPort,
        clock: Clock,
        names_this_vm: Callable[[Sequence[str]], bool],
    ) -> None:
        """``names_this_vm`` says whether the resources of an event include this VM."""
        self.engine = engine
        self._store = store
        self._clock = clock
        self._sender = StartRequestSender(engine, store, port, clock, names_this_vm)
        self._wake = asyncio.Event()
        self._must_check_all = True
        store.follow_up = lambda tx: engine.follow_up(tx, clock.now())
        store.listeners.recorded.append(lambda _: self._wake.set())
        store.listeners.write_error_changed.append(self._on_write_error)

    async def submit(self, request: DecisionRequest) -> DecisionAnswer:
        """Decide one request; the decision is on disk when this returns.

        The answer is 503 if the decision cannot be written
        (docs/guarantees.md#approvals-fail-closed).
        """
        try:
            # The request is decided even if the caller disconnects meanwhile.
            return await self._store.transact(lambda tx: self.engine.decide(tx, request))
        except StoreUnavailable:
            return _NOT_RECORDED

    async def create_standing_hold(self, request: CreateRequest) -> DecisionAnswer:
        """Make a standing hold; it is on disk when this returns. The answer is as of `submit`."""
        return await self._change_standing_holds(
            lambda tx: create_standing_hold(tx, self.engine.origin, request)
        )

    async def end_standing_hold(self, request: EndRequest) -> DecisionAnswer:
        """End a standing hold early. The answer is as of `submit`."""
        engine = self.engine  # the work reads its settings: a reload changes them in order
        return await self._change_standing_holds(
            lambda tx: end_standing_hold(tx, engine.origin, request, engine.settings.people)
        )

    async def standing_holds_page(
        self, before: int | None, limit: PageLimit, *, only_open: bool
    ) -> tuple[list[StandingHold], bool]:
        """Return the newest standing holds with a number less than ``before``, newest first.

        The second value says whether there are more.
        """
        return await self._store.read(
            lambda tx: tx.standing_holds.page(before, limit, only_open=only_open)
        )

    async def find_standing_hold(self, hold_id: str) -> StandingHold | None:
        """Return a standing hold, also one that is over."""
        return await self._store.read(lambda tx: tx.standing_holds.find(hold_id))

    async def _change_standing_holds(
        self, work: Callable[[Transaction], DecisionAnswer]
    ) -> DecisionAnswer:
        try:
            answer = await self._store.transact(work)
        except StoreUnavailable:
            return _NOT_RECORDED
        if answer.status in (200, 201) and not answer.repeat:  # HTTP
            self.wake()
        return answer

    async def approval_mode(self) -> Mode:
        """Return the mode in force."""
        return await self._store.read(self.engine.effective_approval_mode)

    async def set_approval_mode(self, mode: Mode, principal: str) -> Mode:
        """Set and remember the switch; return the mode then in force. Raises StoreUnavailable."""
        now = self._clock.now()

        def set_switch(tx: Transaction) -> Mode:
            tx.store_approval_mode(mode, principal, now)
            return self.engine.effective_approval_mode(tx)

        effective = await self._store.transact(set_switch)
        _log.warning(
            "%s set approvals to %s; they are now %s",
            principal,
            mode,
            effective,
            extra=log_extra(principal=principal, mode=effective),
        )
        self.wake()
        return effective

    def wake(self) -> None:
        """Check for due transitions and grants of all events now: something has changed."""
        self._must_check_all = True
        self._wake.set()
        self._sender.check_all()

    def restart_tell_first_waits(self) -> None:
        """Wait for the notices of every open grant as after a start: there are new sinks."""
        self._sender.restart_tell_first_waits()

    def _on_write_error(self, reason: str | None) -> None:
        """While the file could not be written, nothing followed from what was recorded."""
        if reason is None:
            self.wake()

    async def stop_start_requests(self, within: float) -> None:
        """Claim no grant any more, and return when no StartRequest is in flight.

        Return after ``within`` seconds in any case.
        """
        await self._sender.stop_start_requests(within)

    async def run(self) -> None:
        """Apply transitions and send StartRequests until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._check_when_time_comes(), name="approvals: transitions")
            group.create_task(self._sender.run(), name="approvals: StartRequests")

    async def _check_when_time_comes(self) -> None:
        checked_at = self._clock.now()
        while True:
            self._wake.clear()
            before, checked_at = checked_at, self._clock.now()
            due = self.engine.next_change
            if (
                self._must_check_all
                or checked_at < before  # the time may have come, or come back, for any event
                or (due is not None and due <= checked_at)
            ):
                self._must_check_all = False
                try:
                    await self._store.transact(
                        lambda tx: self.engine.check_all(tx, self._clock.now())
                    )
                except StoreUnavailable:
                    self._must_check_all = True
                    await wait_for_event(self._wake, self._clock, RETRY_DELAY)
                    continue
                self._sender.check_waiting()
                due = self.engine.next_change
            timeout: float | None = None
            if due is not None:
                timeout = min((due - self._clock.now()).total_seconds(), MAX_TIMER)
            await wait_for_event(self._wake, self._clock, timeout)
