"""Records in the store how deliveries went, for all sinks, in the order of their ends.

No delivery waits for it. If something is lost with the process, the same event is sent again with
the same id. Deliveries that succeed while a batch is being written form the next batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any

from relay.errors import RelayError
from relay.outbox import Attempt, EntryState, SinkState
from relay.outbox.sqlite import Store, Work
from relay.outbox.transaction import Transaction

_log = logging.getLogger(__name__)


class ResultRecorder:
    """Groups the results of deliveries into transactions."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._delivered: list[tuple[int, Attempt]] = []  # not yet submitted
        self._callbacks: list[Callable[[], None]] = []  # one for each of them
        self._is_writing = False  # a batch is being written, or will be in this turn of the loop

    def record_delivery(
        self, entry_id: int, attempt: Attempt, on_written: Callable[[], None]
    ) -> None:
        """An entry was delivered. ``on_written`` is called once this is recorded, or cannot be."""
        self._delivered.append((entry_id, attempt))
        self._callbacks.append(on_written)
        if not self._is_writing:
            self._is_writing = True
            # Later in this turn of the loop, so that all its deliveries form one batch.
            asyncio.get_running_loop().call_soon(self._write_next_batch)

    def record_deferral(self, entry_id: int, attempt: Attempt, until: datetime) -> None:
        """A try failed, and the next one is due at ``until``."""
        self._submit_after_batch(lambda tx: tx.deliveries.defer(entry_id, attempt, until))

    def record_settlement(
        self, entry_id: int, state: EntryState, reason: str, at: datetime, attempt: Attempt | None
    ) -> None:
        """An entry ended undelivered. ``attempt`` is the try that failed, if there was one."""

        def work(tx: Transaction) -> None:
            if attempt is not None:
                tx.deliveries.log_attempt(entry_id, attempt)
            tx.deliveries.settle(entry_id, state, reason, at)

        self._submit_after_batch(work)

    def record_sink_state(self, sink: str, state: SinkState, reason: str) -> None:
        """A sink has a new state."""
        self._submit_after_batch(lambda tx: tx.deliveries.set_sink_state(sink, state, reason))

    def close(self) -> None:
        """Submit what was not submitted yet."""
        if self._delivered:
            self._submit_batch()

    def _submit_after_batch(self, work: Work[None]) -> None:
        self.close()  # keep the order
        self._submit(work).add_done_callback(_log_unexpected_error)

    def _write_next_batch(self) -> None:
        self._is_writing = bool(self._delivered)
        if self._is_writing:
            self._submit_batch().add_done_callback(lambda _: self._write_next_batch())

    def _submit_batch(self) -> asyncio.Future[None]:
        delivered, self._delivered = self._delivered, []
        callbacks, self._callbacks = self._callbacks, []

        def on_done(future: asyncio.Future[None]) -> None:
            _log_unexpected_error(future)
            for callback in callbacks:
                callback()

        future = self._submit(lambda tx: tx.deliveries.mark_delivered(delivered))
        future.add_done_callback(on_done)
        return future

    def _submit(self, work: Work[None]) -> asyncio.Future[None]:
        return self._store.submit(work, fail_open=True)


def _log_unexpected_error(future: asyncio.Future[Any]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, RelayError):
        _log.error("the result of a delivery could not be recorded", exc_info=error)
