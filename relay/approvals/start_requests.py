"""Sends a StartRequest for what was granted: one at a time in each scope, and scopes side by side.

The steps of each StartRequest
(docs/guarantees.md#every-startrequest-follows-from-the-journal):

1. Wait until the notices about its events are delivered, or ``tell_first`` has passed.
2. Read the events afresh, and choose who executes it.
3. Check everything again and claim the grants, in one transaction.
4. Send it, and record the answer.

A scope has a task only from step 2 on, and during the pause after a failure. So a scope that hangs
delays no other, and a scope without an open grant costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from relay.approvals import ClaimedGrant, StartRequestPort
from relay.approvals.engine import ApprovalEngine
from relay.clock import Clock, wait_for_event
from relay.errors import SourceError, SourceRefused, StartRequestNotDelivered, StoreUnavailable
from relay.log_fields import log_extra
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredOpenGrant:
    """An open grant as the store has it."""

    grant: Grant
    occurrence: TrackedEvent
    is_stopped: bool
    """Whether the mode, a hold or a limit keeps the StartRequest back."""
    can_be_freed: bool
    """Whether it waits for a limit or a standing hold, and so can go without a decision."""
    has_waiting_notices: bool


@dataclass(slots=True)
class _GrantSendingState:
    """What the sender knows of a grant while it is open."""

    first_seen: float
    """By the monotonic clock."""
    last_turn: int = 0
    """The turn of the scope in which it was tried last; 0: it never was."""
    is_unshared: bool = False
    """Whether its shared StartRequest got a 400, so that it needs a StartRequest of its own."""


@dataclass(slots=True)
class _ScopeSendingState:
    """What the sender knows of a scope while a grant is open there."""

    name: str
    is_sending: bool = False
    """Whether a task reads, claims, sends, or pauses after a failure."""
    grants: dict[int, _GrantSendingState] = field(default_factory=dict)
    turns: int = 0
    failures: int = 0
    """StartRequests in a row that nobody executed, or that IMDS neither accepted nor refused."""
    unreached_agents: set[str | None] = field(default_factory=set)
    """To whom a StartRequest could not be delivered, without a pause since then."""

    def keep_only_grants(self, grants: Iterable[Grant], monotonic: float) -> None:
        """Keep what is known of these grants, and forget all others."""
        self.grants = {
            grant.id: self.grants.get(grant.id) or _GrantSendingState(monotonic) for grant in grants
        }

    def take_next_grants(
        self, ready: Sequence[_StoredOpenGrant], max_events_per_start_request: int
    ) -> list[_StoredOpenGrant]:
        """Return those of the grants for which the next StartRequest goes.

        Those that waited longest since their last try come first. So a grant that fails again and
        again delays no other for long.
        """
        by_turn = sorted(ready, key=lambda each: self.grants[each.grant.id].last_turn)
        if by_turn and self.grants[by_turn[0].grant.id].is_unshared:
            max_events_per_start_request = 1
        else:
            by_turn = [each for each in by_turn if not self.grants[each.grant.id].is_unshared]
        batch = by_turn[:max_events_per_start_request]
        self.turns += 1
        for each in batch:
            self.grants[each.grant.id].last_turn = self.turns
        return batch

    def reset_failures(self) -> None:
        """Forget the failures: IMDS has answered."""
        self.failures = 0
        self.unreached_agents.clear()


class StartRequestSender:
    """Grants in, StartRequests out: at most one in flight in each scope."""

    def __init__(
        self,
        engine: ApprovalEngine,
        store: Store,
        port: StartRequestPort,
        clock: Clock,
        names_this_vm: Callable[[Sequence[str]], bool],
        on_sent: Callable[[Iterable[str]], None],
    ) -> None:
        """``names_this_vm`` says whether the resources of an event include this VM.

        ``on_sent`` is called with the keys of events whose StartRequest is not in flight any more.
        """
        self._engine = engine
        self._store = store
        self._port = port
        self._clock = clock
        self._names_this_vm = names_this_vm
        self._on_sent = on_sent
        self._scopes: dict[str, _ScopeSendingState] = {}
        """The scopes where a grant is open."""
        self._scopes_to_check: set[str] | None = None
        """The scopes where a StartRequest may be due; None: all."""
        self._waiting_scopes: set[str] = set()
        """The scopes where at the last check a grant waited for a limit or a standing hold."""
        self._wake = asyncio.Event()
        self._is_stopping = False
        store.listeners.recorded.append(self._check_granted_scopes_soon)

    def check_scopes_soon(self, scopes: Iterable[str] | None = None) -> None:
        """Check soon whether a StartRequest is due in these scopes; None: in all."""
        if scopes is None:
            self._scopes_to_check = None
        elif self._scopes_to_check is not None:
            self._scopes_to_check.update(scopes)
        self._wake.set()

    def restart_tell_first_waits(self) -> None:
        """Give the notices of every open grant ``tell_first`` again: there are new sinks."""
        now = self._clock.monotonic()
        for scope in self._scopes.values():
            for grant in scope.grants.values():
                grant.first_seen = now

    def check_limited_or_held_scopes_soon(self) -> None:
        """Check soon whether a grant that waited for a limit or a standing hold can go."""
        scopes, self._waiting_scopes = self._waiting_scopes, set()
        if scopes:
            self.check_scopes_soon(scopes)

    def _check_granted_scopes_soon(self, events: Sequence[RecordedEvent]) -> None:
        """Check the scopes where a grant is new, and those with an open grant that changed."""
        scopes: set[str] = set()
        for recorded in events:
            is_grant = recorded.name == "approval.granted"
            if recorded.event_key is None or not (is_grant or self._scopes):
                continue
            if recorded.event is None:  # it is not in memory
                self.check_scopes_soon()
                return
            scope = recorded.event.attributes["scope"]
            if is_grant or scope in self._scopes:
                scopes.add(scope)
        if scopes:
            self.check_scopes_soon(scopes)

    async def stop_start_requests(self, within: float) -> None:
        """Claim nothing more, and return when no StartRequest is in flight.

        Return after ``within`` seconds in any case.
        """
        self._is_stopping = True
        deadline = self._clock.monotonic() + within
        while self._engine.in_flight and self._clock.monotonic() < deadline:
            await self._clock.sleep(IDLE_CHECK_INTERVAL)

    async def run(self) -> None:
        """Send grants as soon as they may go, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                try:
                    waiting = await self._start_sending_turns(group)
                except StoreUnavailable:
                    await self._clock.sleep(RETRY_DELAY)
                    continue
                timeout = NOTICE_CHECK_INTERVAL if waiting else None
                await wait_for_event(self._wake, self._clock, timeout)
                self.check_scopes_soon(waiting)

    async def _start_sending_turns(self, group: asyncio.TaskGroup) -> set[str]:
        """Start a task for each scope to check where a StartRequest is due.

        Return the scopes where grants only wait for their notices. Raises StoreUnavailable.
        """
        scopes, self._scopes_to_check = self._scopes_to_check, set()
        # They are checked at the end of their turns. What is read now can be outdated until then.
        sending = {name for name, scope in self._scopes.items() if scope.is_sending}
        if scopes is not None:
            scopes -= sending
            if not scopes:
                return set()
        try:
            found = await self._store.read(partial(self._find_open_grants, scopes))
        except StoreUnavailable:
            self.check_scopes_soon(scopes)
            raise
        grants_by_scope: dict[str, list[_StoredOpenGrant]] = {}
        for each in found:
            grants_by_scope.setdefault(each.occurrence.scope, []).append(each)
        self._waiting_scopes.update(each.occurrence.scope for each in found if each.can_be_freed)
        for name in scopes if scopes is not None else self._scopes.keys() - sending:
            if name not in grants_by_scope:
                self._scopes.pop(name, None)
        waiting: set[str] = set()
        for name, open_grants in grants_by_scope.items():
            if name not in sending:
                scope = self._scopes.setdefault(name, _ScopeSendingState(name))
                scope.keep_only_grants(
                    (each.grant for each in open_grants), self._clock.monotonic()
                )
                if not self._start_sending_turn_if_due(scope, open_grants, group):
                    waiting.add(name)
        return waiting

    def _start_sending_turn_if_due(
        self,
        scope: _ScopeSendingState,
        open_grants: Sequence[_StoredOpenGrant],
        group: asyncio.TaskGroup,
    ) -> bool:
        """Start a task if a StartRequest is due; return False if grants only wait for notices."""
        allowed = [each for each in open_grants if not each.is_stopped]
        ready = [
            each
            for each in allowed
            if not each.has_waiting_notices
            or self._has_notice_delivery_wait_timed_out(scope, each.grant)
        ]
        if ready and not self._is_stopping:
            scope.is_sending = True
            group.create_task(
                self._run_sending_turn(
                    scope, scope.take_next_grants(ready, self._port.max_events_per_start_request)
                ),
                name=f"approvals: StartRequest in scope {scope.name}",
            )
            return True
        return not allowed or self._is_stopping

    def _find_open_grants(
        self, scopes: Iterable[str] | None, tx: Transaction
    ) -> list[_StoredOpenGrant]:
        """Return the open grants of these scopes; None: of all."""
        now, is_on = self._clock.now(), self._engine.effective_approval_mode(tx) == "on"
        found = []
        for grant, occurrence in tx.approvals.open_grants(scopes):
            status = self._engine.status(tx, occurrence, now) if is_on else None
            can_be_freed = status is not None and bool(
                status.waiting_for or status.active_standing_holds
            )
            is_stopped = status is None or can_be_freed or bool(status.active_holds)
            has_waiting_notices = not is_stopped and self._has_undelivered_notices(tx, occurrence)
            found.append(
                _StoredOpenGrant(
                    grant=grant,
                    occurrence=occurrence,
                    is_stopped=is_stopped,
                    can_be_freed=can_be_freed,
                    has_waiting_notices=has_waiting_notices,
                )
            )
        return found

    def _has_undelivered_notices(self, tx: Transaction, occurrence: TrackedEvent) -> bool:
        """Whether an event of this VM has notices that are not delivered yet.

        Events of other machines wait for none
        (docs/guarantees.md#notices-come-before-the-startrequest).
        """
        is_ours = self._names_this_vm(occurrence.event.resources)
        return is_ours and tx.deliveries.is_event_waiting(occurrence.key)

    def _has_notice_delivery_wait_timed_out(self, scope: _ScopeSendingState, grant: Grant) -> bool:
        """Whether the notices about the event have had ``tell_first``."""
        waited = self._clock.monotonic() - scope.grants[grant.id].first_seen
        return waited >= self._engine.settings.tell_first

    # --- one scope

    async def _run_sending_turn(
        self, scope: _ScopeSendingState, batch: Sequence[_StoredOpenGrant]
    ) -> None:
        """Send one StartRequest for the grants that still hold, and pause if it failed."""
        try:
            pause = await self._refresh_events_send_and_choose_pause(scope, batch)
            if pause:
                await self._clock.sleep(pause)
        finally:
            scope.is_sending = False
            self.check_scopes_soon([scope.name])

    async def _refresh_events_send_and_choose_pause(
        self, scope: _ScopeSendingState, batch: Sequence[_StoredOpenGrant]
    ) -> float:
        """Return how many seconds to pause before the next turn."""
        grants = [each.grant for each in batch]
        try:
            await self._port.refresh_events_of_grants(scope.name, grants)
        except SourceError:
            return RETRY_DELAY  # the port logs the error
        agent: str | None = None
        try:
            agent = self._port.choose_agent(scope.name, grants)
            is_sent = await self._claim_and_send(scope, batch, agent)
        except SourceError as error:
            return _count_scope_failure_and_choose_pause(error, scope, agent)
        except StoreUnavailable:
            return RETRY_DELAY
        return 0.0 if is_sent else NOTICE_CHECK_INTERVAL  # a transition will record why

    async def _claim_and_send(
        self, scope: _ScopeSendingState, batch: Sequence[_StoredOpenGrant], agent: str | None
    ) -> bool:
        """Return whether a grant could be claimed.

        Raises StoreUnavailable with nothing sent, and what `_send` raises.
        """
        if self._is_stopping:
            return False
        # From the claim on, only the answer decides about these grants. Set this before the claim
        # is on disk, because transitions run at any time. It takes effect with the claim, which
        # counts the attempt.
        attempts = {(each.grant.id, each.grant.attempts + 1) for each in batch}
        self._engine.in_flight |= attempts
        try:
            claims = await self._store.transact(
                partial(self._claim_ready_grants, scope, batch, agent)
            )
            if claims:
                await self._send(scope, claims)
        finally:
            self._engine.in_flight -= attempts
            self._on_sent(each.occurrence.key for each in batch)
        return bool(claims)

    def _claim_ready_grants(
        self,
        scope: _ScopeSendingState,
        batch: Sequence[_StoredOpenGrant],
        agent: str | None,
        tx: Transaction,
    ) -> list[ClaimedGrant]:
        # The fresh read may have added notices about these events.
        ready = [
            each.grant
            for each in batch
            if self._has_notice_delivery_wait_timed_out(scope, each.grant)
            or not self._has_undelivered_notices(
                tx, tx.occurrences.require_occurrence(each.grant.occurrence)
            )
        ]
        return self._engine.claim_grants(tx, ready, self._clock.now(), agent=agent)

    async def _send(self, scope: _ScopeSendingState, claims: Sequence[ClaimedGrant]) -> None:
        """Send one StartRequest and record its answer.

        Raises SourceError if IMDS neither accepted nor refused it.
        """
        for claim in claims:
            _log_before_sending_start_request(scope.name, claim)
        answer: SourceError | None = None
        try:
            await self._port.send_start_request(scope.name, claims)
        except SourceError as error:
            answer = error
        if answer is None or (isinstance(answer, SourceRefused) and len(claims) == 1):
            scope.reset_failures()
        elif isinstance(answer, SourceRefused):
            # One wrong event can be the reason for the 400.
            for claim in claims:
                scope.grants[claim.grant.id].is_unshared = True
        # The StartRequest was sent, so its answer counts even if the file cannot be written.
        now = self._clock.now()
        await self._store.transact(
            lambda tx: self._engine.record_start_answers(tx, claims, answer, now), fail_open=True
        )
        if answer is not None and not isinstance(answer, SourceRefused):
            raise answer


def _log_before_sending_start_request(scope: str, claim: ClaimedGrant) -> None:
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


def _count_scope_failure_and_choose_pause(
    error: SourceError, scope: _ScopeSendingState, agent: str | None
) -> float:
    """Return how many seconds a scope pauses after a StartRequest that failed."""
    if isinstance(error, StartRequestNotDelivered) and agent not in scope.unreached_agents:
        scope.unreached_agents.add(agent)
        return 0.0
    scope.unreached_agents.clear()
    if scope.failures == 0:
        _log.warning(
            "cannot send a StartRequest in scope %s, will try again: %s",
            scope.name,
            error.reason,
            extra=log_extra(scope=scope.name, agent=agent, reason=error.reason),
        )
    delay = min(RETRY_DELAY * 2.0**scope.failures, MAX_RETRY_DELAY)
    scope.failures += 1
    return max(delay, error.retry_after or 0.0)
