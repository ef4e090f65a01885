"""Takes requests to approve, applies the transitions that are due, and sends what was granted.

The decisions themselves are in `engine`. The steps of each StartRequest
(docs/guarantees.md#every-startrequest-follows-from-the-journal):

1. Wait until the notices about its events are delivered, or ``tell_first`` has passed.
2. Read the document afresh.
3. Check everything again and claim the grants, in one transaction.
4. Send it, and record the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial

from relay.approvals import StartRequestPort
from relay.approvals.engine import ApprovalEngine, ClaimedGrant
from relay.approvals.request import DecisionAnswer, DecisionRequest
from relay.clock import Clock, wait_for_event
from relay.errors import SourceError, SourceRefused, StoreUnavailable
from relay.outbox import Grant, Mode, RecordedEvent, TrackedEvent
from relay.outbox.sqlite import Store
from relay.outbox.transaction import Transaction

_log = logging.getLogger(__name__)
MAX_TIMER = 60.0
"""Seconds until the wall clock is read again: somebody may have set it."""
IDLE_CHECK_INTERVAL = 0.05
"""Seconds between two checks for a StartRequest in flight."""
RETRY_DELAY = 1.0
"""Seconds before a failed step is tried again. After StartRequests without an answer it doubles."""
MAX_RETRY_DELAY = 8.0
NOTICE_CHECK_INTERVAL = 0.05
"""Seconds between two checks whether the notices about a granted event are delivered."""
MAX_EVENTS_PER_START_REQUEST = 100
"""Keeps the body of a StartRequest small, however many events a document holds."""


class Gate:
    """Requests to approve in, StartRequests out, one at a time."""

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
        self._port = port
        self._clock = clock
        self._names_this_vm = names_this_vm
        # Each of the tasks clears its own event:
        self._transitions_wake = asyncio.Event()
        self._grants_wake = asyncio.Event()
        self._refusals_wake = asyncio.Event()
        self._unshared: set[int] = set()
        """Grants whose shared StartRequest got a 400; each needs a StartRequest of its own."""
        self._first_seen: dict[int, float] = {}
        """When each open grant was first seen, by the monotonic clock."""
        self._failures = 0
        """StartRequests in a row that IMDS neither accepted nor refused."""
        self._changed_keys: set[str] | None = None
        """The events for which a transition can be due now; None: all."""
        self._no_transition_possible = False
        """Whether no transition can be due before somebody decides something."""
        self._no_grant_open = False
        """Whether no StartRequest can be due before something is granted."""
        self._is_slot_missing = False
        """Whether a grant waits for a limit."""
        store.listeners.recorded.append(self._on_recorded)

    async def submit(self, request: DecisionRequest) -> DecisionAnswer:
        """Decide one request; the decision is on disk when this returns.

        The answer is 503 if the decision cannot be written
        (docs/guarantees.md#approvals-fail-closed).
        """
        decided = self._store.submit(lambda tx: self.engine.decide(tx, request))
        # The request is decided even if the caller disconnects meanwhile.
        decided.add_done_callback(partial(self._count_refusal, request))
        try:
            return await asyncio.shield(decided)
        except StoreUnavailable:
            return DecisionAnswer(
                503,
                {"detail": "the decision cannot be recorded now; nothing was decided, try again"},
            )

    def _count_refusal(
        self, request: DecisionRequest, decided: asyncio.Future[DecisionAnswer]
    ) -> None:
        """Count a refusal that has no event of its own."""
        if decided.exception() is not None:
            self.engine.refusals.forget(request)
        elif decided.result().is_aggregated:
            answer = decided.result()
            self.engine.refusals.count(request, answer.body["detail"], answer.event_key)
            self._refusals_wake.set()

    async def mode(self) -> Mode:
        """Return the mode in force."""
        return await self._store.read(self.engine.mode)

    async def set_mode(self, mode: Mode, principal: str) -> Mode:
        """Set and remember the switch; return the mode then in force. Raises StoreUnavailable."""
        now = self._clock.now()

        def set_switch(tx: Transaction) -> Mode:
            tx.set_mode(mode, principal, now)
            return self.engine.mode(tx)

        effective = await self._store.transact(set_switch)
        _log.warning("%s set approvals to %s; they are now %s", principal, mode, effective)
        self.wake()
        return effective

    def wake(self) -> None:
        """Check for due transitions and grants of all events now: something has changed."""
        self._changed_keys = None
        self._no_transition_possible = self._no_grant_open = False
        self._transitions_wake.set()
        self._grants_wake.set()

    def _on_recorded(self, events: Sequence[RecordedEvent]) -> None:
        """Check the events that changed. Where nobody has decided anything, none needs a check."""
        if any(not event.name.startswith(("event.", "relay.")) for event in events):
            self._no_transition_possible = self._no_grant_open = False
        if self._no_transition_possible and self._no_grant_open:
            return
        keys = {event.event_key for event in events if event.event_key is not None}
        if not keys:
            return
        if not self._no_transition_possible:
            if self._changed_keys is not None:
                self._changed_keys |= keys
            self._transitions_wake.set()
        if not self._no_grant_open:
            self._grants_wake.set()

    async def wait_until_idle(self, within: float) -> None:
        """Return when no StartRequest is in flight, or after ``within`` seconds."""
        deadline = self._clock.monotonic() + within
        while self.engine.in_flight and self._clock.monotonic() < deadline:
            await self._clock.sleep(IDLE_CHECK_INTERVAL)

    async def run(self) -> None:
        """Apply transitions and send StartRequests until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._apply_transitions_when_due(), name="approvals: transitions")
            group.create_task(
                self._send_start_requests_when_ready(), name="approvals: StartRequests"
            )
            group.create_task(self._record_refusals_when_due(), name="approvals: refusals")

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
                moment, is_any_possible = await self._store.transact(partial(self._apply_due, keys))
            except StoreUnavailable:
                self._changed_keys = None
                timeout: float | None = RETRY_DELAY
            else:
                moments = [moment] if keys is None else [moment, next_change]
                next_change = min((each for each in moments if each is not None), default=None)
                if not self._transitions_wake.is_set():
                    self._no_transition_possible = not is_any_possible
                if self._is_slot_missing:
                    self._grants_wake.set()  # a slot can be free now
                timeout = None
                if next_change is not None:
                    seconds = (next_change - self._clock.now()).total_seconds()
                    timeout = min(seconds, MAX_TIMER)
            await wait_for_event(self._transitions_wake, self._clock, timeout)
            if not self._transitions_wake.is_set():
                self._changed_keys = None  # time has passed for all of them

    def _apply_due(self, keys: set[str] | None, tx: Transaction) -> tuple[datetime | None, bool]:
        """Apply the transitions of these events (None: of all) that are due.

        Return when the next can be due by time alone, and whether any can ever be due for any
        event, unless somebody decides something.
        """
        event_keys = sorted(keys) if keys is not None else None
        next_change = self.engine.apply_transitions(tx, self._clock.now(), event_keys)
        return next_change, self.engine.has_automatic_rules or tx.decisions.are_any_open()

    # --- refusals

    async def record_aggregated_refusals(self, now: datetime | None = None) -> bool:
        """Record the refusals that were counted in minutes that are over; None: in all minutes.

        Return whether they could be recorded. Otherwise they stay counted.
        """
        aggregated = self.engine.refusals.take_due(now)
        if not aggregated:
            return True
        at = self._clock.now()
        recorded = self._store.submit(
            lambda tx: self.engine.record_aggregated_refusals(tx, aggregated, at)
        )

        def put_back_after_failure(recorded: asyncio.Future[None]) -> None:
            if recorded.exception() is not None:
                self.engine.refusals.put_back(aggregated)

        recorded.add_done_callback(put_back_after_failure)
        try:
            await asyncio.shield(recorded)
        except StoreUnavailable:
            return False
        return True

    async def _record_refusals_when_due(self) -> None:
        while True:
            self._refusals_wake.clear()
            if not await self.record_aggregated_refusals(self._clock.now()):
                await self._clock.sleep(RETRY_DELAY)
                continue
            timeout: float | None = None
            next_due = self.engine.refusals.next_due()
            if next_due is not None:
                timeout = min((next_due - self._clock.now()).total_seconds(), MAX_TIMER)
            await wait_for_event(self._refusals_wake, self._clock, timeout)

    # --- StartRequests

    async def _send_start_requests_when_ready(self) -> None:
        """Send grants as soon as they may go, until cancelled."""
        while True:
            self._grants_wake.clear()
            try:
                ready, is_waiting = await self._store.read(
                    lambda tx: self._find_ready_grants(tx, self._clock.now())
                )
            except StoreUnavailable:
                await self._clock.sleep(RETRY_DELAY)
                continue
            if not self._first_seen and not self._grants_wake.is_set():
                self._no_grant_open = True
            if ready:
                await self._read_and_send(ready)
            else:
                timeout = NOTICE_CHECK_INTERVAL if is_waiting else None
                await wait_for_event(self._grants_wake, self._clock, timeout)

    def _find_ready_grants(self, tx: Transaction, now: datetime) -> tuple[list[Grant], bool]:
        """Return the grants that may go now, and whether others wait for their notices only."""
        grants = tx.decisions.open_grants()
        monotonic = self._clock.monotonic()
        self._first_seen = {grant.id: self._first_seen.get(grant.id, monotonic) for grant in grants}
        if self.engine.mode(tx) != "on":
            return [], False
        ready: list[Grant] = []
        is_waiting = self._is_slot_missing = False
        for grant in grants:
            occurrence = tx.snapshot.get(grant.occurrence)
            status = self.engine.status(tx, occurrence, now)
            if status.waiting_for:
                self._is_slot_missing = True
            if status.active_holds or status.waiting_for:
                continue
            if self._are_notices_delivered(tx, grant, occurrence):
                ready.append(grant)
            else:
                is_waiting = True
        for grant in ready:
            if grant.id in self._unshared:
                return [grant], is_waiting
        return ready[:MAX_EVENTS_PER_START_REQUEST], is_waiting

    def _are_notices_delivered(
        self, tx: Transaction, grant: Grant, occurrence: TrackedEvent
    ) -> bool:
        """Whether the notices about an event are delivered, or have had ``tell_first``.

        Only an event of this VM waits
        (docs/guarantees.md#notices-come-before-the-startrequest).
        """
        if not self._names_this_vm(occurrence.event.resources):
            return True
        waited = self._clock.monotonic() - self._first_seen[grant.id]
        if waited >= self.engine.settings.tell_first:
            return True
        return not tx.deliveries.is_event_waiting(occurrence.key)

    async def _read_and_send(self, grants: Sequence[Grant]) -> None:
        """Read the document, then send one StartRequest for the grants that still hold."""
        try:
            await self._port.read_fresh()
        except SourceError:
            await self._clock.sleep(RETRY_DELAY)  # the port logs the error
            return
        try:
            is_sent = await self._claim_and_send(grants)
        except SourceError as error:
            await self._back_off(error)
        except StoreUnavailable:
            await self._clock.sleep(RETRY_DELAY)
        else:
            if not is_sent:  # a transition will record why
                await wait_for_event(self._grants_wake, self._clock, NOTICE_CHECK_INTERVAL)

    async def _claim_and_send(self, grants: Sequence[Grant]) -> bool:
        """Return whether a grant could be claimed.

        Raises StoreUnavailable with nothing sent, and what `_send` raises.
        """
        # From the claim on, only the answer decides about these grants. Set this before the claim
        # is on disk, because transitions run at any time. It takes effect with the claim, which
        # counts the attempt.
        self.engine.in_flight = frozenset((grant.id, grant.attempts + 1) for grant in grants)
        try:
            claims = await self._store.transact(
                lambda tx: self._claim(tx, grants, self._clock.now())
            )
            if claims:
                await self._send(claims)
        finally:
            self.engine.in_flight = frozenset()
            self._changed_keys = None
            self._transitions_wake.set()
        return bool(claims)

    def _claim(self, tx: Transaction, grants: Sequence[Grant], now: datetime) -> list[ClaimedGrant]:
        # The fresh read may have added notices about these events.
        ready = [
            grant
            for grant in grants
            if self._are_notices_delivered(tx, grant, tx.snapshot.get(grant.occurrence))
        ]
        return self.engine.claim_grants(tx, ready, now)

    async def _send(self, claims: Sequence[ClaimedGrant]) -> None:
        """Send one StartRequest and record its answer.

        Raises SourceError if IMDS neither accepted nor refused it.
        """
        event_ids = ", ".join(claim.event_id for claim in claims)
        answer: SourceError | None = None
        try:
            await self._port.start([claim.event_id for claim in claims])
        except SourceError as error:
            answer = error
        if answer is None:
            _log.info("IMDS accepted the StartRequest for %s", event_ids)
            self._failures = 0
        elif isinstance(answer, SourceRefused) and len(claims) == 1:
            _log.error("IMDS refused the StartRequest for %s: %s", event_ids, answer.reason)
            self._failures = 0
        elif isinstance(answer, SourceRefused):
            # One wrong event can be the reason for the 400.
            self._unshared |= {claim.grant.id for claim in claims}
        # The StartRequest was sent, so its answer counts even if the file cannot be written.
        now = self._clock.now()
        await self._store.transact(
            lambda tx: self.engine.record_start_answers(tx, claims, answer, now), fail_open=True
        )
        if answer is not None and not isinstance(answer, SourceRefused):
            raise answer

    async def _back_off(self, error: SourceError) -> None:
        if self._failures == 0:
            _log.warning("cannot send a StartRequest, will try again: %s", error.reason)
        delay = min(RETRY_DELAY * 2.0**self._failures, MAX_RETRY_DELAY)
        self._failures += 1
        await self._clock.sleep(max(delay, error.retry_after or 0.0))
