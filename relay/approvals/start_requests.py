"""Sends a StartRequest for what was granted: one task for each scope with an open grant.

The steps of each StartRequest
(docs/guarantees.md#every-startrequest-follows-from-the-journal):

1. Wait until the notices about its event are delivered, or ``tell_first`` has passed.
2. Read the event afresh, and choose who executes it.
3. Check everything again and claim the grant, in one transaction.
4. Send it, and record the answer.

A StartRequest is for one event: a 400 says nothing about another. The task of a scope knows its
tries. It ends with the last open grant, so a scope without one costs nothing, and one that hangs
delays no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from relay.approvals import ClaimedGrant, StartRequestPort
from relay.approvals.engine import ApprovalEngine
from relay.clock import Clock
from relay.errors import SourceError, SourceRefused, StartRequestNotDelivered, StoreUnavailable
from relay.logs import log_extra
from relay.store import Grant, RecordedEvent, TrackedEvent
from relay.store.sqlite import Store
from relay.store.transaction import Transaction

_log = logging.getLogger(__name__)
IDLE_CHECK_INTERVAL = 0.05
"""Seconds between two checks for a StartRequest in flight."""
RETRY_DELAY = 1.0
"""Seconds before a failed step is tried again. After StartRequests without an answer it doubles."""
MAX_RETRY_DELAY = 8.0
NOTICE_CHECK_INTERVAL = 0.05
"""Seconds between two checks whether the notices about a granted event are delivered."""


@dataclass(slots=True)
class _Scope:
    """What its task knows of a scope. Grants are named by their ids."""

    name: str
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a StartRequest may be due."""
    can_be_freed: bool = False
    """Whether a limit or a standing hold keeps a grant back, so that it can go without a decision
    about its event. The others are not looked at again with whatever is recorded in any scope."""
    first_seen: dict[int, float] = field(default_factory=dict)
    """When each open grant was seen first, by the monotonic clock."""
    last_turn: dict[int, int] = field(default_factory=dict)
    """The turn in which each was tried last, counted from 1."""
    failures: int = 0
    """StartRequests in a row that nobody executed, or that IMDS neither accepted nor refused."""
    unreached_agents: set[str | None] = field(default_factory=set)
    """To whom a StartRequest could not be delivered, without a pause since then."""

    def take_next(self, ready: Sequence[Grant]) -> Grant:
        """Return what waited longest since its last try: what fails delays no other for long."""
        taken = min(ready, key=lambda grant: self.last_turn.get(grant.id, 0))
        self.last_turn[taken.id] = max(self.last_turn.values(), default=0) + 1
        return taken

    def pause_after(self, error: SourceError, agent: str | None) -> float:
        """Count a StartRequest that failed; return how many seconds to pause."""
        if isinstance(error, StartRequestNotDelivered) and agent not in self.unreached_agents:
            self.unreached_agents.add(agent)
            return 0.0
        self.unreached_agents.clear()
        if self.failures == 0:
            _log.warning(
                "cannot send a StartRequest in scope %s, will try again: %s",
                self.name,
                error.reason,
                extra=log_extra(scope=self.name, agent=agent, reason=error.reason),
            )
        delay = min(RETRY_DELAY * 2.0**self.failures, MAX_RETRY_DELAY)
        self.failures += 1
        return max(delay, error.retry_after or 0.0)


