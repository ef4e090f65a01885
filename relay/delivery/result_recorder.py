"""Records in the store how deliveries went, for all sinks, in the order of their ends.

The dispatcher makes one `ResultRecorder`, and every worker reports to it. No delivery waits for it.
If something is lost with the process, the same event is sent again with the same id. Deliveries
that succeed within a few milliseconds of each other, or while a batch is being written, form one
batch: a commit costs the same for one as for many.
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

BATCH_PAUSE = 0.005
"""Seconds. No delivery waits for it, and no more can be repeated: a sink has a limit of its own."""
FULL_BATCH = 32
"""Deliveries that do not wait for others. It is half of what a sink may have open, so that the sink
goes on while the batch is written."""

_log = logging.getLogger(__name__)


class ResultRecorder:
    """Groups the results of deliveries into transactions.

    ``pause`` is how many seconds the first delivery of a batch waits for others.
    """

    def __init__(self, store: Store, *, pause: float = BATCH_PAUSE) -> None:
        self._store = store
        self._pause = pause
        self._delivered: list[tuple[int, Attempt]] = []  # not yet submitted
        self._callbacks: list[Callable[[], None]] = []  # one for each of them
        self._timer: asyncio.TimerHandle | None = None  # ends the pause of the next batch
        self._is_writing = False

    def record_delivery(
        self, entry_id: int, attempt: Attempt, on_written: Callable[[], None]
    ) -> None:
        """An entry was delivered. ``on_written`` is called once this is recorded, or cannot be."""
        self._delivered.append((entry_id, attempt))
        self._callbacks.append(on_written)
        self._write_batch_when_due()

    def record_failed_attempt(self, entry_id: int, attempt: Attempt, until: datetime) -> None:
        """A try failed, and the next one is due at ``until``."""
        self._submit_after_batch(lambda tx: tx.deliveries.defer(entry_id, attempt, until))

    def record_undelivered(
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

    def submit_pending_results(self) -> None:
        """Submit what was not submitted yet."""
        self._stop_timer()
        if self._delivered:
            self._submit_batch()

    def _submit_after_batch(self, work: Work[None]) -> None:
        self.submit_pending_results()  # keep the order
        self._store.submit(work, fail_open=True).add_done_callback(_log_unexpected_error)

    def _write_batch_when_due(self) -> None:
        if self._is_writing or not self._delivered:
            return
        if len(self._delivered) >= FULL_BATCH:
            self._write_batch()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._write_batch)

    def _write_batch(self) -> None:
        self._stop_timer()
        self._is_writing = True
        self._submit_batch().add_done_callback(self._on_batch_written)

    def _on_batch_written(self, _: asyncio.Future[None]) -> None:
        self._is_writing = False
        self._write_batch_when_due()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _submit_batch(self) -> asyncio.Future[None]:
        delivered, self._delivered = self._delivered, []
        callbacks, self._callbacks = self._callbacks, []

        def on_done(future: asyncio.Future[None]) -> None:
            _log_unexpected_error(future)
            for callback in callbacks:
                callback()

        future = self._store.submit(
            lambda tx: tx.deliveries.mark_delivered(delivered), fail_open=True
        )
        future.add_done_callback(on_done)
        return future


def _log_unexpected_error(future: asyncio.Future[Any]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, RelayError):
        _log.error("the result of a delivery could not be recorded", exc_info=error)
