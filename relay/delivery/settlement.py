"""Writes down how deliveries went, for all sinks, in the order in which they went.

Nobody waits for it: should something be lost with the process, the same event is sent again with the same id. What was
delivered while the last batch was on its way to the disk goes together as the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any

from relay.errors import RelayError
from relay.outbox import Attempt, EntryState, SinkState
from relay.outbox.job import Work
from relay.outbox.sqlite import Store
from relay.outbox.transaction import Transaction

_log = logging.getLogger(__name__)


class SettlementBatcher:
    """What the workers have to say to the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._arrived: list[tuple[int, Attempt]] = []  # delivered, and not yet handed to the store
        self._waiting: list[Callable[[], None]] = []  # who is to hear when those are written
        self._busy = False  # a batch is being written, or will be in this turn of the loop

    def record_delivery(self, entry: int, attempt: Attempt, written: Callable[[], None]) -> None:
        """An entry has got through; ``written`` is called when that is written down, or cannot be."""
        self._arrived.append((entry, attempt))
        self._waiting.append(written)
        if not self._busy:
            self._busy = True
            asyncio.get_running_loop().call_soon(
                self._next
            )  # with all that arrive in this turn of the loop

    def record_deferral(self, entry: int, attempt: Attempt, until: datetime) -> None:
        """A try has failed, and there will be another at that moment."""
        self._remember(lambda tx: tx.deliveries.defer(entry, attempt, until))

    def record_settlement(
        self, entry: int, state: EntryState, reason: str, at: datetime, attempt: Attempt | None
    ) -> None:
        """An entry is over without being delivered; ``attempt``: by a try that failed."""

        def work(tx: Transaction) -> None:
            if attempt is not None:
                tx.deliveries.log_attempt(entry, attempt)
            tx.deliveries.settle(entry, state, reason, at)

        self._remember(work)

    def record_sink_state(self, sink: str, state: SinkState, reason: str) -> None:
        """A sink has another state now."""
        self._remember(lambda tx: tx.deliveries.set_sink_state(sink, state, reason))

    def close(self) -> None:
        """Hand over to the store what it does not have yet."""
        if self._arrived:
            self._hand_over()

    def _remember(self, work: Work[None]) -> None:
        self.close()  # what came before is written before
        self._submit(work).add_done_callback(_unless_unavailable)

    def _next(self) -> None:
        self._busy = bool(self._arrived)
        if self._busy:
            self._hand_over().add_done_callback(lambda _: self._next())

    def _hand_over(self) -> asyncio.Future[None]:
        arrived, self._arrived = self._arrived, []
        waiting, self._waiting = self._waiting, []

        def done(future: asyncio.Future[None]) -> None:
            _unless_unavailable(future)
            for written in waiting:
                written()

        future = self._submit(lambda tx: tx.deliveries.mark_delivered(arrived))
        future.add_done_callback(done)
        return future

    def _submit(self, work: Work[None]) -> asyncio.Future[None]:
        return self._store.submit(work, fail_open=True)


def _unless_unavailable(future: asyncio.Future[Any]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, RelayError):
        _log.error("a delivery could not be written down", exc_info=error)