@dataclass(eq=False)
class StartRequestSender:
    """Grants in, StartRequests out: at most one in flight in each scope."""

    engine: ApprovalEngine
    store: Store
    port: StartRequestPort
    clock: Clock
    names_this_vm: Callable[[Sequence[str]], bool]

    def __post_init__(self) -> None:
        self._scopes: dict[str, _Scope] = {}
        self._must_read_all = asyncio.Event()
        self._must_read_all.set()
        self._is_stopping = False

    def check_all(self) -> None:
        """Look for open grants in all scopes: something has changed."""
        for scope in self._scopes.values():
            scope.wake.set()
        self._must_read_all.set()

    def check_waiting(self, changed: Collection[str] = ()) -> None:
        """Look again at what waits for a limit or a standing hold, and at scopes that changed."""
        for scope in self._scopes.values():
            if scope.can_be_freed or scope.name in changed:
                scope.wake.set()

    def on_recorded(self, events: Sequence[RecordedEvent]) -> None:
        """Send what was granted, and look again at what waits, for a limit in any scope too."""
        self.check_waiting({each.scope for each in events if each.event_key is not None})
        if any(
            each.name == "approval.granted" and each.scope not in self._scopes for each in events
        ):
            self._must_read_all.set()

    async def stop_start_requests(self, within: float) -> None:
        """Claim nothing more; return when nothing is in flight, or after ``within`` seconds."""
        self._is_stopping = True
        deadline = self.clock.monotonic() + within
        while self.engine.in_flight and self.clock.monotonic() < deadline:
            await self.clock.sleep(IDLE_CHECK_INTERVAL)

    async def run(self) -> None:
        """Send grants as soon as they may go, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._must_read_all.wait()
                self._must_read_all.clear()
                try:
                    found = await self.store.read(lambda tx: tx.approvals.open_grants())
                except StoreUnavailable:
                    self._must_read_all.set()
                    await self.clock.sleep(RETRY_DELAY)
                    continue
                for name in (occurrence.scope for _, occurrence in found):
                    if name in self._scopes:
                        continue
                    scope = self._scopes[name] = _Scope(name)
                    group.create_task(
                        self._serve(scope), name=f"approvals: StartRequests in scope {name}"
                    )

    # --- one scope

    async def _serve(self, scope: _Scope) -> None:
        """Send StartRequests for the grants of a scope until none is open."""
        while True:
            scope.wake.clear()
            try:
                is_any_open, is_telling, ready = await self.store.read(
                    partial(self._find_grants, scope)
                )
            except StoreUnavailable:
                await self.clock.sleep(RETRY_DELAY)
                continue
            if not is_any_open and not scope.wake.is_set():
                del self._scopes[scope.name]
                return
            if ready:
                pause = await self._send_next(scope, ready)
                if pause:
                    await self.clock.sleep(pause)
            elif is_telling:
                await self.clock.wait(scope.wake, NOTICE_CHECK_INTERVAL)
            else:
                await scope.wake.wait()

    def _find_grants(self, scope: _Scope, tx: Transaction) -> tuple[bool, bool, list[Grant]]:
        """Return whether any is open, whether one waits for its notices, and those that can go."""
        now, is_telling, ready = self.clock.now(), False, []
        scope.can_be_freed = False
        open_grants = tx.approvals.open_grants(scope.name)
        for grant, occurrence in open_grants:
            must_tell = self._must_tell_first(scope, tx, grant, occurrence)
            status = self.engine.status(tx, occurrence, now)
            # The mode is off for an event whose rows are damaged.
            if status.mode != "on":
                continue
            if status.waiting_for or status.active_standing_holds:
                scope.can_be_freed = True
            elif not status.is_held:
                is_telling = is_telling or must_tell
                if not must_tell:
                    ready.append(grant)
        return bool(open_grants), is_telling, ready

    def _must_tell_first(
        self, scope: _Scope, tx: Transaction, grant: Grant, occurrence: TrackedEvent
    ) -> bool:
        """Whether ``tell_first`` goes on, and an event of this VM has undelivered notices.

        Others wait for none (docs/guarantees.md#notices-come-before-the-startrequest).
        """
        now = self.clock.monotonic()
        waited = now - scope.first_seen.setdefault(grant.id, now)
        return (
            waited < self.engine.settings.tell_first
            and self.names_this_vm(occurrence.event.resources)
            and tx.deliveries.is_event_waiting(occurrence.key)
        )

    async def _send_next(self, scope: _Scope, ready: Sequence[Grant]) -> float:
        """Send one StartRequest, if its grant still holds; return how long to pause."""
        grant = scope.take_next(ready)
        try:
            await self.port.refresh_event(scope.name, grant)
        except SourceError:
            return RETRY_DELAY  # the port logs the error
        agent: str | None = None
        try:
            agent = self.port.choose_agent(scope.name, grant)
            is_sent = await self._send_claimed(scope, grant, agent)
        except SourceError as error:
            return scope.pause_after(error, agent)
        except StoreUnavailable:
            return RETRY_DELAY
        return 0.0 if is_sent else NOTICE_CHECK_INTERVAL  # a transition will record why

    async def _send_claimed(self, scope: _Scope, grant: Grant, agent: str | None) -> bool:
        """Return whether the grant was claimed. Raises StoreUnavailable: nothing was sent."""

        def claim(tx: Transaction) -> ClaimedGrant | None:
            occurrence = tx.occurrences.require_occurrence(grant.occurrence)
            if self._must_tell_first(scope, tx, grant, occurrence):  # of what was read afresh
                return None
            return self.engine.claim_grant(tx, grant, self.clock.now(), agent=agent)

        if self._is_stopping:
            return False
        # From the claim on, only the answer decides about this grant. Set this before the claim is
        # on disk, because transitions run at any time. It takes effect with the claim, which counts
        # the attempt.
        attempt = grant.id, grant.attempts + 1
        self.engine.in_flight.add(attempt)
        try:
            claimed = await self.store.transact(claim)
            if claimed is not None:
                await self._send(scope, claimed)
        finally:
            self.engine.in_flight.discard(attempt)
        return claimed is not None

    async def _send(self, scope: _Scope, claim: ClaimedGrant) -> None:
        """Send it and record the answer. Raises SourceError if IMDS neither took nor refused it."""
        _log_start_request(scope.name, claim)
        answer: SourceError | None = None
        try:
            await self.port.send_start_request(scope.name, claim)
        except SourceError as error:
            answer = error
        is_final = answer is None or isinstance(answer, SourceRefused)
        if is_final:
            scope.failures = 0
            scope.unreached_agents.clear()
        # The StartRequest was sent, so its answer counts even if the file cannot be written, and
        # the StartRequest is in flight until the answer is recorded.
        work = partial(
            self.engine.record_start_answer, claim=claim, error=answer, now=self.clock.now()
        )
        while True:
            try:
                await self.store.transact(work, fail_open=True)
                break
            except StoreUnavailable:  # nor can it be read
                await self.clock.sleep(RETRY_DELAY)
        if answer is not None and not is_final:
            raise answer


def _log_start_request(scope: str, claim: ClaimedGrant) -> None:
    by = f" by agent {claim.agent}" if claim.agent is not None else ""
    _log.info(
        "sending the StartRequest for event %s%s, granted by rule %s",
        claim.event_id,
        by,
        claim.grant.rule,
        extra=log_extra(
            eventId=claim.event_id,
            scope=scope,
            revision=claim.grant.revision,
            rule=claim.grant.rule,
            approvalId=claim.grant.approval_id,
            attempts=claim.attempt_number,
            agent=claim.agent,
            position=claim.journal_head.position,
        ),
    )
