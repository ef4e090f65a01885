"""Takes requests of callers, and sends what was granted.

Each request is work for the store, in which `engine` decides it. What follows from a change,
whoever recorded it, is recorded in the same transaction (`Store.follow_up`). So `Gate.run` has two
tasks: it checks all events when time alone makes a transition due, and it sends what was granted
(`start_requests`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from relay.approvals import StartRequestPort
from relay.approvals.engine import ApprovalEngine
from relay.approvals.request import DecisionAnswer, Request, refuse
from relay.approvals.start_requests import RETRY_DELAY, StartRequestSender
from relay.clock import Clock
from relay.errors import StoreUnavailable
from relay.logs import log_extra
from relay.store import Mode
from relay.store.sqlite import Store, listening
from relay.store.standing_holds import StandingHolds
from relay.store.transaction import Transaction

T = TypeVar("T")
_log = logging.getLogger(__name__)
MAX_TIMER = 60.0
"""Seconds until the wall clock is read again: somebody may have set it."""
_NOT_RECORDED = refuse(
    503, "the decision cannot be recorded now; nothing was decided, try again", is_transient=True
)
_NOT_IN_FORCE = refuse(
    503,
    "the relay is starting or stopping: nothing can be decided now, try again",
    is_transient=True,
)


class NotDecidedHere(Exception):
    """Another relay decides this. The text names it."""


class DecisionHandler(Protocol):
    """What the channels of decisions call: the API, the chats and the consumer of AMQP.

    That of an agent is `relay.fleet.votes.VoteForwarder`, which asks the hub.
    """

    engine: ApprovalEngine

    async def submit(self, request: Request, /) -> DecisionAnswer:
        """Return the answer; 503 if it cannot be decided now. Raises NotDecidedHere."""

    async def read_standing_holds(self, read: Callable[[StandingHolds], T], /) -> T:
        """Return what ``read`` finds. Raises StoreUnavailable, NotDecidedHere."""

    async def set_approval_mode(self, mode: Mode, principal: str, /) -> Mode:
        """Return the mode in force with the switch. Raises StoreUnavailable, NotDecidedHere."""


@dataclass(eq=False)
class Gate:
    """The `DecisionHandler` of a relay that decides itself."""

    engine: ApprovalEngine
    store: Store
    port: StartRequestPort
    clock: Clock
    names_this_vm: Callable[[Sequence[str]], bool]
    """Says whether the resources of an event include this VM."""

    def __post_init__(self) -> None:
        self._sender = StartRequestSender(
            self.engine, self.store, self.port, self.clock, self.names_this_vm
        )
        self._wake = asyncio.Event()
        self._must_check_all = True
        self._is_in_force = False

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Decide, here and in what follows from each transaction, until the context is left.

        What was submitted before is recorded then. What follows is decided by this gate until the
        next one is in force.
        """
        listeners = self.store.listeners
        self.store.follow_up = lambda tx: self.engine.follow_up(tx, self.clock.now())
        with (
            listening(listeners.recorded, lambda _: self._wake.set()),
            listening(listeners.recorded, self._sender.on_recorded),
            listening(listeners.write_error_changed, self._on_write_error),
        ):
            self._is_in_force = True
            try:
                yield
            finally:
                self._is_in_force = False

    async def submit(self, request: Request) -> DecisionAnswer:
        """Decide one request; what was decided is on disk when this returns.

        The answer is 503 if it cannot be written (docs/guarantees.md#approvals-fail-closed), or if
        this gate is not in force: its rules and callers are not, either.
        """
        if not self._is_in_force:
            return _NOT_IN_FORCE
        try:
            # The request is decided even if the caller disconnects meanwhile.
            return await self.store.transact(lambda tx: self.engine.decide(tx, request))
        except StoreUnavailable:
            return _NOT_RECORDED

    async def read_standing_holds(self, read: Callable[[StandingHolds], T]) -> T:
        return await self.store.read(lambda tx: read(tx.standing_holds))

    async def set_approval_mode(self, mode: Mode, principal: str) -> Mode:
        now = self.clock.now()

        def set_switch(tx: Transaction) -> Mode:
            tx.store_approval_mode(mode, principal, now)
            return self.engine.effective_approval_mode(tx)

        effective = await self.store.transact(set_switch)
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

    def _on_write_error(self, reason: str | None) -> None:
        """While the file could not be written, nothing followed from what was recorded."""
        if reason is None:
            self.wake()

    async def stop_start_requests(self, within: float) -> None:
        """Claim nothing more; return when nothing is in flight, or after ``within`` seconds."""
        await self._sender.stop_start_requests(within)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._check_when_time_comes(), name="approvals: transitions")
            group.create_task(self._sender.run(), name="approvals: StartRequests")

    async def _check_when_time_comes(self) -> None:
        checked_at = self.clock.now()
        while True:
            self._wake.clear()
            before, checked_at = checked_at, self.clock.now()
            due = self.engine.next_change
            if (
                self._must_check_all
                or checked_at < before  # the time may have come, or come back, for any event
                or (due is not None and due <= checked_at)
            ):
                self._must_check_all = False
                try:
                    await self.store.transact(
                        lambda tx: self.engine.check_all(tx, self.clock.now())
                    )
                except StoreUnavailable:
                    self._must_check_all = True
                    await self.clock.wait(self._wake, RETRY_DELAY)
                    continue
                self._sender.check_waiting()
                due = self.engine.next_change
            timeout: float | None = None
            if due is not None:
                timeout = min((due - self.clock.now()).total_seconds(), MAX_TIMER)
            await self.clock.wait(self._wake, timeout)
