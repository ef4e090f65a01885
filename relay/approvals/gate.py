"""Takes requests of callers, and runs what follows from them.

Each request is work for the store, in which `engine` decides it. Beside that, `Gate.run` has two
tasks: it applies the transitions that are due, and it sends what was granted (`start_requests`).
Events are checked for
transitions when they change, and when time alone makes one due.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial

from relay.approvals import StartRequestPort
from relay.approvals.engine import ApprovalEngine
from relay.approvals.request import DecisionAnswer, DecisionRequest
from relay.approvals.standing_hold_admission import CreateRequest, EndRequest
from relay.approvals.standing_hold_engine import create_standing_hold, end_standing_hold
from relay.approvals.start_requests import RETRY_DELAY, StartRequestSender
from relay.clock import Clock, wait_for_event
from relay.errors import StoreUnavailable
from relay.log_fields import log_extra
from relay.store import Mode, RecordedEvent, StandingHold
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
        self._sender = StartRequestSender(
            engine,
            store,
            port,
            clock,
            names_this_vm,
            on_sent=self._check_transitions_soon,
        )
        self._transitions_wake = asyncio.Event()
        self._changed_keys: set[str] | None = None
        """The events for which a transition can be due now; None: all."""
        self._no_transition_possible = False
        """Whether no transition can be due before somebody decides something."""
        store.listeners.recorded.append(self._check_transitions_on_recorded)

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
        self._changed_keys = None
        self._no_transition_possible = False
        self._transitions_wake.set()
        self._sender.check_scopes_soon()

    def restart_tell_first_waits(self) -> None:
        """Wait for the notices of every open grant as after a start: there are new sinks."""
        self._sender.restart_tell_first_waits()

    def _check_transitions_on_recorded(self, events: Sequence[RecordedEvent]) -> None:
        """Check the events that changed. Where nobody has decided anything, none needs a check."""
        if any(not event.name.startswith(("event.", "relay.")) for event in events):
            self._no_transition_possible = False
        keys = {event.event_key for event in events if event.event_key is not None}
        if keys and not self._no_transition_possible:
            self._check_transitions_soon(keys)

    def _check_transitions_soon(self, keys: Iterable[str]) -> None:
        """Check soon whether a transition is due for these events."""
        if self._changed_keys is not None:
            self._changed_keys.update(keys)
        self._transitions_wake.set()

    async def stop_start_requests(self, within: float) -> None:
        """Claim no grant any more, and return when no StartRequest is in flight.

        Return after ``within`` seconds in any case.
        """
        await self._sender.stop_start_requests(within)

    async def run(self) -> None:
        """Apply transitions and send StartRequests until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._apply_transitions_when_due(), name="approvals: transitions")
            group.create_task(self._sender.run(), name="approvals: StartRequests")

    async def _apply_transitions_when_due(self) -> None:
        next_change: datetime | None = None
        checked_at = self._clock.now()
        while True:
            self._transitions_wake.clear()
            now = self._clock.now()
            if now < checked_at or (next_change is not None and next_change <= now):
                self._changed_keys = None  # the time may have come, or come back, for any event
            checked_at = now
            keys, self._changed_keys = self._changed_keys, set()
            try:
                moment, is_any_possible = await self._store.transact(
                    partial(self._apply_due_transitions_in_transaction, keys)
                )
            except StoreUnavailable:
                self._changed_keys = None
                timeout: float | None = RETRY_DELAY
            else:
                moments = [moment] if keys is None else [moment, next_change]
                next_change = min((each for each in moments if each is not None), default=None)
                if not self._transitions_wake.is_set():
                    self._no_transition_possible = not is_any_possible
                self._sender.check_limited_or_held_scopes_soon()
                timeout = None
                if next_change is not None:
                    seconds = (next_change - self._clock.now()).total_seconds()
                    timeout = min(seconds, MAX_TIMER)
            await wait_for_event(self._transitions_wake, self._clock, timeout)

    def _apply_due_transitions_in_transaction(
        self, keys: set[str] | None, tx: Transaction
    ) -> tuple[datetime | None, bool]:
        """Apply the transitions of these events (None: of all) that are due.

        Return when the next can be due by time alone, and whether any can ever be due for any
        event, unless somebody decides something.
        """
        event_keys = sorted(keys) if keys is not None else None
        next_change = self.engine.apply_due_transitions(tx, self._clock.now(), event_keys)
        return (
            next_change,
            self.engine.acts_unasked or tx.approvals.exist(),
        )
