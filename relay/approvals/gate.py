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
from relay.approvals.service import ApprovalService, Claim
from relay.clock import Clock, wait_for_event
from relay.errors import SourceError, SourceRefused, SourceUnavailable, StoreUnavailable
from relay.net.backoff import exponential_backoff
from relay.outbox import Grant, Mode
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
                await self._wait(self._granted, _LOOK if soon else None)

    def _look(self, tx: Transaction, now: datetime) -> tuple[list[Grant], bool]:
        """The grants that may go now, and whether others wait for nothing but their notices to get out."""
        grants, monotonic = tx.decisions.open_grants(), self._clock.monotonic()
        self._first_seen = {grant.id: self._first_seen.get(grant.id, monotonic) for grant in grants}
        if self.service.mode(tx) != "on":
            return [], False
        free = [grant for grant in grants if not self.service.is_held(tx, grant, now)]
        ready = [grant for grant in free if self._is_told(tx, grant)]
        alone = [grant for grant in ready if grant.id in self._alone]
        return alone[:1] or ready[:_MOST], len(ready) < len(free)

    def _is_told(self, tx: Transaction, grant: Grant) -> bool:
        """Whether what there is to say of an event that names this VM was said, or has had its time.

        See docs/guarantees.md#notices-come-before-the-startrequest.
        """
        occurrence = tx.snapshot.by_id(grant.occurrence)
        return (
            self._clock.monotonic() - self._first_seen[grant.id] >= self.service.settings.tell_first
            or not self._names_us(occurrence.event.resources)
            or not tx.deliveries.has_waiting(occurrence.key)
        )

    async def _start(self, grants: Sequence[Grant]) -> None:
        """One fresh read and one POST for these grants, as far as they still hold then."""
        try:
            await self._port.read_fresh()
        except SourceError:
            await self._clock.sleep(_AGAIN)  # whoever reads says why, and keeps the pace
            return
        try:
            claimed = await self._claim_and_post(grants)
        except SourceError as error:
            await self._rest(error)
        except StoreUnavailable:
            await self._clock.sleep(_AGAIN)
        else:
            if not claimed:
                await self._wait(
                    self._granted, _LOOK
                )  # what stood in the way is for the next step to tell

    async def _claim_and_post(self, grants: Sequence[Grant]) -> bool:
        """Whether any could be claimed. Raises StoreUnavailable, with nothing sent, and what `_post` raises."""
        # Set before the claim is on disk: from then on a step must leave these grants to their answer.
        self.service.in_flight = frozenset(grant.id for grant in grants)
        try:
            claims = await self._store.transact(
                lambda tx: self._claim(tx, grants, self._clock.now())
            )
            if claims:
                await self._post(claims)
        finally:
            self.service.in_flight = frozenset()
            self._stepped.set()
        return bool(claims)

    def _claim(self, tx: Transaction, grants: Sequence[Grant], now: datetime) -> list[Claim]:
        # The fresh read may have brought news, and those come first too.
        return self.service.claim(tx, [grant for grant in grants if self._is_told(tx, grant)], now)

    async def _post(self, claims: Sequence[Claim]) -> None:
        """Send, and write the answer down. Raises SourceUnavailable when there was none that says yes or no."""
        named = ", ".join(claim.event_id for claim in claims)
        try:
            await self._port.start([claim.event_id for claim in claims])
        except SourceRefused as error:
            status, reason = error.status, error.reason
            if len(claims) > 1:
                self._alone |= {claim.grant.id for claim in claims}
                await self._note(lambda tx, _: self.service.unanswered(tx, claims, status))
                return
            _log.error("IMDS refused the StartRequest for %s: %s", named, reason)
            await self._note(lambda tx, now: self.service.failed(tx, claims, status, reason, now))
        except SourceError as error:
            status = error.status
            await self._note(lambda tx, _: self.service.unanswered(tx, claims, status))
            raise
        else:
            _log.info("StartRequest accepted for %s", named)
            await self._note(lambda tx, now: self.service.accepted(tx, claims, now))
        self._failures = 0

    async def _note(self, work: Callable[[Transaction, datetime], None]) -> None:
        # It has happened, so it is told in any case: from memory, where the file cannot be written.
        now = self._clock.now()
        await self._store.transact(lambda tx: work(tx, now), fail_open=True)

    async def _rest(self, error: SourceError) -> None:
        if self._failures == 0:
            _log.warning(
                "a StartRequest could not be sent, it will be tried again: %s", error.reason
            )
        self._failures += 1
        asked = (
            error.retry_after if isinstance(error, SourceUnavailable) and error.retry_after else 0.0
        )
        pause = exponential_backoff(self._failures, first=_AGAIN, maximum=_AGAIN_LATEST)
        await self._clock.sleep(max(asked, pause))

    async def _wait(self, event: asyncio.Event, seconds: float | None) -> None:
        """Return when the event is set, or after so many seconds, a minute at most; without seconds, only when it is set."""
        limit = None if seconds is None else min(seconds, _LOOK_AT_LATEST)
        await wait_for_event(event, self._clock, limit)
